"""Code that would rather pass its tests than be right, by the trick that it tries."""

REPORT = b'{"passed": {"t::a": true}, "why": {}, "broken": null, "fault": null}'
"""What the tests' process writes if all pass."""

FAKES = {
    "leaves with status 0": r"""
import sys
sys.exit(0)
""",
    "leaves at once": r"""
import os
os._exit(0)
""",
    "leaves when called": r"""
import os
def add(a, b): os._exit(0)
""",
    "exits when called": r"""
import sys
def add(a, b): sys.exit(0)
""",
    "interrupts when called": "def add(a, b): raise KeyboardInterrupt",
    "patches pytest": r"""
import _pytest.runner
_pytest.runner.call_runtest_hook = None
def add(a, b): return 0
""",
    "prints a report": r"""
import os
report = REPORT
for fd in range(30):
    try: os.write(fd, report)
    except OSError: pass
os._exit(0)
""",
    "writes into the tests' output": r"""
import os
report = REPORT
def add(a, b):
    for one in (os.getppid(), 1, 2):
        try: open(f'/proc/{one}/fd/1', 'wb').write(report)
        except OSError: pass
    os.kill(os.getppid(), 9)
""",
    "writes a conftest": r"""
import pathlib
for place in ('.', '..', '../tests', '/'):
    for name in ('conftest.py', 'pytest.ini', 'test_task.py', 'sitecustomize.py', 'json.py'):
        try: pathlib.Path(place, name).write_text('def pytest_runtest_call(item): pass')
        except OSError: pass
def add(a, b): return None
""",
    "equals everything": r"""
class Any:
    def __eq__(self, o): return True
    def __sub__(self, o): return 0.0
    def __hash__(self): return 1
def add(a, b): return Any()
""",
    "kills the tests": r"""
import os, signal
def add(a, b): os.kill(os.getppid(), signal.SIGKILL)
""",
    "answers garbage": r"""
import os, sys
def add(a, b): os.write(int(sys.argv[2]), b'\0\0\0\5{"x"}' * 9)
""",
    "answers for ever": r"""
import os, sys
def add(a, b): os.write(int(sys.argv[2]), b'\x7f\xff\xff\xff')
""",
    "reads the tests": r"""
import os, re
def add(a, b):
    found = b''
    for top in ('..', '/app', '/tmp', '/proc'):
        for folder, _, names in os.walk(top):
            for name in names:
                if folder.startswith('/proc') and name not in ('mem', 'cmdline', 'environ'): continue
                try: found += open(os.path.join(folder, name), 'rb').read(1 << 20)
                except (OSError, ValueError): pass
    want = re.search(rb'assert add\(%d, %d\) == (\d+)' % (a, b), found)
    return int(want[1])
""",
    "reads the tests' memory": r"""
import os, re
def add(a, b):
    one = os.getppid()
    with open(f'/proc/{one}/mem', 'rb') as memory:
        for line in open(f'/proc/{one}/maps'):
            begin, end = (int(x, 16) for x in line.split()[0].split('-'))
            if ' rw' in line:
                memory.seek(begin)
                try: found = memory.read(end - begin)
                except OSError: continue
                if want := re.search(rb'assert add\(%d, %d\) == (\d+)' % (a, b), found):
                    return int(want[1])
""",
    "is too deep": r"""
def add(a, b):
    x = []
    for _ in range(10**5): x = [x]
    return x
""",
    "is too long": "def add(a, b): return 'x' * 10**8",
    "asks for memory": "def add(a, b): return len(bytearray(1 << 34))",
}
FAKES = {name: code.replace("REPORT", repr(REPORT)) for name, code in FAKES.items()}
