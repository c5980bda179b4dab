"""Tests and code, with what the grading owes: right code is paid, wrong code is not, and a fault of the tests is null."""

UNIT = """
import unittest, solution
class TestAll(unittest.TestCase):
    def test_each(self):
        for n in range(3):
            with self.subTest(n=n):
                self.assertEqual(solution.f(n), n * 2)
"""
PYTEST = """
import solution
def test_each(subtests):
    for n in range(3):
        with subtests.test(n=n):
            assert solution.f(n) == n * 2
"""
RAISES = "import pytest, solution\ndef test_it():\n    with pytest.raises({}):\n        solution.f(1)\n"
SKIPS = "import pytest, solution\ndef test_ok(): assert solution.f(1) == 2\n"
OK = "def f(n): return n * 2\n"
HANGS = "import time\ndef f(n): time.sleep(60)\n"
LEAVES = "import os\ndef f(n): os._exit(0)\n"
ALL = "class All(list):\n    def __contains__(self, x): return True\nclass Any:\n    def __contains__(self, x): return True\n"
WRONG = """
class V:
    def __init__(self, n=0): self.n = n
    def __add__(self, other): return self
    def __gt__(self, other): return not isinstance(other, V) or self.n > other.n
    __ge__ = __gt__
    __rsub__ = __truediv__ = __add__
    def __int__(self): return 3
async def g(): pass
def f(n): pass
"""


def calls(body: str, given: str = "") -> str:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return f"import pytest\nimport solution\n{given}\ndef test_it(capsys):\n{lines}\n"


