"""Prepare data for training: choose episodes, render conversations, store token rows."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import Any

from agentrl.config.schema import DataConfig
from agentrl.contrib.offline.layouts import Chat, openai_chat, preference, sharegpt_chat
from agentrl.contrib.offline.store import About, RowPlace, RowWriter, rows_of, sources
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Trajectory
from agentrl.render.base import Renderer
from agentrl.reward.values import turn_places
from agentrl.utils.errors import BadRowError, ConfigError, RenderError
from agentrl.utils.files import open_plain
from agentrl.utils.parsing import read_json

TaskKey = tuple[str, str, int, str]


@dataclass(frozen=True, slots=True)
class Scored:
    """An episode in a file. The task includes a digest of its text: ids and seeds can be equal under different `env.params`."""

    place: RowPlace
    task: TaskKey
    given: int
    reward: float


@contextmanager
def _as_bad_row() -> Iterator[None]:
    """Turn the errors of reading an episode into BadRowError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise BadRowError(f"not an episode of this version of agentrl: {type(problem).__name__}: {problem}"[:200]) from None


def filter_episode(place: RowPlace, row: Mapping[str, Any], data: DataConfig, passed: Counter[str]) -> Scored | None:
    """Return the episode of a row if it passes the filters; else None, counting the reason in `passed`. Raises BadRowError."""
    with _as_bad_row():
        task, reward = row["task"], row["reward"]
        said = sha256(json.dumps([task.get("data"), task.get("gold")], sort_keys=True).encode()).hexdigest()[:16]
        key = (str(row.get("env") or row["env_id"]), str(task["id"]), int(task["seed"]), said)
        given, split, success = int(row.get("given", 0)), task.get("split", "train"), row.get("success")
    if reward is not None and (type(reward) not in (int, float) or not math.isfinite(reward)):
        raise BadRowError(f"reward: expected a number, got {reward!r}"[:200])
    why = None
    if data.split is not None and split != data.split:
        why = f"of the split {split!r}, not data.split = {data.split!r}"
    elif reward is None:
        why = "unscored"
    elif data.loss == "dpo" and row.get("parent") is not None:
        why = "branches of other episodes (rollout.branch), without tokens of their first turns to compare"
    elif data.min_reward is not None and reward < data.min_reward:
        why = f"below data.min_reward = {data.min_reward:g}"
    elif data.success and success is not True:
        why = "no success (data.success)"
    if why is not None:
        passed[why] += 1
        return None
    return Scored(place, key, given, float(reward))


def best(found: Iterable[Scored], data: DataConfig, passed: Counter[str]) -> list[Scored]:
    """Keep the `data.per_task` episodes of highest reward of each task (ties: the first), in file order."""
    episodes = list(found)
    if data.per_task is None:
        return episodes
    kept = [one for same in _alike(episodes, "task") for one in sorted(same, key=lambda one: -one.reward)[: data.per_task]]
    if len(episodes) > len(kept):
        passed[f"more than data.per_task = {data.per_task} of a task"] += len(episodes) - len(kept)
    chosen = {id(one) for one in kept}
    return [one for one in episodes if id(one) in chosen]


def pairs(found: Iterable[Scored], data: DataConfig, passed: Counter[str]) -> Iterator[tuple[Scored, Scored]]:
    """Pair episodes of each task as (better, worse): best with worst, then the next of both. Yields at most `data.per_task`
    (default 1) pairs per task and given turns, whose rewards differ by `data.margin`. An episode is in at most one pair."""
    for same in _alike(found, "task", "given"):
        ranked = sorted(same, key=lambda one: -one.reward)
        number = 0
        while number < (data.per_task or 1) and number < len(ranked) - 1 - number:
            better, worse = ranked[number], ranked[-1 - number]
            if better.reward - worse.reward < data.margin:
                break
            yield better, worse
            number += 1
        if len(ranked) > 2 * number:
            passed["no pair: alike in reward, or beyond data.per_task"] += len(ranked) - 2 * number


def _alike(found: Iterable[Scored], *fields: str) -> list[list[Scored]]:
    groups: dict[Any, list[Scored]] = defaultdict(list)
    for one in found:
        groups[attrgetter(*fields)(one)].append(one)
    return list(groups.values())


