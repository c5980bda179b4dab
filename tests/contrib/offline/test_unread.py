"""A key that is set and read by nothing is refused with what would read it; its default may be written out."""

import pytest

from agentrl.config import TrainConfig
from agentrl.config.load import config_from
from agentrl.contrib.offline.data_run import _check_loss
from agentrl.trainer.learner import check_learner
from agentrl.utils.errors import ConfigError


def config(*words: str) -> TrainConfig:
    return config_from({"env": {"id": "key_value"}, "model": {"init": {}}}, words)


@pytest.mark.parametrize(
    ("word", "needs", "besides"),
    [
        ("algorithm.entropy_max=0.1", "algorithm.entropy_target", ["algorithm.entropy_target=0.1"]),
        ("algorithm.entropy_step=0.01", "algorithm.entropy_target", ["algorithm.entropy_target=0.1"]),
        (
            "algorithm.kl.decay=0.5",
            'algorithm.kl.reference = "moving"',
            ["algorithm.kl.reference=moving", "algorithm.kl.coef=0.1"],
        ),
    ],
)
def test_of_an_algorithm(word: str, needs: str, besides: list[str]) -> None:
    with pytest.raises(ConfigError, match=rf"^{word.partition('=')[0]} = 0\.\d+ is read with {needs} alone; set that too, or"):
        check_learner(config(word))
    check_learner(config(word, *besides))
    check_learner(config("algorithm.entropy_max=0.005", "algorithm.entropy_step=0.0001", "algorithm.kl.decay=0.99"))


@pytest.mark.parametrize(
    ("word", "loss", "others", "needs"),
    [
        ("data.beta=0.5", "dpo", ["sft", "reward"], 'data.loss = "dpo"'),
        ("data.margin=0.5", "dpo", ["sft"], "a data.loss of pairs"),
        ("data.margin=0.5", "reward", ["sft"], "a data.loss of pairs"),
    ],
)
def test_of_data(word: str, loss: str, others: list[str], needs: str) -> None:
    def check(*words: str) -> None:
        given = config('data.path=["x"]', *words)
        assert given.data is not None
        _check_loss(given.data, given.model)

    check(f"data.loss={loss}", word)
    for other in others:
        with pytest.raises(ConfigError, match=f"is read with {needs} alone"):
            check(f"data.loss={other}", word)
        check(f"data.loss={other}", "data.beta=0.1", "data.margin=1e-6")
