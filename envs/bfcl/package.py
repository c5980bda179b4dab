"""What the leaderboard's package has: categories, tasks, classes and texts, read in place."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from agentrl.contrib.suites.benchmarks import import_in_place
from agentrl.contrib.suites.measures import ngrams
from agentrl.contrib.suites.suite import SuiteTask, members, user_folder
from agentrl.data.trajectory import Json, Task
from agentrl.utils.errors import ConfigError, EnvError

from .calls import public_methods, read_call

CLASSES = "eval_checker.multi_turn_eval.func_source_code"
SCORING = {"irrelevance": "none", "live_irrelevance": "none", "live_relevance": "some", "format_sensitivity": "text"}

LARGEST = 0.25
"""A group with a larger share of the benchmark's tasks trains, whatever its hash."""
WORDS = 8
"""Prompts with so many words in a row in common are in one group, as `agentrl env leaks` counts them."""


class PackageInPlace:
    """A package's folder and its modules. Copies of an environment share it, and it is a key of caches: it is its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __hash__(self) -> int:
        return hash(self.folder)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, PackageInPlace) and other.folder == self.folder

    def module(self, name: str) -> ModuleType:
        """A module by its name in the package ("constants.enums"); raises as `import_in_place`."""
        return import_in_place(f"{self.folder.name}.{name}", self.folder)


def split_by_functions(tasks: Sequence[SuiteTask], whole: Sequence[SuiteTask]) -> list[SuiteTask]:
    """Tasks with a split: no function name and no run of `WORDS` words of a prompt is in both splits.

    Tasks of `whole` that share one are a group, and so on through their tasks; half of the groups are held out, by a hash.
    Conversations share the functions of a few classes: all are held out.
    """
    parts = {task.id: _parts(task) for task in (*whole, *tasks)}
    above = {part: part for found in parts.values() for part in found}

    def group(task: SuiteTask) -> str:
        return root(parts[task.id][0])

    def root(part: str) -> str:
        while above[part] != part:
            above[part] = part = above[above[part]]
        return part

    for found in parts.values():
        for other in found[1:]:
            low, high = sorted((root(found[0]), root(other)))
            above[high] = low  # the least part is a group's root, in any order of the tasks
    sizes = Counter(map(group, whole))

    def is_held(task: SuiteTask) -> bool:
        if "classes" in task.data:
            return True
        return sizes[group(task)] <= LARGEST * len(whole) and blake2b(group(task).encode()).digest()[0] < 128

    return [replace(task, split="heldout" if is_held(task) else "train") for task in tasks]


def _parts(task: SuiteTask) -> list[str]:
    """Names of functions (of a conversation: classes) and runs of words that a task has."""
    if "classes" in task.data:
        return list(task.data["classes"])
    runs = {run for said in task.data["question"][0] if said["role"] == "user" for run in ngrams(said["content"], WORDS)}
    return [*(function["name"] for function in task.data["functions"]), *sorted(runs)] or [task.id]


class Package(PackageInPlace):
    """The package at a folder."""

    def module(self, name: str) -> ModuleType:
        # Its program makes folders for its results when imported, beside the package unless told where.
        os.environ.setdefault("BFCL_PROJECT_ROOT", str(user_folder() / "bfcl"))
        return super().module(name)

    # -- categories and tasks ----------------------------------------------------------------------

    def chosen(self, names: Sequence[str]) -> tuple[str, ...]:
        """The categories of names and groups, each once. Raises ConfigError for one that is unknown or cannot be played."""
        mapping = self.module("constants.category_mapping")
        memories = [f"{name}_prereq" for name in mapping.MEMORY_CATEGORY]
        alone = {name: [name] for name in (*mapping.ALL_CATEGORIES, *memories)}
        groups = {**mapping.TEST_COLLECTION_MAPPING, "memory_prereq": memories, **alone}
        found = members(names, groups, "bfcl: params.category")
        for name in found:
            if name.startswith("web_search"):
                raise ConfigError(
                    f"bfcl: params.category: {name} searches the web, which its tasks cannot do without a network and a key"
                )
            if name.startswith("memory"):
                self.module(f"{CLASSES}.{name.removesuffix('_prereq')}")
            if name == "format_sensitivity":
                self.module("model_handler.utils")
        return found

    def tasks(self, category: str) -> Iterator[SuiteTask]:
        """Every task of a category, in the leaderboard's order."""
        utils, plain = self.module("utils"), category.removesuffix("_prereq")
        shown = utils.load_dataset_entry(plain, include_prereq=plain != category)
        rows = utils.load_dataset_entry(plain, include_prereq=plain != category, include_language_specific_hint=False)
        pairs = [(row, other) for row, other in zip(rows, shown, strict=True) if plain == category or "_prereq_" in row["id"]]
        wordless = plain.endswith("relevance") or plain != category
        gold = [{"ground_truth": None}] * len(pairs) if wordless else utils.load_ground_truth_entry(plain)
        for (row, other), answer in zip(pairs, gold, strict=True):
            make = self._conversation if "involved_classes" in row else self._turn
            yield make(category, row, other, answer["ground_truth"])

    def _turn(self, category: str, row: Mapping[str, Json], shown: Mapping[str, Json], gold: Json) -> SuiteTask:
        style = row["id"].split(":")[1] if category == "format_sensitivity" else ""
        language = category.removeprefix("simple_") if category in ("simple_java", "simple_javascript") else "python"
        family = category if not style else row["id"].split(":")[2].rsplit("_", 1)[0]
        data = {"category": category, "scoring": SCORING.get(category, "ast"), "language": language, "style": style,
                "question": row["question"], "functions": row["function"], "shown": shown["function"]}  # fmt: skip
        return SuiteTask(row["id"], family, data, {"calls": gold or []})

    def _conversation(self, category: str, row: Mapping[str, Json], shown: Mapping[str, Json], gold: Json) -> SuiteTask:
        later = {turn: [doc["name"] for doc in docs] for turn, docs in row.get("missed_function", {}).items()}
        classes, scenario = row["involved_classes"], row.get("scenario", "")
        data = {"category": category, "scoring": "rounds", "question": row["question"], "classes": classes,
                "later": later, "config": row.get("initial_config", {}), "scenario": scenario,
                "after": row.get("depends_on", [])}  # fmt: skip
        if category.startswith("memory"):
            data["scoring"] = "said" if gold else "played"
            return SuiteTask(row["id"], f"memory {scenario}", data, {"answers": gold or ["understood"]})
        rounds = [[self._read_call(text, tuple(classes)) for text in calls] for calls in gold]
        return SuiteTask(row["id"], "multi_turn " + "+".join(sorted(classes)), data, {"rounds": rounds})

    def _read_call(self, text: str, classes: tuple[str, ...]) -> Json:
        """A gold call, which is written in Python."""
        name, arguments = read_call(text, lambda name: getattr(self.api(self.methods(classes)[name]), name))
        return {"name": name, "arguments": arguments}

    # -- classes -----------------------------------------------------------------------------------

    def api(self, name: str) -> type:
        """A class by its name."""
        module = self.module("constants.executable_backend_config").CLASS_FILE_PATH_MAPPING[name]
        found: type = getattr(self.module(module.partition(".")[2]), name)
        return found

    @lru_cache(maxsize=256)  # noqa: B019 - a package is a folder
    def methods(self, classes: tuple[str, ...]) -> dict[str, str]:
        """Public methods and their classes, of the last one that has it."""
        return public_methods({name: self.api(name) for name in classes})

    @lru_cache(maxsize=256)  # noqa: B019 - as above
    def documented(self, classes: tuple[str, ...]) -> tuple[Mapping[str, Json], ...]:
        """The functions that the leaderboard shows of classes."""
        files = self.module("constants.executable_backend_config").MULTI_TURN_FUNC_DOC_FILE_MAPPING
        utils, folder = self.module("utils"), self.folder / "data" / "multi_turn_func_doc"
        rows = [{"id": "multi_turn_0", "function": utils.load_file(folder / files[one])} for one in classes]
        return tuple(function for row in utils.add_language_specific_hint_to_function_doc(rows) for function in row["function"])

    def instances(self, task_id: str, data: Mapping[str, Json], memory: Path | None) -> dict[str, Any]:
        """Fresh objects of a task's classes. Raises EnvError if a memory should be there and is not."""
        made = {name: self.api(name)() for name in data["classes"]}
        for name, api in made.items():
            config = copy.deepcopy(data["config"].get(name, {}))
            if data["scenario"]:
                config = {"model_result_dir": memory, "scenario": data["scenario"], "test_id": task_id}
                if memory is None:
                    continue
                self._expect_memory(task_id, data, memory)
            if hasattr(api, "_load_scenario"):
                api._load_scenario(config, long_context="long_context" in data["category"])
        return made

    def _expect_memory(self, task_id: str, data: Mapping[str, Json], memory: Path) -> None:
        folder = memory / self.module("utils").get_directory_structure_by_id(task_id) / "memory_snapshot"
        wanted = folder / "prereq_checkpoints" / f"{data['after'][-1]}.json" if data["after"] else None
        if wanted is not None and not wanted.is_file():
            raise EnvError(f"bfcl: {task_id} needs the memory of {data['after'][-1]}, and there is no {wanted}: play category "
                           f"{data['category'].removesuffix('_prereq')}_prereq first, one task after the other")  # fmt: skip

    # -- texts -------------------------------------------------------------------------------------

    @property
    def texts(self) -> Any:
        """The leaderboard's constants of prompts, and of limits."""
        return self.module("constants.default_prompts")

    def opening(self, task: Task, apis: Mapping[str, Any]) -> list[dict[str, str]]:
        """The first messages, with the leaderboard's own words on memories or on the format of calls before them."""
        question, data = [dict(item) for item in task.data["question"][0]], task.data
        if data.get("style"):
            made: list[dict[str, str]] = self.module("model_handler.utils").system_prompt_pre_processing_chat_model(
                question, copy.deepcopy(data["shown"]), task.id)  # fmt: skip
            return made
        if not data.get("scenario"):
            return question
        unified = "rec_sum" in data["category"]
        form = self.texts.MEMORY_BACKEND_INSTRUCTION_UNIFIED if unified else self.texts.MEMORY_BACKEND_INSTRUCTION_CORE_ARCHIVAL
        remembered = next(iter(apis.values()))._dump_core_memory_to_context()
        said = form.format(scenario_setting=self.texts.MEMORY_AGENT_SETTINGS[data["scenario"]], memory_content=remembered)
        if question[0]["role"] == "system":
            return [{"role": "system", "content": f"{said}\n\n{question[0]['content']}"}, *question[1:]]
        return [{"role": "system", "content": said}, *question]

    def written(self, data: Mapping[str, Json], text: str) -> Json:
        """The calls that an answer contains, in the format that was asked for; None if it has none that can be read."""
        if not data["style"]:
            return None
        utils, enums = self.module("model_handler.utils"), self.module("constants.enums")
        language, tagged, *_ = utils.parse_prompt_variation_params(data["style"])
        try:
            calls = utils.default_decode_ast_prompting(text, enums.ReturnFormat(language), tagged)
        except Exception:
            return None
        shaped = self.module("utils").is_function_calling_format_output(calls)
        return [{"name": name, "arguments": made} for call in calls for name, made in call.items()] if shaped else None
