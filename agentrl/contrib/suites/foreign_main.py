"""The other side of `agentrl.contrib.suites.foreign`: run by a benchmark's own interpreter, so it needs nothing but Python 3.9.

    python foreign_main.py SCRIPT [ARGUMENT ...]

The functions of SCRIPT answer requests, one JSON object a line: {"call": name, "with": {...}} gives {"value": ...}, or
{"fault": what it raised, "trace": ...}. SCRIPT sees the arguments as `sys.argv[1:]` while it is loaded, and imports this
module by a name that nobody else has: `from agentrl_foreign import steady`.
"""

from __future__ import annotations

import atexit
import datetime
import importlib.util
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "AGENTRL_FOREIGN_FOLDER"  # the variable that names the folder for temporary files


def main() -> None:
    """Serve until the other side closes the pipe."""
    requests, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What a benchmark prints must not be taken for an answer, nor may it read the requests.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # they reach all processes; the run still finishes its step
        signal.signal(number, signal.SIG_IGN)
    sys.modules["agentrl_foreign"] = sys.modules[__name__]
    del sys.argv[0], sys.path[0]  # the folder of this file, whose modules must not shadow a benchmark's
    folder, parent = os.environ[FOLDER], os.getppid()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    script = None
    for line in requests:
        try:
            request = json.loads(line)
            # Loaded at the first request: what fails about it is then an answer.
            script = script or _load(sys.argv[0])
            answer = json.dumps({"value": getattr(script, request["call"])(**request["with"])})
        except (Exception, SystemExit) as fault:
            answer = json.dumps({"fault": f"{type(fault).__name__}: {fault}", "trace": traceback.format_exc()})
        answers.write(answer + "\n")
        answers.flush()


def _end_with(parent: int, folder: str) -> None:
    """End this process and what it started when `parent` is gone, also in the middle of a call."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _load(path: str, name: str = "agentrl_foreign_script") -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def beside(script: str, name: str) -> Any:
    """The module in NAME.py next to a script, loaded once. (The script's folder is not searched by imports: a benchmark's modules
    must not be shadowed.)"""
    known = f"agentrl_foreign_{name}"
    return sys.modules.get(known) or _load(str(Path(script).with_name(f"{name}.py")), known)


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


if __name__ == "__main__":
    main()
