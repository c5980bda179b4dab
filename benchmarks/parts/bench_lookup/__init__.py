"""A taskset of verifiers 0.4: look one number up, add it, report the total. Imported by its own plugin loader."""

import verifiers.v1 as vf

from bench_lookup.tools import LookupTools


class LookupData(vf.TaskData):
    """One row."""


class LookupTaskConfig(vf.TaskConfig):
    """Where the tools run: a server of its own for each rollout, the default."""

    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class LookupTask(vf.Task[LookupData, vf.State, LookupTaskConfig]):
    """Right if the last message is the total."""

    @classmethod
    def toolsets(cls, config: LookupTaskConfig) -> list[vf.Toolset]:
        return [LookupTools(config.tools)]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == "1")


class LookupConfig(vf.TasksetConfig):
    """How many rows."""

    num_tasks: int = 64
    task: LookupTaskConfig = LookupTaskConfig()


class LookupTaskset(vf.Taskset[LookupTask, LookupConfig]):
    """Rows that differ in their number only."""

    def load(self) -> list[LookupTask]:
        return [LookupTask(LookupData(prompt=f"report {n}"), self.config.task) for n in range(self.config.num_tasks)]


__all__ = ["LookupTaskset"]
