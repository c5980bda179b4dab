"""tau2-bench as a suite: customers of an airline, a shop and a telephone company, by its own tools, policies and scoring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrl.contrib.suites.benchmarks import message_of, pass_hat_table
from agentrl.contrib.suites.suite import SuiteEnv, SuiteTask, known_word
from agentrl.contrib.users import ModelUser
from agentrl.data.trajectory import Json
from agentrl.env import Message, Problem, Task, ToolCall
from agentrl.env.official import OfficialRow, Played
from agentrl.env.users import UserModel

from .domains import NAMES, Domain, domain, load_tasks, text_constant
from .sides import AskedUser, two_sided_turns

STOPS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
GUIDES = {False: "simulation_guidelines.md", True: "simulation_guidelines_tools.md"}


class Tau2(SuiteEnv):
    """Serve a customer by a policy. The customer has tools too (a phone, in telecom), which the agent must talk them through."""

    id = "agentrl/Tau2-v0"
    host_params = SuiteEnv.host_params | {"user_args"}
    reward = "tau2"
    summary = "tau2-bench: customers of an airline, a shop, a telephone company, with its own tools, policies and scoring"
    suite = "tau2"
    obtain = "git clone https://github.com/sierra-research/tau2-bench"
    required = ("pyproject.toml", "src/tau2/environment/environment.py", f"data/tau2/user_simulator/{GUIDES[False]}")
    files = (
        "pyproject.toml",
        "src/tau2/agent/llm_agent.py",
        "src/tau2/orchestrator/orchestrator.py",
        "src/tau2/user/*.py",
        *(f"src/tau2/{room}/*.py" for room in ("data_model", "environment", "utils")),
        *(f"src/tau2/domains/{name}/*.py" for name in NAMES),
        *(f"data/tau2/domains/{name}/{kind}" for name in NAMES for kind in ("*db.*", "*.md", "tasks.json", "split_tasks.json")),
        "data/tau2/user_simulator/*.md",
    )

    def __init__(
        self,
        *,
        domain: str = "all",
        full: bool = False,
        user: str = "gold",
        user_args: Mapping[str, Any] | None = None,
        max_steps: int = 200,
        max_errors: int = 10,
        **base: Any,
    ) -> None:
        """`domain`: mock, airline, retail or telecom, or "all". `full`: all of a domain's tasks, not its base set (telecom: 2,285
        for 114). `user`: "gold" (plays what the task's gold actions ask of it), or a model's name for litellm, which gets
        `user_args`. `max_steps`, `max_errors`: messages, and refused calls, after which tau2 ends an episode with 0. Raises
        ConfigError for another domain, and as every suite."""
        super().__init__(**base)
        known_word(domain, (*NAMES, "all"), "tau2: domain")
        self.domains, self.full = NAMES if domain == "all" else (domain,), full
        self.model, self.user_args = user, dict(user_args or {})
        self.max_steps, self.max_errors = max_steps, max_errors
        self.world: Any = None
        self.ended, self.errors, self.said = "", 0, 0

    def load(self) -> Iterable[SuiteTask]:
        for name in self.domains:
            yield from load_tasks(self.source, name, self.full)

    def whole(self) -> Sequence[SuiteTask]:
        return ()  # the splits are tau2's own; mock, which has none, holds out single tasks

    # -- the episode -------------------------------------------------------------------------------

    @property
    def here(self) -> Domain:
        """The running task's domain."""
        return domain(self.source, self.task.data["domain"])

    async def setup(self, task: Task) -> None:
        self.world, self.ended, self.errors, self.said = self.here.begin(task.data["start"]), "", 0, 0
        self.toolbox.offer(self.here.tools)
        self.user_toolbox.offer(self.here.user_tools)
        self.user = self.gold_user(task) if self.model == "gold" else self._model_user(task)

    def user_models(self) -> Sequence[UserModel]:
        return () if self.model == "gold" else (UserModel(self.model, self.user_args),)

    def _model_user(self, task: Task) -> ModelUser:
        own = self.user_toolbox.schemas()
        guide = (self.source / "data/tau2/user_simulator" / GUIDES[bool(own)]).read_text(encoding="utf-8")
        form = text_constant(self.source / "src/tau2/user/user_simulator.py", "SYSTEM_PROMPT")
        system = form.format(
            global_user_sim_guidelines_with_persona=guide.replace("<PERSONA_GUIDELINES>", ""), instructions=task.data["scenario"]
        )
        return ModelUser(model=self.model, system=system, stop=STOPS, tools=own, **self.user_args)

    async def prompt(self, task: Task) -> list[Message]:  # type: ignore[override]
        code = self.source / "src/tau2"
        form, own = (text_constant(code / "agent/llm_agent.py", name) for name in ("SYSTEM_PROMPT", "AGENT_INSTRUCTION"))
        opening = [Message("system", form.format(agent_instruction=own, domain_policy=self.world.get_policy()))]
        history = (task.data["start"] or {}).get("message_history") or []
        greeting = text_constant(code / "orchestrator/orchestrator.py", "DEFAULT_FIRST_AGENT_MESSAGE")
        opening += [message_of(one) for one in history] or [Message("assistant", greeting)]
        if opening[-1].role == "assistant":
            said, self.said = await self.ask_user(opening), 1
            opening += [] if said is None else [Message("user", said)]
        return opening

    async def user_reply(self, message: Message) -> list[Message] | None:
        if not message.content.strip():
            self.ended = "agent_error"
        if self.ended or self.limited():
            return None
        said = await self.ask_user()
        self.said += 1
        if self.limited():
            return None
        self.ended = "user_stop" if said is None else ""
        return None if said is None else [Message("user", said)]

    def error_text(self, call: ToolCall, problem: Problem) -> str:
        """What a refused call shows, in tau2's words; it also counts for `max_errors`."""
        self.errors += 1
        self.limited()
        return f"Error: Tool '{call.name}' not found." if problem.kind == "unknown_tool" else problem.message

    def limited(self) -> bool:
        """End the episode at tau2's own limits. A step is a message: of either side, or of the tools to one of them."""
        assert self._env_record is not None
        turns, asked = self._env_record.turns, {(made.turn, made.step) for made in self._env_record.user_calls}
        steps = len(turns) + sum(bool(turn.message.tool_calls) for turn in turns) + self.said + 2 * len(asked)
        over = "too_many_errors" if self.errors >= self.max_errors else "max_steps" if steps >= self.max_steps else ""
        if over:
            self.ended = over
            self.finish()
        return bool(over)

    def state(self) -> Json:
        unmet = [one for one in self.task.gold["assertions"] if not self._holds(one)]
        return {"ended": self.ended, "changes": self.here.changes(self.world), "unmet": unmet}

    def _holds(self, assertion: Json) -> bool:
        try:
            checked = self.here.types.EnvAssertion.model_validate(assertion)
            return bool(self.world.run_env_assertion(checked, raise_assertion_error=False))
        except ValueError:  # what it is about does not exist; theirs raises
            return False

    # -- scripted policies, official metrics -------------------------------------------------------

    def gold_user(self, task: Task) -> AskedUser:
        return AskedUser(task.data["scenario"], task.gold["calls"])

    def gold_turns(self, task: Task) -> list[Message]:
        return [*two_sided_turns(task.gold["calls"]), Message("assistant", "\n".join([*task.gold["say"], "That is all."]))]

    @classmethod
    def official(cls, episodes: Sequence[Played]) -> Sequence[OfficialRow]:
        """pass^k of each domain, and pass^1 of their mean, as the leaderboard has it."""
        return pass_hat_table(episodes, "domain")
