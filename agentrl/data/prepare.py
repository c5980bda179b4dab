"""From the files of `[data]` to a store of token rows: what is usable is rendered once, what is not is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from agentrl.config.schema import DataConfig
from agentrl.data.chats import Chat, openai_chat
from agentrl.data.episodes import Scored, best, is_episode, pairs, scored
from agentrl.data.files import RowPlace, rows_of, sources
from agentrl.data.preferences import preference
from agentrl.data.rendered import chat_of, rendered, says_the_same, turn_ids
from agentrl.data.sharegpt import sharegpt_chat
from agentrl.data.store import About, RowWriter
from agentrl.errors import BadRowError, ConfigError
from agentrl.render.base import Renderer
from agentrl.trajectory import TokenLedger, Trajectory

NAMED = 3
"""So many bad rows are named in a refusal."""
LAYOUTS = (
    "an episode of a run, OpenAI's messages, ShareGPT's conversations (Hermes, ToolACE), or with a loss of pairs prompt, chosen "
    "and rejected"
)
Ledgers = list[TokenLedger]


class Preparation:
    """Reads the data of a config once. `tokenizer`: the model's; `longest`: the most tokens of a row; `rows` counts them."""

    def __init__(self, data: DataConfig, renderer: Renderer, tokenizer: Any, longest: int) -> None:
        self.data, self.renderer, self.tokenizer, self.longest = data, renderer, tokenizer, longest
        self.each = 1 if data.loss == "sft" else 2
        self.rows = self.episodes = 0
        self.left_out: list[tuple[str, str]] = []
        self.passed: Counter[str] = Counter()
        self.unread: Counter[str] = Counter()

    def write(self, folder: Path, seed: int) -> About:
        """Write the store. Raises ConfigError if too many rows are bad, nothing is left, or tokens are another tokenizer's."""
        found: list[Scored] = []
        with RowWriter(folder, self.each) as writer:
            for place, row in self._rows():
                self._attempt(place, partial(self._row, place, row, found, writer))
            for episodes in self._chosen(found):
                self._attempt(episodes[0].place, partial(self._episodes, episodes, writer))
            self._check_share(writer.examples)
            return writer.finish(self.data.heldout, seed, self.rows, self.left_out, dict(self.passed), dict(self.unread))

    def said(self) -> str:
        """How far it is, in words."""
        return f"{self.rows:,} rows"

    def _rows(self) -> Iterator[tuple[RowPlace, Mapping[str, Any] | BadRowError]]:
        for file in sources(self.data.path):
            for place, row in rows_of(file):
                self.rows += 1
                yield place, row

    def _attempt(self, place: RowPlace, do: Callable[[], None]) -> None:
        try:
            do()
        except BadRowError as problem:
            self.left_out.append((str(place), str(problem)))

    def _row(self, place: RowPlace, row: Mapping[str, Any] | BadRowError, found: list[Scored], writer: RowWriter) -> None:
        """A chat is rendered at once; an episode waits until all of its task are known."""
        if isinstance(row, BadRowError):
            raise row
        if is_episode(row):
            self.episodes += 1
            if place.offset < 0:
                raise BadRowError(
                    "episodes are read from JSON lines alone, as runs write them; name the run, or its .jsonl files"
                )
            if (one := scored(place, row, self.data, self.passed)) is not None:
                found.append(one)
        else:
            self._chats(row, writer, table=place.offset < 0)

    def _episodes(self, episodes: Sequence[Scored], writer: RowWriter) -> None:
        self._add(writer, str(episodes[0].task), self._recorded(episodes))

    def _chats(self, row: Mapping[str, Any], writer: RowWriter, *, table: bool) -> None:
        keys = {key for key, value in row.items() if value is not None}
        paired = not keys.isdisjoint(("chosen", "preferred_output"))
        if paired != (self.each == 2) or keys.isdisjoint(("chosen", "preferred_output", "messages", "conversations")):
            expected = "a pair (chosen and rejected)" if self.each == 2 else "a conversation or an episode"
            shown = ", ".join(list(row)[:6]) or "no keys"
            raise BadRowError(f'data.loss = "{self.data.loss}" takes {expected}, and this row has {shown} (layouts: {LAYOUTS})')
        chats: tuple[Chat, ...]
        if paired:
            chats = preference(row, table=table)
        else:
            chats = (openai_chat(row, table=table) if "messages" in keys else sharegpt_chat(row),)
        ledgers = [rendered(chat, self.renderer) for chat in chats]
        for chat in chats:
            self.unread += chat.unread
        # By what is said: a conversation that stands twice must not be trained on and held out.
        self._add(writer, sha256("\n".join(sorted(chat.content for chat in chats)).encode()).hexdigest(), ledgers)

    def _chosen(self, found: list[Scored]) -> Iterator[Sequence[Scored]]:
        if self.each == 2:
            yield from pairs(found, self.data, self.passed)
        else:
            yield from ((one,) for one in best(found, self.data, self.passed))

    def _recorded(self, episodes: Sequence[Scored]) -> list[Ledgers]:
        return [self._ledgers(one.place, one.load()) for one in episodes]

    def _ledgers(self, place: RowPlace, episode: Trajectory) -> Ledgers:
        if self.data.rerender:
            return rendered(chat_of(episode), self.renderer)
        if any(ledger.images for ledger in episode.ledgers):
            raise BadRowError(
                "its tokens were sampled beside images, and data has tokens alone; data.rerender=true renders its messages anew, "
                "with a line for each image"
            )
        if not any(ledger.sampled_tokens for ledger in episode.ledgers):
            raise BadRowError("no token that its policy sampled")
        if max(int(ledger.turns[ledger.sampled].max(initial=-1)) for ledger in episode.ledgers) >= len(episode.turns):
            raise BadRowError("its tokens are of turns that it does not have")
        size = len(self.tokenizer)
        texts = self.tokenizer.batch_decode([turn_ids(episode, turn.index) for turn in episode.turns])
        ids = [ledger.token_ids for ledger in episode.ledgers if len(ledger)]
        if any(part.min() < 0 or part.max() >= size for part in ids) or not says_the_same(episode, self.renderer, texts):
            raise ConfigError(
                f"data.path: {place}: its tokens say something else with this model's tokenizer than its messages do: they were "
                "sampled with another one. Take the model that the run trained, or set data.rerender=true to render the "
                "messages anew with this model's chat template"
            )
        return [ledger for ledger in episode.ledgers if ledger.sampled_tokens]

    def _add(self, writer: RowWriter, task: str, episodes: list[Ledgers]) -> None:
        if (most := max(len(ledger) for ledgers in episodes for ledger in ledgers)) > self.longest:
            raise BadRowError(
                f"{most} tokens, and a row, which is never cut, may have {self.longest} (the lesser of optim.micro_tokens and "
                "the model's context)"
            )
        writer.add(task, episodes)

    def _check_share(self, examples: int) -> None:
        share = len(self.left_out) / max(self.rows, 1)
        named = "".join(f"\n  {place}: {why}" for place, why in self.left_out[:NAMED])
        more = f"\n  ... and {len(self.left_out) - NAMED} more" if len(self.left_out) > NAMED else ""
        if share > self.data.max_bad:
            raise ConfigError(
                f"data.path: {len(self.left_out)} of {self.rows} rows cannot be used ({share:.1%}), and data.max_bad = "
                f"{self.data.max_bad:g}; mend them, or raise data.max_bad:{named}{more}"
            )
        if not examples:
            filters = "".join(f"\n  {count}: {why}" for why, count in self.passed.most_common())
            raise ConfigError(f"data.path: nothing to train on in {self.rows} rows:{filters or ' the files are empty'}{named}")
        data = self.data
        of_episodes = {"min_reward": data.min_reward is not None, "success": data.success, "per_task": data.per_task is not None,
                       "rerender": data.rerender}  # fmt: skip
        if not self.episodes and any(of_episodes.values()):
            key = next(key for key, given in of_episodes.items() if given)
            raise ConfigError(f"data.{key} is of episodes of runs, and none of the {self.rows} rows is one; leave it out")
