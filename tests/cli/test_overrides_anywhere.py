"""Overrides may stand before and behind options; anything else that is left over is refused."""

from __future__ import annotations

import pytest

from agentrl.cli.main import _parse


def test_overrides_behind_an_option_are_taken() -> None:
    args = _parse(["train", "x.toml", "a.b=1", "--overwrite", "c=2"])
    assert args.overrides == ["a.b=1", "c=2"] and args.overwrite


@pytest.mark.parametrize(
    "argv", [["train", "x.toml", "--overwrit3", "a=1"], ["env", "list", "a=1"], ["train", "x.toml", "--overwrite", "y"]]
)
def test_what_is_left_over_is_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        _parse(argv)
    assert caught.value.code == 2
