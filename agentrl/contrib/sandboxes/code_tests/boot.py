"""First program in the sandbox: load modules from standard input and start the runner. Nothing of it is on a disk, where the
policy's code could change it. Uses the standard library alone; Python gets its text by `-c`."""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import marshal
import sys
from typing import Any


class Archive(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import modules from memory. `modules`: name -> (is a package, marshalled code)."""

    def __init__(self, modules: dict[str, tuple[bool, bytes]]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.modules:
            return None
        package = self.modules[name][0]
        place = "/archive/" + name.replace(".", "/") + ("/__init__.py" if package else ".py")
        spec = importlib.util.spec_from_loader(name, self, origin=place, is_package=package)
        if spec is not None:
            spec.has_location = True
        return spec

    def exec_module(self, module: Any) -> None:
        exec(marshal.loads(self.modules[module.__name__][1]), module.__dict__)


def boot() -> None:
    raw = sys.stdin.buffer.read()
    magic, end = raw[:4], 8 + int.from_bytes(raw[4:8], "big")
    if magic != importlib.util.MAGIC_NUMBER:
        sys.exit(f"another Python, {sys.version.split()[0]}")
    sys.meta_path.insert(0, Archive(marshal.loads(raw[8:end])))
    from agentrl.contrib.sandboxes.code_tests.runner import serve

    request = json.loads(raw[end:])
    serve(request, request.pop("program"))


if __name__ == "__main__":
    boot()
