"""verifiers (package verifiers), both ways: our environment as theirs, and theirs as ours."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, partial, wraps
from inspect import isawaitable
from typing import Any

from agentrl.contrib.toolkit.taskdata import held_out_families
from agentrl.data.images import Image, split_at_images
from agentrl.data.trajectory import Json, Message, StopReason, Task, ToolCall, ToolResult, Turn
from agentrl.env.authoring import SPLITS
from agentrl.env.base import ScorerLike, ToolEnv
from agentrl.env.spaces import Observation
from agentrl.env.toolbox import Toolbox
from agentrl.env.tools import Tool
from agentrl.render.tool_calls import call_from_json, malformed_call, whole_json
from agentrl.utils.errors import EnvError, TaskDataError, need_package
from agentrl.utils.redaction import redact
from agentrl.utils.threads import setting

_NEEDS = ("verifiers", "verifiers needs its package: pip install 'agentrl[verifiers]'")


# -- messages, both ways ---------------------------------------------------------------------------


def _to_theirs(message: Message) -> dict[str, Any]:
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.images:
        row["content"] = [
            {"type": "text", "text": part} if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": f"data:{part.media_type};base64,{part.data}"}}
            for part in split_at_images(message.content, message.images) if part
        ]  # fmt: skip
    if message.reasoning:
        row["reasoning_content"] = message.reasoning
    if message.tool_calls:
        row["tool_calls"] = [
            {"id": c.id, "name": c.name, "arguments": c.raw if c.arguments is None else json.dumps(c.arguments)}
            for c in message.tool_calls
        ]
    if message.role == "tool":
        row["tool_call_id"] = message.tool_call_id or ""
    return row


def _to_ours(message: Any) -> Message:
    row = message if isinstance(message, dict) else message.model_dump()
    content = row.get("content") or ""
    parts = [content] if isinstance(content, str) else list(map(_part, content))
    images = tuple(part for part in parts if isinstance(part, Image))
    text = "\n".join(part.line if isinstance(part, Image) else part for part in parts)
    calls = tuple(_call(call) for call in row.get("tool_calls") or ())
    return Message(row["role"], text, calls, row.get("tool_call_id"), reasoning=row.get("reasoning_content"), images=images)


def _part(part: dict[str, Any]) -> str | Image:
    """A part of a message as its text or image. Raises EnvError for anything else, such as an image on the web, or sound."""
    if part.get("type") == "text":
        return str(part.get("text") or "")
    image = part.get("image_url")
    form, _, data = str(image.get("url") if isinstance(image, dict) else image).partition(";base64,")
    if not form.startswith("data:image/"):
        raise EnvError(
            f"a message has a part of type {part.get('type')!r} ({form:.60}); expected text, or an image as a data: URL"
        )
    try:
        return Image.read(base64.b64decode(data, validate=True))
    except ValueError as problem:
        raise EnvError(f"a message has an image that is not taken: {problem}") from problem


def _call(row: dict[str, Any]) -> ToolCall:
    row = {**row, **(row.get("function") or {})}  # rows may be in OpenAI's layout
    name, number = row["name"], row.get("id") or row["name"]
    raw = row["arguments"] if isinstance(row["arguments"], str) else json.dumps(row["arguments"])
    try:
        return call_from_json({"name": name, "arguments": whole_json(raw)}, number, raw)
    except ValueError as problem:
        return malformed_call(number, raw, f"not valid JSON: {problem}", name)


# -- ours as theirs --------------------------------------------------------------------------------


def _rows(build: Callable[[], ToolEnv], tasks: int, split: str) -> Any:
    from datasets import Dataset

    env = build()
    made = []
    for seed in range(tasks):
        observation, _ = env.reset(seed=seed, options={"split": split})
        if any(message.images for message in observation):  # a column of a dataset is of texts, or of lists of parts
            raise EnvError(f"to_verifiers: the opening of seed {seed} has images; let a tool answer them")
        prompt = [_to_theirs(message) for message in observation]
        made.append({"prompt": prompt, "answer": "", "info": json.dumps({"seed": seed, "split": split})})
    env.close()
    return Dataset.from_list(made)


def to_verifiers(
    build: Callable[[], ToolEnv], scorer: ScorerLike, *, tasks: int = 100, max_turns: int = 20, **options: Any
) -> Any:
    """A verifiers MultiTurnEnv over an environment: `tasks` tasks each for train (dataset) and held-out
    (eval dataset), scored by our reward spec. An episode that could not be scored has the reward nan.
    `options` go to verifiers. Raises DependencyError without the package.
    """
    need_package(*_NEEDS)
    import verifiers as vf
    from verifiers.utils.message_utils import normalize_messages

    async def reward(state: Any) -> float:
        score = await scorer.ascore(state["agentrl_env"].trajectory)
        return float("nan") if score.value is None else float(score.value)

    class Exported(vf.MultiTurnEnv):  # type: ignore[misc]
        async def setup_state(self, state: Any) -> Any:
            env = state["agentrl_env"] = build()
            info = state["info"]
            await env.areset(seed=info["seed"], options={"split": info["split"]})
            return state

        async def env_response(self, messages: Any, state: Any, **more: Any) -> Any:
            try:
                answer = await state["agentrl_env"].astep(_to_ours(messages[-1]))
            except EnvError as fault:
                raise vf.Error(str(fault)) from fault
            observation, _, terminated, truncated, _ = answer
            theirs = normalize_messages([_to_theirs(m) for m in observation], field_name="env_response")
            if terminated or truncated:
                state["final_env_response"] = theirs
            return theirs

        @vf.cleanup  # type: ignore[untyped-decorator]
        async def end_episode(self, state: Any) -> None:
            env = state["agentrl_env"]
            if env.is_open:
                await env.aend(StopReason.MAX_TURNS)

    functions = [schema["function"] for schema in build().toolbox.schemas()]
    tools = [vf.Tool(name=f["name"], description=f.get("description", ""), parameters=f["parameters"])
             for f in functions]  # fmt: skip
    # In a separate thread, so that this can also be called while an event loop runs.
    with ThreadPoolExecutor(max_workers=1) as pool:
        train, held_out = pool.map(partial(_rows, build, tasks), SPLITS)
    return Exported(
        dataset=train, eval_dataset=held_out, rubric=vf.Rubric(funcs=[reward]), tool_defs=tools, max_turns=max_turns, **options
    )


# -- theirs as ours --------------------------------------------------------------------------------


class VerifiersEnv(ToolEnv):
    """A verifiers environment (SingleTurn, MultiTurn or Tool). Its own rubric's reward is in the state."""

    id = "verifiers/Env-v0"
    host_params = frozenset({"load", "args"})
    shared = frozenset({"theirs"})

    def __init__(self, *, load: str = "", args: dict[str, Any] | None = None, environment: Any = None, **base: Any) -> None:
        """`load`, `args`: arguments of `verifiers.load_environment`; or an existing `environment`. Raises
        DependencyError without the package."""
        need_package(*_NEEDS)
        import verifiers as vf

        super().__init__(**base)
        self.theirs = environment if environment is not None else vf.load_environment(load, **(args or {}))
        _record_faults(self.theirs.rubric)
        self.theirs_state: Any = None
        self.result: dict[str, Json] = {}
        self._offer(self.theirs.tool_defs or ())

    def _offer(self, tools: Iterable[Any]) -> None:
        """Offer these tools of theirs and no others of theirs, before those of the run."""
        made = Toolbox(Tool.from_schema(one.name, one.description, dict(one.parameters), _refuse_call) for one in tools)
        self.toolbox.table = {name: one for name, one in self.toolbox.table.items() if one.function is not _refuse_call}
        self.toolbox.offer(made.table)

    def _dataset(self, split: str) -> tuple[Any, Sequence[int]]:
        """Return a dataset and the places of the split's rows in it. Without an eval dataset, for which theirs would be the one
        for training, the rows are divided by a hash of the prompt."""
        held_out = self.theirs.build_eval_dataset()
        rows = self.theirs.get_dataset() if split == "train" or held_out is None else held_out
        if held_out is not None:
            return rows, range(len(rows))
        if not hasattr(self.theirs, "agentrl_held"):  # once for all episodes
            prompts = [json.dumps(row["prompt"], default=str) for row in rows]
            chosen = held_out_families(prompts)
            self.theirs.agentrl_held = [prompt in chosen for prompt in prompts]
        return rows, [place for place, held in enumerate(self.theirs.agentrl_held) if held == (split != "train")]

    def make_task(self, rng_seed: int, split: str) -> Task:
        rows, places = self._dataset(split)
        if not places:
            raise TaskDataError(f"verifiers: no tasks of split {split!r}. Give its environment more rows, or an eval dataset")
        draw = places[rng_seed % len(places)]
        row = json.loads(json.dumps(rows[draw], default=str))
        gold = {"answer": row.get("answer", "")}
        try:
            if isinstance(row["prompt"], str):  # for models without chats
                raise EnvError("its prompt is a text. Make it a list of messages")
            list(map(_to_ours, row["prompt"]))
        except EnvError as problem:
            raise TaskDataError(f"verifiers: row {draw} of {split}: {problem}") from problem
        return Task(f"verifiers/{split}/{draw}", rng_seed, split, {"row": row}, gold)

    def task_count(self, split: str) -> int | None:
        return len(self._dataset(split)[1])

    def prompt(self, task: Task) -> list[Message]:
        return [_to_ours(message) for message in task.data["row"]["prompt"]]

    async def setup(self, task: Task) -> None:
        self.result = {}
        row = {"example_id": 0, **task.data["row"]}
        state = await self.theirs.init_state(row, client=no_client(), model="")
        self.theirs_state = await self.theirs.setup_state(state) or state
        self._offer(self.theirs_state["tool_defs"])  # a row may have tools of its own

    def state(self) -> Json:
        return dict(self.result)

    async def _answer(self, turn: Turn) -> tuple[Observation, bool]:
        """Their rollout loop, inverted: our turn goes into their state, and their environment answers it."""
        from verifiers.types import AssistantMessage

        state = self.theirs_state
        said = AssistantMessage.model_validate({**_to_theirs(turn.message)})
        before = state["trajectory"][-1] if state["trajectory"] else None
        history = state["prompt"] if before is None else before["full"]
        step = {"prompt": history, "completion": [said], "reward": None, "extras": {}, "full": [*history, said]}
        state["trajectory"].append(step)
        if await self.theirs.is_completed(state):
            return [], True
        answers = await self.theirs.env_response(step["full"], state)
        step["full"] = [*step["full"], *answers]
        names = {call.id: call.name for call in turn.message.tool_calls}
        made = map(_to_ours, answers)
        ours = [replace(one, name=names.get(one.tool_call_id or ""), content=redact(one.content)) for one in made]
        turn.results = [
            ToolResult(m.tool_call_id or "", m.name or "", m.content, images=m.images) for m in ours if m.role == "tool"
        ]
        return ours, await self.theirs.is_completed(state)

    async def conclude(self) -> None:
        """Score the episode, also one cut at a limit of ours. Raises EnvError for a reward function that failed."""
        state, faults = self.theirs_state, list[str]()
        with setting(_FAULTS, faults):
            await self.theirs.cleanup(state)
            await self.theirs.rubric.score_rollout(state)
        if faults:
            raise EnvError(f"verifiers: its reward function {faults[0]}")
        self.result = {"reward": float(state["reward"]), "metrics": dict(state["metrics"] or {})}


