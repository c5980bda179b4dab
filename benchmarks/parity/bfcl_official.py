"""Verdicts of the leaderboard's own checkers, on decoded calls.

Its runner is not imported, because that needs the client of every model it knows; what is between an answer and the checkers
is done here as for a model with native calls (`openai_completion.py`): arguments that are no JSON object make the whole answer
unreadable.
"""

from __future__ import annotations

import copy
import itertools
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.contrib.suites.benchmarks import import_in_place
from agentrl.data.trajectory import Json

Call = tuple[str, Any]
"""Name and arguments; arguments that are no mapping could not be read."""
Rounds = Sequence[Sequence[Sequence[Call]]]
"""Calls by round and step."""


class Official:
    """The checkers of the package at a folder."""

    def __init__(self, folder: Path) -> None:
        # The names of models decide only whether dots in functions' names were replaced, which they are not here.
        stub = types.ModuleType("bfcl_eval.constants.model_config")
        stub.MODEL_CONFIG_MAPPING = _Anything()  # type: ignore[attr-defined]
        import_in_place(f"{folder.name}.constants.enums", folder)
        sys.modules[stub.__name__] = stub
        self.ast = import_in_place(f"{folder.name}.eval_checker.ast_eval.ast_checker", folder)
        self.rounds = import_in_place(f"{folder.name}.eval_checker.multi_turn_eval.multi_turn_checker", folder)
        self.running = import_in_place(f"{folder.name}.eval_checker.multi_turn_eval.multi_turn_utils", folder)
        self.words = import_in_place(f"{folder.name}.eval_checker.agentic_eval.agentic_checker", folder)
        self.utils = import_in_place(f"{folder.name}.utils", folder)
        self.texts = import_in_place(f"{folder.name}.constants.default_prompts", folder)
        self.languages = import_in_place(f"{folder.name}.constants.enums", folder).Language
        self._number = itertools.count()

    def turn(self, data: Mapping[str, Json], gold: Json, calls: Sequence[Call] | None, category: str) -> bool:
        """A single turn. `calls`: None for an answer in words."""
        readable = calls is not None and all(isinstance(arguments, dict) for _, arguments in calls)
        decoded = [{name: copy.deepcopy(arguments)} for name, arguments in calls or ()]
        if category.endswith("relevance"):
            called = readable and not self.utils.is_empty_output(decoded)
            return called if category == "live_relevance" else not called
        if not readable:
            return False
        language = self.languages(data["language"])
        try:
            return bool(self.ast.ast_checker(data["functions"], decoded, gold, language, category, "any")["valid"])
        except Exception:  # its program ends here; no answer of ours is right then
            return False

    def conversation(self, entry: dict[str, Json], gold: Json, rounds: Rounds, category: str) -> bool:
        """Several rounds. A round that is missing was never played; too many steps in one end the leaderboard's episode there."""
        most = self.texts.MAXIMUM_STEP_LIMIT + 1
        over = next((number for number, steps in enumerate(rounds) if len(steps) >= most), len(rounds))
        rounds = [steps[:most] for steps in rounds[: over + 1]]
        if len(rounds) != len(gold):
            return False
        decoded = [[[_text(*call) for call in step] for step in steps if step] for steps in rounds]
        before = set(vars(self.running))
        try:
            return bool(self.rounds.multi_turn_checker(decoded, gold, entry, category, f"m{next(self._number)}")["valid"])
        finally:
            for name in set(vars(self.running)) - before:  # the objects of every episode that it ever saw
                del vars(self.running)[name]

    def answer(self, gold: Json, text: str) -> bool:
        """A final answer in words."""
        return bool(text) and bool(self.words.agentic_checker(text, gold)["valid"])


class _Anything(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return types.SimpleNamespace(underscore_to_dot=False)


def _text(name: str, arguments: dict[str, Json]) -> str:
    return f"{name}({','.join(f'{key}={value!r}' for key, value in arguments.items())})"
