"""Questions before a run."""

from agentrl.config import TrainConfig
from agentrl.contrib.preflight.services import check_preflight
from agentrl.run.checks import RunStart
from tests.run.starts import scorer_of


def preflight(config: TrainConfig, free: bool = False) -> None:
    """Ask as `agentrl train` does, or as its dry run (`free`)."""
    check_preflight(RunStart(config, {config.envs[0].called: scorer_of(config)}, planned=free))