PROGRAMS: dict[str, tuple[str, str, float | None]] = {
    # -- subtests
    "unittest's subTest, right": (UNIT, OK, 1.0),
    "unittest's subTest, wrong": (UNIT, "def f(n): return 7", 0.0),
    "unittest's subTest, the first wrong": (UNIT, "def f(n): return n * 2 if n else 5", 0.0),
    "unittest's subTest, raising": (UNIT, "def f(n): raise ValueError", 0.0),
    "unittest's subTest, hanging": (UNIT, HANGS, 0.0),
    "unittest's subTest, leaving": (UNIT, LEAVES, 0.0),
    "pytest's subtests, right": (PYTEST, OK, 1.0),
    "pytest's subtests, the first wrong": (PYTEST, "def f(n): return n * 2 if n else 5", 0.0),
    # -- expected exceptions
    "raises what is expected": (RAISES.format("ValueError"), "def f(n): raise ValueError('no')", 1.0),
    "raises something else": (RAISES.format("ValueError"), "def f(n): raise KeyError('no')", 0.0),
    "hangs where any exception is expected": (RAISES.format("Exception"), HANGS, 0.0),
    "leaves where any exception is expected": (RAISES.format("BaseException"), LEAVES, 0.0),
    "exits where any exception is expected": (RAISES.format("Exception"), "def f(n): raise SystemExit(0)", 0.0),
    "exits where that is expected": (RAISES.format("SystemExit"), "import sys\ndef f(n): sys.exit(2)", 1.0),
    "answers garbage where any exception is expected": (
        RAISES.format("Exception"),
        "import json, os, sys\ndef f(n):\n    text = json.dumps({'value': {'no': 1}}).encode()\n"
        "    os.write(int(sys.argv[2]), len(text).to_bytes(4, 'big') + text)\n    import time; time.sleep(60)",
        0.0,
    ),
    "swallowed by the test": (calls("try: solution.f(1)\nexcept Exception: pass"), LEAVES, 0.0),
    "a UnicodeDecodeError": (
        calls("with pytest.raises(UnicodeDecodeError, match='invalid'): solution.f(b'\\xff')"),
        "def f(b): return b.decode()",
        1.0,
    ),
    "a KeyError and its key": (
        calls("with pytest.raises(KeyError) as e: solution.f({})\nassert e.value.args == ('x',) and str(e.value) == \"'x'\""),
        "def f(d): return d['x']",
        1.0,
    ),
    "an OSError and its number": (
        calls("with pytest.raises(FileNotFoundError) as e: solution.f()\nassert e.value.errno == 2"),
        "def f(): open('/none')",
        1.0,
    ),
    "an exception of the library": (
        "import json\n" + calls("with pytest.raises(json.JSONDecodeError): solution.f('{')"),
        "import json\ndef f(t): return json.loads(t)",
        1.0,
    ),
    "an exception with its own text": (
        calls("with pytest.raises(ValueError, match='code 7'): solution.f()"),
        "class Bad(ValueError):\n    def __str__(self): return f'code {self.args[0]}'\ndef f(): raise Bad(7)",
        1.0,
    ),
    # -- objects
    "an object that contains everything": (calls("assert 3 in solution.f()"), f"{ALL}def f(): return Any()", 0.0),
    "an object that contains every text": (calls("assert 'error' in solution.f()"), f"{ALL}def f(): return Any()", 0.0),
    "an object that contains what it should": (
        calls("one = solution.Span(1, 9)\nassert 3 in one and 10 not in one"),
        "class Span:\n    def __init__(self, *ends): self.ends = ends\n    def __contains__(self, x): return 1 <= x <= 9",
        1.0,
    ),
    "a list that contains everything": (calls("assert 3 in solution.f()"), f"{ALL}def f(): return All()", 0.0),
    # -- what a call changes
    "a list by keyword": (calls("xs = [2, 1]\nsolution.f(xs=xs)\nassert xs == [1, 2]"), "def f(xs): xs.sort()", 1.0),
    "a dict by keyword": (calls("d = {}\nsolution.f(1, into=d)\nassert d == {1: 2}"), "def f(k, into): into[k] = 2", 1.0),
    "a list within a list": (calls("row = [0]\nsolution.f([row])\nassert row == [1]"), "def f(g): g[0][0] = 1", 1.0),
    "a bytearray": (calls("b = bytearray(2)\nsolution.f(b)\nassert b == b'\\x01\\0'"), "def f(b): b[0] = 1", 1.0),
    "a list, and then an exception": (
        calls("xs = []\nwith pytest.raises(ValueError): solution.f(xs)\nassert xs == [1]"),
        "def f(xs): xs.append(1); raise ValueError",
        1.0,
    ),
    # -- what is printed
    "standard output alone": (
        calls("solution.f()\nout, err = capsys.readouterr()\nassert (out, err) == ('out\\n', 'err\\n')"),
        "import sys\ndef f(): print('out'); print('err', file=sys.stderr)",
        1.0,
    ),
    "bytes to standard output": (
        calls("solution.f()\nassert capsys.readouterr().out == 'é\\n'"),
        "import sys\ndef f(): sys.stdout.buffer.write('é\\n'.encode())",
        1.0,
    ),
    # -- how the code is compiled
    "annotations are values": (
        calls("assert solution.f() == [True, True]"),
        "def g(a: int) -> str: pass\ndef f(): return [g.__annotations__['a'] is int, g.__annotations__['return'] is str]",
        1.0,
    ),
    "annotations are texts where the code says so": (
        calls("assert solution.f() == 'int'"),
        "from __future__ import annotations\ndef g(a: int): pass\ndef f(): return g.__annotations__['a']",
        1.0,
    ),
    # -- what is not supported, where a test expects the exception that Python itself would raise for it
    **{
        f"wrong code, not refused: {ask}": (calls(f"with pytest.raises(({kinds})): {ask}"), WRONG, owed)
        for ask, kinds, owed in (
            ("solution.V() + 5", "TypeError", 0.0),
            ("5 - solution.V()", "TypeError", 0.0),
            ("solution.V() > 5", "TypeError", 0.0),
            ("solution.V() / solution.V()", "TypeError, ZeroDivisionError", 0.0),
            ("int(solution.V())", "TypeError", 0.0),
            ("__import__('asyncio').run(solution.g())", "ValueError", 0.0),
            ("solution.f(object())", "TypeError", None),
        )
    },
    "a list takes what an object yields": (
        calls("xs = [1]\nxs += solution.f()\nassert xs == [1, 0]"),
        "def f(): return range(1)",
        1.0,
    ),
    "objects in order": (
        calls("a, b = solution.V(1), solution.V(2)\nassert b > a and b >= a and sorted([b, a]) == [a, b]"),
        WRONG,
        1.0,
    ),
    "much data": (calls("assert len(solution.f(list(range(600_000)))) == 600_000"), "def f(n): return n", 1.0),
    # -- faults of the tests
    "a module that the sandbox lacks": ("import solution\nimport numpy\ndef test_it(): assert solution.f(1) == 2", OK, None),
    "a module that it lacks, in a test": (calls("import numpy\nassert solution.f(1) == 2"), OK, None),
    "a wrong parametrize": (
        "import pytest, solution\n@pytest.mark.parametrize('m', [1])\ndef test_it(n): assert solution.f(n) == 2",
        OK,
        None,
    ),
    "a fixture that nobody has": ("import solution\ndef test_it(database): assert solution.f(1) == 2", OK, None),
    "a name that the tests lack": (calls("assert solution.f(1) == expected"), OK, None),
    "a NameError of the code": (calls("assert solution.f(1) == 2"), "def f(n): return m", 0.0),
    "a module that the code lacks": (calls("assert solution.f(1) == 2"), "import numpy\ndef f(n): return 2", 0.0),
    "a module that the code lacks when called": (
        calls("assert solution.f(1) == 2"),
        "def f(n):\n    import numpy\n    return 2",
        0.0,
    ),
    "a function that the code lacks": ("from solution import g\ndef test_it(): assert g(1)", OK, 0.0),
    # -- tests that are skipped as they run
    "skipped by pytest.skip": (f"{SKIPS}def test_more(): pytest.skip('not here')", OK, 1.0),
    "skipped by importorskip": (f"{SKIPS}def test_more(): pytest.importorskip('numpy')", OK, 1.0),
    "skipped by unittest": (
        f"import unittest\n{SKIPS}class T(unittest.TestCase):\n    def test_x(self): self.skipTest('no')",
        OK,
        1.0,
    ),
    "skipped after what the code has answered": (
        f"{SKIPS}def test_more():\n    if solution.g() is None: pytest.skip('no')\n    assert solution.g() == 3",
        f"{OK}def g(): pass",
        0.0,
    ),
    "skipped by an exception of the code": (
        calls("assert solution.f(1) == 2"),
        "import unittest\ndef f(n): raise unittest.SkipTest('no')",
        0.0,
    ),
    "all skipped": ("import pytest, solution\ndef test_it(): pytest.skip('no')", OK, None),
}
