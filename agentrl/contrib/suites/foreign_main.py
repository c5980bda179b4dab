"""Serve a script's functions to `agentrl.contrib.suites.foreign`, in a benchmark's own interpreter (Python 3.9 or newer).

    python foreign_main.py SCRIPT [ARGUMENT ...]

The functions of SCRIPT answer requests, one JSON object per line: {"call": name, "with": {...}} is answered by {"value": ...}
or {"fault": exception, "trace": ...}. SCRIPT sees the arguments as `sys.argv[1:]` while it is loaded, and imports this
module by a unique name: `from agentrl_foreign import steady`.
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

FOLDER = "AGENTRL_FOREIGN_FOLDER"  # environment variable with the folder for temporary files


def main() -> None:
    """Answer requests until the caller closes the pipe."""
    requests, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    # The benchmark's output must not mix with answers, and it must not read requests.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # all processes get them; the run still finishes its step
        signal.signal(number, signal.SIG_IGN)
    sys.modules["agentrl_foreign"] = sys.modules[__name__]
    del sys.argv[0], sys.path[0]  # the folder of this file, whose modules must not shadow a benchmark's
    folder, parent = os.environ[FOLDER], os.getppid()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    threading.Thread(target=_end_with_parent, args=(parent, folder), daemon=True).start()
    script = None
    for line in requests:
        try:
            request = json.loads(line)
            # Loaded at the first request, so that a failure is reported as an answer.
            script = script or _load(sys.argv[0])
            answer = json.dumps({"value": getattr(script, request["call"])(**request["with"])})
        except (Exception, SystemExit) as fault:
            answer = json.dumps({"fault": f"{type(fault).__name__}: {fault}", "trace": traceback.format_exc()})
        answers.write(answer + "\n")
        answers.flush()


def _end_with_parent(parent: int, folder: str) -> None:
    """End this process and its children when `parent` is gone, even during a call."""
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


def load_sibling(script: str, name: str) -> Any:
    """Load the module NAME.py next to a script, once. (Imports do not search the script's folder, to not shadow a benchmark's
    modules.)"""
    known = f"agentrl_foreign_{name}"
    return sys.modules.get(known) or _load(str(Path(script).with_name(f"{name}.py")), known)


def steady(package: str, begins: str | None, passed: Callable[[], float]) -> Callable[[], None]:
    """Make the clock (`datetime.datetime.now`) and the IDs (`uuid4`) of a package's loaded modules deterministic: the time is
    `begins` (ISO; None: change nothing) plus `passed()` seconds, and an ID depends on the time and a counter. Returns a
    function that resets the counter."""
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

    def reset() -> None:
        count[0] = itertools.count()

    return reset


if __name__ == "__main__":
    main()
