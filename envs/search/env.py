"""Multi-hop questions over a generated encyclopedia: search it with BM25, open pages, answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from agentrl.data.trajectory import Json
from agentrl.env import SPLITS, Message, Task, ToolCall, ToolEnv, task_rng, tool
from agentrl.utils.errors import ConfigError, TaskDataError, ToolError, hint_text

from .question import ask
from .teacher import Teacher
from .world import Corpus, corpus

_SYSTEM = (
    "You answer questions about an encyclopedia. `search` finds pages by words, `open` shows a page. Facts "
    "stand on the page of the thing they are about; follow them from page to page. When you know the answer, "
    "reply with the answer alone: a name or a number, no sentence."
)


class Search(ToolEnv):
    """Find a fact that is `hops` pages away from the entity in the question."""

    id = "agentrl/Search-v0"
    reward = "search"
    summary = "multi-hop questions over a generated corpus through BM25 search and open-page tools"
    order_free = False
    # The corpus is read-only, so forks and snapshots share it.
    shared = frozenset({"corpus"})

    def __init__(
        self,
        *,
        hops: int | Sequence[int] = (2, 3),
        documents: int = 150,
        back_share: float = 0.25,
        results: int = 5,
        **base: Any,
    ) -> None:
        """`hops`: a number or [lowest, highest] of facts to chain, 1..8. `documents`: pages in the corpus,
        40..5000. `back_share`: share of hops that go from a fact's object to its subject (the page has to
        be found by what it mentions), 0..1. `results`: maximum number of search results, 1..20. Raises ConfigError
        for values outside these ranges."""
        super().__init__(**base)
        low, high = (hops, hops) if isinstance(hops, int) else (hops[0], hops[-1])
        if not 1 <= low <= high <= 8:
            raise ConfigError(f"search: hops = {hops!r}; expected a number or [low, high] within 1..8")
        if not (40 <= documents <= 5000 and 1 <= results <= 20):
            raise ConfigError(f"search: expected documents in 40..5000 and results in 1..20, got {documents}, {results}")
        if not 0 <= back_share <= 1:
            raise ConfigError(f"search: back_share = {back_share!r}; expected a share within 0..1")
        self.hops, self.documents, self.back_share, self.results = (low, high), documents, back_share, results
        self.corpus: Corpus | None = None

    # -- tasks -------------------------------------------------------------------------------------

    def make_task(self, rng_seed: int, split: str) -> Task:
        if split not in SPLITS:
            raise TaskDataError(f"no split {split!r}; expected one of {', '.join(SPLITS)}")
        rng = task_rng(self.id, split, rng_seed)
        hops = rng.randint(*self.hops)
        pages = corpus(rng_seed, split, self.documents)
        question = ask(rng, pages, hops, self.back_share, self.results)
        answer = question.answer
        return Task(
            id=f"search/{split}/{rng_seed}",
            seed=rng_seed,
            split=split,
            data={"question": question.text, "hops": hops, "world": rng_seed, "documents": self.documents},
            gold={
                "answer": answer,
                "accept": [answer, f"{answer}.", f"Answer: {answer}", f"Answer: {answer}."],
                "steps": [list(step) for step in question.steps],
                "opens": [{"name": "open", "arguments": {"page": page}} for _, page in question.steps],
                "trail": list(question.trail),
            },
        )

    def prompt(self, task: Task) -> list[Message]:
        return [Message("system", _SYSTEM), Message("user", task.data["question"])]

    # -- the episode -------------------------------------------------------------------------------

    async def setup(self, task: Task) -> None:
        self.corpus = corpus(int(task.data["world"]), task.split, int(task.data["documents"]))

    def state(self) -> Json:
        # Searching and opening pages does not change any state.
        return {"documents": len(self.corpus.pages) if self.corpus is not None else 0}

    @property
    def pages(self) -> Corpus:
        """The corpus of the running episode."""
        assert self.corpus is not None
        return self.corpus

    @tool(read_only=True)
    async def search(
        self, query: Annotated[str, Field(max_length=400)], limit: Annotated[int, Field(ge=1, le=20)] = 5
    ) -> list[dict[str, str]]:
        """Find pages by words (BM25), best first.

        Args:
            query: words that the page should contain
            limit: most results wanted
        """
        found = self.pages.index.top(query, min(limit, self.results))
        return [
            {"page": page.id, "title": page.title, "kind": page.kind}
            for page in (self.pages.pages[number] for number, _ in found)
        ]

    @tool(read_only=True)
    async def open(self, page: str) -> str:
        """Show the text of a page.

        Args:
            page: the page's id as `search` gives it, such as p12
        """
        found = self.pages.by_id.get(page)
        if found is None:
            raise ToolError(f"no page {page[:40]!r}{hint_text(page, self.pages.by_id)}")
        return f"{found.title}\n{found.text}"

    # -- scripted policies -------------------------------------------------------------------------

    def gold_turns(self, task: Task) -> list[Message]:
        turns: list[Message] = []
        for query, page in task.gold["steps"]:
            turns.append(Message("assistant", tool_calls=(ToolCall("search", {"query": query}),)))
            turns.append(Message("assistant", tool_calls=(ToolCall("open", {"page": page}),)))
        return [*turns, Message("assistant", task.gold["answer"])]

    def teacher(self, task: Task, rng: Any, **params: Any) -> Teacher:
        return Teacher(task, rng, self.gold_turns(task), **params)