def render_chat(chat: Chat, renderer: Renderer) -> list[TokenLedger]:
    """Render a chat to ledgers: `sampled` marks the tokens of trained messages (logprob 0, version 0).

    There are several ledgers if the chat template rewrites earlier turns. Raises BadRowError if the template cannot render
    the chat, or if its rendered calls parse to different calls.
    """
    try:
        renderer = renderer.with_tools(chat.tools)
        messages, places = chat.messages, [n for n, message in enumerate(chat.messages) if message.role == "assistant"]
        if places[0] == 0:
            raise BadRowError("it begins with an assistant message, without a prompt before it")
        begun = places[0]
        ledgers = [TokenLedger()]
        ledgers[0].append_context(renderer.start(messages[:begun], chat.tools), 0)
        for turn, place in enumerate(places):
            try:
                ids = renderer.assistant(messages[place])
            except RenderError as problem:
                raise BadRowError(f"messages[{place}]: {problem}") from None
            if calls := [(call.name, call.arguments) for call in messages[place].tool_calls]:
                read = [(call.name, call.arguments) for call in renderer.parse(ids, "stop").tool_calls]
                if read != calls:  # a policy that samples these tokens would make other calls
                    raise BadRowError(
                        f"messages[{place}]: its calls change when the model's chat template renders them and they are parsed"
                    )
            if chat.trained[place]:
                ledgers[-1].append_sampled(ids, [0.0] * len(ids), [0] * len(ids), turn)
            else:
                ledgers[-1].append_context(ids, turn)
            if turn + 1 == len(places):
                break
            until = places[turn + 1]
            following = messages[place + 1 : until]
            if renderer.keeps(messages[place], following, messages[:place], begun):
                ledgers[-1].append_context(renderer.extend("stop", following, ids[-1]), turn + 1)
            else:
                begun = until
                ledgers.append(TokenLedger())
                ledgers[-1].append_context(renderer.start(messages[:until], chat.tools), turn + 1)
        return [ledger for ledger in ledgers if ledger.sampled_tokens]
    except RenderError as problem:
        raise BadRowError(f"the model's chat template cannot render it: {problem}") from None


def chat_of(episode: Trajectory) -> Chat:
    """Return an episode's messages as a chat to render again. The opening history, given turns, and those before it branched off
    another episode are context. Raises BadRowError if its conversation was rewritten."""
    if episode.rewrites:
        raise BadRowError("a context policy rewrote its conversation, so its messages are not those that the model saw")
    own = turn_places(episode)[max(episode.given, episode.branch_turn) :]
    if not own:
        raise BadRowError("the policy sampled none of its turns")
    messages = tuple(episode.messages[: own[-1] + 1])
    return Chat(messages, tuple(place in own for place in range(len(messages))), tuple(episode.tools))


NAMED = 3
"""Number of bad rows that an error lists."""
LAYOUTS = (
    "an episode of a run, OpenAI's messages, ShareGPT's conversations (Hermes, ToolACE), or with a loss of pairs prompt, chosen "
    "and rejected"
)
Ledgers = list[TokenLedger]


