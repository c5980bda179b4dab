"""Cards of a stand-in for `nvidia-smi`, which prints what the real one does."""

import os
from pathlib import Path

import pytest


class Smi:
    """A folder with a program `nvidia-smi` of `count` cards; `use` sets a card's memory in MiB."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        program = folder / "nvidia-smi"
        program.write_text(
            f"#!/bin/sh\ncd '{folder}'\ncase $1 in --query-gpu=index,uuid,memory.used) for card in ?.card; do"
            ' i=${card%.card}; echo "$i, GPU-$i, $(cat $card)"; done;;'
            " --query-compute-apps=*) cat apps;; *) exit 9;; esac\n[ ! -e fails ]\n"
        )
        program.chmod(0o755)
        (folder / "apps").touch()
        for card in range(count):
            self.use(card, 4)

    def use(self, card: int, mib: int | str) -> None:
        (self.folder / f"{card}.card").write_text(str(mib))


@pytest.fixture
def smi(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Smi:
    made = Smi(tmp_path_factory.mktemp("smi"), 3)
    monkeypatch.setenv("PATH", str(made.folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made
