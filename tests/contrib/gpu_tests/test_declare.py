"""What a file declares is read without importing it, and what cannot be read is an error that says where and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.contrib.gpu_tests.declare import Declaration, listed_tests, read_declaration
from agentrl.utils.errors import ConfigError

HEAD = "import torch_that_is_not_there\nimport pytest\nfrom pytest import mark\n"


def read(tmp_path: Path, text: str) -> Declaration:
    path = tmp_path / "test_x.py"
    path.write_text(HEAD + text)
    return read_declaration(path, "test_x.py")


@pytest.mark.parametrize(
    ("text", "gpus", "timeout"),
    [
        ("", 0, None),
        ("pytestmark = pytest.mark.slow", 0, None),
        ("pytestmark = proof", 0, None),
        ("pytestmark = pytest.mark.gpus(2)", 2, None),
        ("pytestmark = mark.gpus(count=1, timeout=90)", 1, 90),
        ("pytestmark = [pytest.mark.slow, pytest.mark.gpus(4), proof]", 4, None),
        ("CARDS = 3\npytestmark: object = (pytest.mark.gpus(CARDS, timeout=1.5),)", 3, 1.5),
        ("pytestmark = pytest.mark.gpus(0)", 0, None),
    ],
)
def test_a_mark_that_can_be_read(tmp_path: Path, text: str, gpus: int, timeout: float | None) -> None:
    assert read(tmp_path, text) == Declaration(gpus, timeout, ())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("pytestmark = pytest.mark.gpus(torch.cuda.device_count())", "4: 'torch.cuda.device_count()' cannot be read as a number"),
        ("A = 1\nA = 2\npytestmark = pytest.mark.gpus(A)", "6: 'A' cannot be read as a number without importing the file"),
        ("pytestmark = pytest.mark.gpus(True)", "4: 'True' cannot be read as a number"),
        ("pytestmark = pytest.mark.gpus(-1)", "4: gpus needs a whole number of cards, 0 or more, not -1"),
        ("pytestmark = pytest.mark.gpus(1.5)", "4: gpus needs a whole number of cards, 0 or more, not 1.5"),
        ("pytestmark = pytest.mark.gpus()", "4: gpus needs a number of cards"),
        ("pytestmark = pytest.mark.gpus(1, 2)", "4: gpus takes one number of cards"),
        ("pytestmark = pytest.mark.gpus(1, timeuot=2)", "4: gpus has no argument 'timeuot'; did you mean 'timeout'?"),
        ("pytestmark = pytest.mark.gpus(1, timeout=0)", "4: timeout needs seconds, more than 0"),
        ("pytestmark = pytest.mark.gpus", "4: cards are given to a file, and this mark gpus cannot be read"),
        ("@pytest.mark.gpus(1)\ndef test_a(): ...", "4: cards are given to a file, and this mark gpus cannot be read"),
        ("if torch:\n    pytestmark = pytest.mark.gpus(1)", "5: cards are given to a file, and this mark gpus cannot be read"),
        ("pytestmark = [mark.gpus(1), mark.gpus(2)]", "4: a second mark gpus (the first: line 4)"),
        ("def broken(:", "4: this is no Python: invalid syntax"),
    ],
)
def test_a_mark_that_cannot_be_read(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"test_x.py:{told}")


def test_the_names_of_tests_as_far_as_they_can_be_seen(tmp_path: Path) -> None:
    text = "def test_a(): ...\ndef helper(): ...\nclass TestB:\n    async def test_c(self): ...\n    def other(self): ...\n"
    assert read(tmp_path, text).tests == ("test_a", "TestB::test_c") == listed_tests(tmp_path / "test_x.py")
    (tmp_path / "broken.py").write_text("def (")
    assert listed_tests(tmp_path / "broken.py") == ()