class Preparation:
    """Reads the data of a config once. `longest`: most tokens per row; `rows`: number of rows read so far."""

    def __init__(self, data: DataConfig, renderer: Renderer, tokenizer: Any, longest: int) -> None:
        self.data, self.renderer, self.tokenizer, self.longest = data, renderer, tokenizer, longest
        self.each = 1 if data.loss == "sft" else 2
        self.rows = self.episodes = 0
        self.left_out: list[tuple[str, str]] = []
        self.passed: Counter[str] = Counter()
        self.unread: Counter[str] = Counter()

    def write(self, folder: Path, seed: int) -> About:
        """Write the store. Raises ConfigError for too many bad rows, no examples, or tokens of another tokenizer."""
        found: list[Scored] = []
        with RowWriter(folder, self.each) as writer:
            for file, split in sources(self.data.path).items():
                for place, row in rows_of(file):
                    self.rows += 1
                    with self._attempt(place):
                        self._row(place, row, split, found, writer)
            choose: Callable[..., Iterable[Sequence[Scored]]] = pairs if self.each == 2 else lambda *given: zip(best(*given))
            for episodes in choose(found, self.data, self.passed):
                with self._attempt(episodes[0].place):
                    self._add(writer, str(episodes[0].task), [self._ledgers(one.place) for one in episodes])
            share = len(self.left_out) / max(self.rows, 1)
            named = "".join(f"\n  {place}: {why}" for place, why in self.left_out[:NAMED])
            more = f"\n  ... and {len(self.left_out) - NAMED} more" if len(self.left_out) > NAMED else ""
            if share > self.data.max_bad:
                raise ConfigError(
                    f"data.path: {len(self.left_out)} of {self.rows} rows cannot be used ({share:.1%}), and data.max_bad = "
                    f"{self.data.max_bad:g}; repair them, or raise data.max_bad:{named}{more}"
                )
            if not writer.examples:
                filters = "".join(f"\n  {count}: {why}" for why, count in self.passed.most_common())
                raise ConfigError(
                    f"data.path: nothing to train on in {self.rows} rows:{filters + named or ' the files are empty'}"
                )
            of_episodes = ("min_reward", "success", "per_task", "rerender", "margin")
            key = next((key for key in of_episodes if getattr(self.data, key) != DataConfig.model_fields[key].default), None)
            if key is not None and not self.episodes:
                raise ConfigError(f"data.{key} applies to recorded episodes, and none of the {self.rows} rows is one. Remove it")
            return writer.finish(self.data.heldout, seed, self.rows, self.left_out, dict(self.passed), dict(self.unread))

    @contextmanager
    def _attempt(self, place: RowPlace) -> Iterator[None]:
        try:
            yield
        except BadRowError as problem:
            self.left_out.append((str(place), str(problem)))

    def _row(
        self, place: RowPlace, row: Mapping[str, Any] | BadRowError, split: str | None, found: list[Scored], writer: RowWriter
    ) -> None:
        """Render a chat now; collect an episode in `found` until all of its task are known. `split`: by the file's name."""
        if isinstance(row, BadRowError):
            raise row
        if row.get("ledgers") is not None and "task" in row:
            self.episodes += 1
            if place.offset < 0:
                raise BadRowError(
                    "episodes are read from JSON lines alone, as runs write them; name the run, or its .jsonl files"
                )
            if (one := filter_episode(place, row, self.data, self.passed)) is not None:
                found.append(one)
        elif None not in (split, self.data.split) and split != self.data.split:
            self.passed[f"of the split {split!r}, not data.split = {self.data.split!r}"] += 1
        else:
            table = place.offset < 0
            keys = {key for key, value in row.items() if value is not None}
            paired = not keys.isdisjoint(("chosen", "preferred_output"))
            if paired != (self.each == 2) or keys.isdisjoint(("chosen", "preferred_output", "messages", "conversations")):
                expected = "a pair (chosen and rejected)" if self.each == 2 else "a conversation or an episode"
                shown = ", ".join(list(row)[:6]) or "no keys"
                raise BadRowError(
                    f'data.loss = "{self.data.loss}" takes {expected}, and this row has {shown} (layouts: {LAYOUTS})'
                )
            chats: tuple[Chat, ...] = preference(row, table=table) if paired else ()
            chats = chats or (openai_chat(row, table=table) if "messages" in keys else sharegpt_chat(row),)
            ledgers = [render_chat(chat, self.renderer) for chat in chats]
            sides = [[(one.ids(), one.sampled.tolist()) for one in side] for side in ledgers]
            if paired and sides[0] == sides[1]:  # also if they differ in ids of calls, or in what the template drops
                raise BadRowError("chosen and rejected are equal to the model")
            for chat in chats:
                self.unread += chat.unread
            # Named by its content: a duplicate conversation must not be both trained on and held out.
            self._add(writer, sha256("\n".join(sorted(chat.content for chat in chats)).encode()).hexdigest(), ledgers)

    def _ledgers(self, place: RowPlace) -> Ledgers:
        with open_plain(place.file) as lines:
            lines.seek(place.offset)
            row = read_json(lines.readline())
        with _as_bad_row():
            episode = Trajectory.from_json(row)
        if self.data.rerender:
            return render_chat(chat_of(episode), self.renderer)
        if any(ledger.images for ledger in episode.ledgers):
            raise BadRowError(
                "its tokens were sampled with images, which [data] cannot store; set data.rerender=true to render its messages "
                "again, with a line of text for each image"
            )
        if not any(ledger.sampled_tokens for ledger in episode.ledgers):
            raise BadRowError("the policy sampled none of its tokens")
        known = len(episode.turns) + any(made["turn"] == len(episode.turns) for made in episode.rewrites)  # a last summary
        if max(int(ledger.turns[ledger.sampled].max(initial=-1)) for ledger in episode.ledgers) >= known:
            raise BadRowError("its tokens belong to turns that are missing")
        size, renderer = len(self.tokenizer), self.renderer.with_tools(episode.tools)
        sampled = [  # over all ledgers; none for a given turn
            [id_ for one in episode.ledgers for id_ in one.token_ids[one.sampled & (one.turns == turn.index)].tolist()]
            for turn in episode.turns
        ]
        texts = self.tokenizer.batch_decode(sampled)
        same = all(one.token_ids.min() >= 0 and one.token_ids.max() < size for one in episode.ledgers if len(one))
        for turn, ids, text in zip(episode.turns, sampled, texts, strict=True):
            message = turn.message
            if same and ids and not (message.content in text and all(call.raw in text for call in message.tool_calls)):
                read = renderer.parse(ids, turn.finish)
                same = read.content == message.content
                same = same and [call.name for call in read.tool_calls] == [call.name for call in message.tool_calls]
        if not same:
            raise ConfigError(
                f"data.path: {place}: its tokens do not match its messages in this model's tokenizer: they were sampled with "
                "another one. Use the model that the run trained, or set data.rerender=true to render the messages again "
                "with this model's chat template"
            )
        # An agent may end in any of its conversations.
        return sorted((one for one in episode.ledgers if one.sampled_tokens), key=lambda ledger: int(ledger.turns[-1]))

    def _add(self, writer: RowWriter, task: str, episodes: list[Ledgers]) -> None:
        if (most := max(len(ledger) for ledgers in episodes for ledger in ledgers)) > self.longest:
            raise BadRowError(
                f"{most} tokens, and a row, which is never cut, may have {self.longest} (the lesser of optim.micro_tokens and "
                "the model's context)"
            )
        writer.add(task, episodes)
