"""A parse within another, which Python 3.11 answers with a SystemError."""

import ast
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from agentrl.utils.parsing import expression_of, module_of
from agentrl.utils.search_path import give, source_digest

TEXT = "[" + ", ".join(f"move(a={number}, to=[1, (2, 3)])" for number in range(60)) + "]"


class Disturbance:
    """What the garbage collector calls: it parses, once after each `rearm`."""

    def __init__(self) -> None:
        self.armed, self.times = False, 0

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        if self.armed:
            self.armed, self.times = False, self.times + 1
            ast.parse("a.b.c.d.e")


@pytest.fixture
def disturbance() -> Iterator[Disturbance]:
    found, before = Disturbance(), gc.get_threshold()
    gc.callbacks.append(found)
    gc.set_threshold(20, 1, 1)
    yield found
    gc.set_threshold(*before)
    gc.callbacks.remove(found)


def test_a_parse_within_a_parse_is_tried_again(disturbance: Disturbance) -> None:
    for _ in range(50):
        disturbance.armed = True
        assert isinstance(expression_of(TEXT), ast.List)
        disturbance.armed = True
        assert len(module_of(f"x = {TEXT}\ny = 1").body) == 2
    assert disturbance.times > 50


def test_the_source_of_a_class_is_read_within_a_parse(disturbance: Disturbance) -> None:
    """Of two evaluations at once, one ended with a SystemError."""
    name, found = give(Disturbance), set()
    for _ in range(50):
        disturbance.armed = True
        found.add(source_digest(name))
    assert disturbance.times > 20 and len(found) == 1


@pytest.mark.parametrize(
    ("text", "error"),
    [("f(", SyntaxError), ("f\0", (SyntaxError, ValueError)), ("-" * 200_000 + "1", (RecursionError, MemoryError))],
)
def test_what_is_wrong_with_a_text_is_said_as_python_says_it(text: str, error: type[BaseException]) -> None:
    with pytest.raises(error):
        expression_of(text)
