"""Gold solutions of BFCL's tasks, whose gold is possible answers."""

from agentrl.contrib.toolkit.bfcl_calls import possible_call, solvable
from tests.contrib.toolkit.test_bfcl_languages import FUNCTION, GOLD, RIGHT


def test_a_gold_call_can_be_written_in_each_language() -> None:
    functions = {"Sets.fill": FUNCTION["parameters"]}
    assert possible_call(GOLD[0], functions, "java") == ("Sets.fill", RIGHT)
    assert solvable(GOLD, functions, "java")
    assert not solvable([{"Sets.fill": {"size": ["many"], "names": [[1, "a"]]}}], functions, "java")
