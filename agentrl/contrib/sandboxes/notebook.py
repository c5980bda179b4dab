"""Program that runs a policy's Python code like a notebook cell. Standard library only: it runs inside sandboxes, which have no
agentrl, as a script (code on standard input) or loaded by jail.py."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import traceback
from typing import Any

NAME = "<code>"


def run(source: str) -> int:
    """Run the code as `__main__` and print the value of a final expression. Returns the exit status."""
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        tree = ast.parse(source, NAME)
    except BaseException as fault:
        report(fault.with_traceback(None))
        return 1
    try:
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, NAME, "exec", dont_inherit=True), space)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), NAME, "eval", dont_inherit=True), space)
            if value is not None:
                print(repr(value))
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException as fault:
        if isinstance(fault, MemoryError):
            space.clear()  # to free memory for the report
        report(fault)
        return 1
    return 0


def report(fault: BaseException) -> None:
    """Print the traceback without the frames of this file."""
    own = report.__code__.co_filename
    summary = traceback.TracebackException(type(fault), fault, fault.__traceback__, limit=-20)
    summary.stack = traceback.StackSummary.from_list([f for f in summary.stack if f.filename != own])
    sys.stdout.flush()
    print("".join(summary.format(chain=False)), file=sys.stderr, end="")


def leave(source: str) -> None:
    """Run the code and end the process with its status."""
    sys.argv = [NAME]
    code = 1
    try:
        code = run(source)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Skip the interpreter's shutdown, so that the code's exit handlers and threads cannot interfere.
        os._exit(code & 0xFF)


if __name__ == "__main__":
    text = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.path.insert(0, "")
    leave(text)
