"""Imports for scripts that `foreign_main` runs, as `agentrl_foreign`; needs nothing but Python 3.9.

from agentrl_foreign import next to, steady
"""

from __future__ import annotations

import datetime
import importlib.util
import itertools
import sys
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any


def beside(script: str, name: str) -> Any:
    """The module in NAME.py next to a script, loaded once. (The script's folder is not searched by imports: a benchmark's modules
    must not be shadowed.)"""
    known = f"agentrl_foreign_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, Path(script).with_name(f"{name}.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[known])
    return sys.modules[known]


def steady(package: str, begins: str | None, passed: Callable[[], float]) -> Callable[[], None]:
    """Makes the clock (`datetime.datetime.now`) and the ids (`uuid4`) that the loaded modules of a package see the same for the
    same calls: the time begins at `begins` (ISO; None: nothing is changed) and goes on by `passed()` seconds, ids are made of the
    time and of their number. Returns what begins their numbers anew."""
    if begins is None:
        return lambda: None
    count, first = [itertools.count()], begins

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.fromisoformat(first) + datetime.timedelta(seconds=passed())

    clock = types.SimpleNamespace(**{**vars(datetime), "datetime": Clock})
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == package:
            if getattr(module, "datetime", None) is datetime:
                module.datetime = clock  # type: ignore[attr-defined]
            if getattr(module, "uuid4", None) is uuid.uuid4:
                module.uuid4 = lambda: uuid.uuid5(uuid.NAMESPACE_OID, f"{Clock.now()} {next(count[0])}")  # type: ignore[attr-defined]

    def anew() -> None:
        count[0] = itertools.count()

    return anew
