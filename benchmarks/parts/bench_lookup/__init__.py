"""Taskset of verifiers 0.4: look one number up, add it, report the total. Its plugin loader imports this package."""

import verifiers.v1 as vf

from bench_lookup.tools import LookupTools


class LookupData(vf.TaskData):
    """One row."""


class LookupTaskConfig(vf.TaskConfig):
    """Runs the tools in one server per rollout, the default."""

    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class LookupTask(vf.Task[LookupData, vf.State, LookupTaskConfig]):
    """Correct if the last message is the total."""

    @classmethod
    def toolsets(cls, config: LookupTaskConfig) -> list[vf.Toolset]:
        return [LookupTools(config.tools)]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == "1")


class LookupConfig(vf.TasksetConfig):
    """Number of rows."""

    num_tasks: int = 64
    task: LookupTaskConfig = LookupTaskConfig()


class LookupTaskset(vf.Taskset[LookupTask, LookupConfig]):
    """Rows that differ only in their number."""

    def load(self) -> list[LookupTask]:
        return [LookupTask(LookupData(prompt=f"report {n}"), self.config.task) for n in range(self.config.num_tasks)]


__all__ = ["LookupTaskset"]
