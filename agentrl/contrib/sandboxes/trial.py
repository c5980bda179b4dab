"""Trial of a plug-in's sandbox provider before a run."""

from __future__ import annotations

import asyncio
from typing import Any

from agentrl.config import Choice
from agentrl.contrib.preflight.plugin_trials import TRIALS, TrialError, expect_type
from agentrl.contrib.sandboxes.contract import SANDBOXES, ExecResult, Sandbox, SandboxProvider, SandboxSpec


@TRIALS.register("env.sandbox.provider")
def try_provider(make: Any, choice: Choice) -> None:
    """A command and a file of a sandbox that starts here; one on other machines costs money, and is not started."""
    expect_type(SandboxProvider, provider := make())
    if (reason := provider.unavailable()) is not None:
        return expect_type(str, reason)  # the check of environments says it

    async def use() -> None:
        expect_type(Sandbox, sandbox := await provider.start(SandboxSpec()))
        try:
            expect_type(ExecResult, await sandbox.exec(["true"]))
            await sandbox.write({"a": b"text"})
            if (content := await sandbox.read("a")) != b"text":
                raise TrialError(f"reads {content!r:.60} from a file, expected b'text', which was written")
        finally:
            await sandbox.stop()

    if "remote" not in SANDBOXES.entry(choice.name).traits:
        asyncio.run(use())
