"""On-policy distillation (`algorithm.distillation`): a teacher says how likely it finds what the policy sampled."""

from __future__ import annotations

from typing import ClassVar

from tensordict import TensorDict

from agentrl.batch.rows import Ragged
from agentrl.cluster.dispatch import Broadcast, Strategy
from agentrl.config.schema import DistillationConfig, ModelConfig, OptimConfig, TrainConfig
from agentrl.errors import ConfigError
from agentrl.train.forward import compute_logprobs
from agentrl.train.minibatch import RowsShard, proximal_of
from agentrl.train.role import ModelRole, open_engine


class TeacherModel(ModelRole):
    """One rank of a frozen policy, of any size, that reads the same token ids."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {"init_model": Broadcast(), "compute_logprob": RowsShard()}

    def init_model(self, path: str, model: ModelConfig, optim: OptimConfig) -> None:
        """Load the model from a folder or hub name. Raises ModelError."""
        self._engine = open_engine(self, path, model.model_copy(update={"lora": None}))
        self._engine.freeze()
        self._cap = optim.micro_tokens

    def compute_logprob(self, batch: TensorDict, temperature: float = 1.0) -> TensorDict:
        """Ragged `logprobs` and `entropy` of the sampled tokens."""
        return compute_logprobs(self._ready(), Ragged.of(batch), temperature, self._cap)


def taught(view: Ragged, cfg: DistillationConfig) -> tuple[Ragged, dict[str, float]]:
    """The batch with `advantages` that also follow the teacher, and metrics. Of each sampled token

        A = reward_coef A_estimator + coef (log pi_teacher - log pi_old),

    with pi_old the proximal policy and both at the temperature of the rollouts. Without rewards that is the policy gradient of
    the reverse KL of policy and teacher at each token, E[log pi - log pi_teacher] (Gu et al. 2023, arXiv:2306.08543; Agarwal et
    al. 2023, arXiv:2306.13649). Departure from the former: what a token does to the KL of later ones is left out (a discount of
    0), and no teacher's samples are mixed in; from the latter: the one sampled token stands for the sum over the vocabulary.
    """
    mask = view.tokens("sampled")
    ahead = (view.tokens("teacher_logprobs") - proximal_of(view)) * mask
    count = mask.sum().clamp(min=1)
    advantages = cfg.reward_coef * view.tokens("advantages") + cfg.coef * ahead
    return view.with_tokens(advantages=advantages), {"teacher/kl": -float(ahead.sum() / count)}


def check_distillation(config: TrainConfig) -> None:
    """Raise ConfigError if a part of the config would drop or keep what only the teacher tells apart.

    Reads: algorithm, rollout.filter_zero_variance, rollout.accept.
    """
    if config.algorithm.distillation is None:
        return
    if config.rollout.filter_zero_variance:
        raise ConfigError(
            "rollout.filter_zero_variance drops groups whose rewards are equal, from which algorithm.distillation learns as "
            "from any other; unset one of the two"
        )
    kept = config.algorithm.experience
    if kept is not None and kept.term == "policy":
        raise ConfigError(
            'algorithm.experience.term = "policy" trains kept episodes with the advantages that they had, and what '
            'algorithm.distillation adds is of the policy as it was; set term = "supervised", or unset one of the two'
        )
