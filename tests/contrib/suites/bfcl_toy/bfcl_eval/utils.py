"""What the suite calls of the package's `utils`."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING

DATA = Path(__file__).parent / "data"


def load_file(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def load_dataset_entry(
    category: str, include_prereq: bool = True, include_language_specific_hint: bool = True
) -> list[dict[str, Any]]:
    rows = load_file(DATA / f"BFCL_v4_{category}.json")
    rows = [row for row in rows if include_prereq or "_prereq_" not in row["id"]]
    for row in rows:
        for name in row.get("involved_classes", ()):
            row.setdefault("function", []).extend(
                load_file(DATA / "multi_turn_func_doc" / MULTI_TURN_FUNC_DOC_FILE_MAPPING[name])
            )
        held = {name for names in row.get("missed_function", {}).values() for name in names}
        docs = {doc["name"]: doc for doc in row.get("function", ())}
        row["missed_function"] = {turn: [docs[name] for name in names] for turn, names in row.get("missed_function", {}).items()}
        row["function"] = [doc for doc in row.get("function", ()) if doc["name"] not in held]
    return add_language_specific_hint_to_function_doc(rows) if include_language_specific_hint else rows


def add_language_specific_hint_to_function_doc(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        row["function"] = copy.deepcopy(row["function"])
        for function in row["function"]:
            function["description"] += " (hint)"
            if "java" in row["id"]:
                for schema in function["parameters"]["properties"].values():
                    schema.pop("items", None)
                    schema["type"] = "string"
    return rows


def load_ground_truth_entry(category: str) -> list[dict[str, Any]]:
    return load_file(DATA / "possible_answer" / f"BFCL_v4_{category}.json")


def get_directory_structure_by_id(task_id: str) -> str:
    return "agentic/memory/kv"
