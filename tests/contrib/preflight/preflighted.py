"""Questions before a run."""

from agentrl.config import TrainConfig
from agentrl.contrib.preflight.services import check_preflight
from agentrl.run.assembly import scorer_of
from agentrl.run.checks import RunStart


def preflight(config: TrainConfig, free: bool = False) -> None:
    """Ask as `agentrl train` does, or as its dry run (`free`)."""
    check_preflight(RunStart(config, {config.envs[0].called: scorer_of(config)}, planned=free))
