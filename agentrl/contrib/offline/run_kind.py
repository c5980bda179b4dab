"""Training on [data] as a kind of run."""

from __future__ import annotations

from agentrl.contrib.offline.checks import check_data
from agentrl.contrib.offline.data_run import only_data, summary_of_data, train_on_data, write_data
from agentrl.run.driver import RUN_KINDS, RunKind


@RUN_KINDS.register("data")
class DataRunKind(RunKind):
    """Training on [data]: `agentrl sft --data`."""

    check = staticmethod(check_data)
    prepare = staticmethod(write_data)
    shown = staticmethod(only_data)
    train = staticmethod(train_on_data)
    summary = staticmethod(summary_of_data)
