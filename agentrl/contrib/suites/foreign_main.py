"""The other side of `agentrl.contrib.suites.foreign`: run by a benchmark's own interpreter, so it needs nothing but Python 3.9.

    python foreign_main.py SCRIPT [ARGUMENT ...]

The functions of SCRIPT answer requests, one JSON object a line: {"call": name, "with": {...}} gives {"value": ...}, or
{"fault": what it raised, "trace": ...}. SCRIPT sees the arguments as `sys.argv[1:]` while it is loaded.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

FOLDER = "AGENTRL_FOREIGN_FOLDER"  # the variable that names the folder for temporary files


def main() -> None:
    """Serve until the other side closes the pipe."""
    requests, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What a benchmark prints must not be taken for an answer, nor may it read the requests.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # they reach all processes; the run still finishes its step
        signal.signal(number, signal.SIG_IGN)
    # What scripts may import of ours, by a name that nobody else has.
    _load(str(Path(__file__).resolve().with_name("foreign_tools.py")), "agentrl_foreign")
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


def _load(path: str, name: str = "agentrl_foreign_script") -> object:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
