"""A stand-in for AppWorld's package, written for the tests: the calls that the suite makes, over one app that keeps notes.

A task's `ground_truth/evaluation.py` names requirements and expressions over `notes` and `answer`.
"""

import contextlib
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class AppWorld:
    def __init__(self, task_id: str, experiment_name: str) -> None:
        self.root = Path(os.environ["APPWORLD_ROOT"])
        self.folder = self.root / "data" / "tasks" / task_id
        self.kept: dict[str, Any] = {"notes": [], "answer": None, "completed": False}
        self.names: dict[str, Any] = {"apis": SimpleNamespace(notes=self._notes(), supervisor=self._supervisor())}
        (self.root / "experiments" / "outputs" / experiment_name).mkdir(parents=True, exist_ok=True)

    def _notes(self) -> Any:
        return SimpleNamespace(add=lambda text: self.kept["notes"].append(text), show=lambda: list(self.kept["notes"]))

    def _supervisor(self) -> Any:
        return SimpleNamespace(complete_task=lambda answer=None: self.kept.update(answer=answer, completed=True))

    def execute(self, code: str) -> str:
        if code == "die":
            os._exit(3)
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                exec(code, self.names)
        except Exception as fault:
            return f"Execution failed. Traceback:\n{type(fault).__name__}: {fault}"
        return out.getvalue() or "Execution successful."

    def task_completed(self) -> bool:
        return bool(self.kept["completed"])

    def evaluate(self, suppress_errors: bool) -> Any:
        tests = json.loads((self.folder / "ground_truth" / "evaluation.py").read_text())
        found: dict[str, list[dict[str, str]]] = {"passes": [], "failures": []}
        for requirement, expression in tests.items():
            kind = "passes" if eval(expression, dict(self.kept)) else "failures"
            found[kind].append({"requirement": requirement})
        success = not found["failures"]
        return SimpleNamespace(to_dict=lambda: {"success": success, "num_tests": len(tests), "difficulty": 1, **found})

    def close(self) -> None:
        self.names.clear()
