"""What a run makes of keys that leave the choice to it, as far as the config and this machine say it before the model is read."""

from __future__ import annotations

from agentrl.cluster.devices import has_gpus, joins
from agentrl.config import TrainConfig
from agentrl.config.envs import longest_sample
from agentrl.config.toml import inline
from agentrl.run.engines import AUTO, engine_name
from agentrl.train.kl import kl_kind
from agentrl.train.rates import optims_of


def derived(config: TrainConfig) -> dict[str, str]:
    """Key -> its value as TOML. `--dry-run` says the rest, which takes the model and the cluster's nodes.

    Raises UserError as the choice of an engine does.
    """
    several = isinstance(config.env, list)
    called = {f"env.{number}.name" if several else "env.name": env for number, env in enumerate(config.envs) if env.name is None}
    found = {key: inline(env.called) for key, env in called.items()}
    algorithm = config.algorithm
    if algorithm.length_norm is None and algorithm.aggregate == "seq_mean_token_sum_norm":
        found["algorithm.length_norm"] = inline(longest_sample(config))
    if algorithm.kl.kind is None and algorithm.kl.coef > 0:
        found["algorithm.kl.kind"] = inline(kl_kind(algorithm.kl))
    given = {"optim": config.optim, "critic": config.critic, "sft": config.sft}
    rates = {f"{at}.lr": optim.lr for at, optim in optims_of(config).items() if getattr(given[at], "lr") is None}  # noqa: B009
    found |= {key: inline(lr) for key, lr in rates.items()}
    if config.sft is not None and config.sft.optimizer is None:
        found["sft.optimizer"] = inline(optims_of(config)["sft"].name)
    if joins(config.cluster):  # what its nodes have is not known here
        return found
    if config.engine == AUTO:
        found["engine"] = inline(engine_name(config))
    if config.model.dtype == "auto":
        found["model.dtype"] = inline(config.model.computes_in(has_gpus(config.cluster, "actor")))
    return found