_FAULTS: ContextVar[list[str]] = ContextVar("faults of reward functions")


def _record_faults(rubric: Any) -> None:
    """Let reward functions note what they raise: their rubric logs it and goes on with 0, also if a judge is out."""
    for inner in getattr(rubric, "rubrics", ()):
        _record_faults(inner)
    counted = zip(rubric.funcs, rubric.weights, strict=True)
    rubric.funcs = [_with_fault_record(one) if weight and not hasattr(one, "noted_here") else one for one, weight in counted]


def _with_fault_record(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            answer = function(*args, **kwargs)
            answer = await answer if isawaitable(answer) else answer
            return answer if isinstance(answer, list) else float(answer)  # a list is of a group
        except Exception as fault:
            _FAULTS.get([]).append(f"{function.__name__} failed: {type(fault).__name__}: {fault}")
            raise

    call.noted_here = True  # type: ignore[attr-defined]
    return call


@cache
def no_client() -> Any:
    """Takes the place of verifiers' model client, which is never used because the policy is on our side."""
    from verifiers.clients import Client

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise EnvError("a verifiers environment called its model client, which does not exist here; only the policy samples")

    return type("NoClient", (Client,), dict.fromkeys(Client.__abstractmethods__, refuse))(object())


async def _refuse_call(**arguments: Any) -> None:
    raise EnvError("tools of a verifiers environment are called by its own env_response")
