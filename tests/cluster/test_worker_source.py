"""A worker imports what the driver imports: the working directory comes last, and another agentrl is refused by name."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import agentrl
from tests.conftest import proof

ROOT = Path(agentrl.__file__).parents[1]
DRIVER = """
import json, os, sys
from agentrl.cluster.ray_group import Hosts
from agentrl.cluster.ray_cluster import start_ray, stop_ray
from agentrl.config.schema import ClusterConfig

{before}
start_ray(ClusterConfig(), object_store_bytes=100 << 20)
try:
    import ray
    hosts = Hosts("source", [{{"num_cpus": 0.1, {options}}}], {limit})
    def look(self):
        import importlib, os, profile, sys
        found = {{}}
        for name in ("agentrl", "profile", "helper", "only_here"):
            try:
                found[name] = importlib.import_module(name).__file__
            except ImportError:
                found[name] = None
        return found | {{"python": sys.executable}}
    print("SEEN " + json.dumps(ray.get(hosts.handles[0].__ray_call__.remote(look))))
finally:
    stop_ray()
"""


def driven(
    folder: Path,
    *,
    before: str = "",
    program: tuple[str, ...] = (sys.executable,),
    limit: float = 60.0,
    options: str = "",
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """A driver that is a script elsewhere, with `folder` as its working directory."""
    script = folder.parent / "script" / "drive.py"
    script.parent.mkdir(exist_ok=True)
    (script.parent / "helper.py").write_text("")
    script.write_text(DRIVER.format(before=textwrap.dedent(before), limit=limit, options=options))
    hidden = ("RAY_ADDRESS", "AGENTRL_PATH", "PYTHONSAFEPATH")
    variables = {key: value for key, value in os.environ.items() if key not in hidden}
    return subprocess.run(
        [*program, str(script)],
        cwd=folder,
        env={**variables, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        timeout=180,
    )


def seen(ran: subprocess.CompletedProcess[str]) -> dict[str, str | None]:
    import json

    lines = [line for line in ran.stdout.splitlines() if line.startswith("SEEN ")]
    assert lines, ran.stderr[-3000:]
    found: dict[str, str | None] = json.loads(lines[0].removeprefix("SEEN "))
    return found


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A working directory with another checkout of agentrl and a module that is named as one of Python's."""
    folder = tmp_path / "other"
    shutil.copytree(ROOT / "agentrl", folder / "agentrl", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "agentrl" / "changed.py").write_text("")
    (folder / "profile.py").write_text("raise SystemExit('a module of the user')\n")
    (folder / "only_here.py").write_text("")
    return folder


def test_a_worker_imports_what_the_driver_does_and_the_working_directory_last(other: Path) -> None:
    import profile

    found = seen(driven(other))
    assert found["agentrl"] == agentrl.__file__
    assert found["profile"] == profile.__file__
    assert found["helper"] == str(other.parent / "script" / "helper.py")  # the script's folder is on the driver's path
    assert found["only_here"] == str(other / "only_here.py")


@proof
def test_an_editable_install_comes_before_the_working_directory_too(other: Path) -> None:
    """An editable install may be found by a finder: a working directory on `sys.path` would then win in the workers."""
    ran = driven(other, env={"PYTHONPATH": ""}, program=(sys.executable, "-c", FINDER))
    assert seen(ran)["agentrl"] == agentrl.__file__


FINDER = f"""
import importlib.machinery, os, runpy, sys
class Editable:
    def find_spec(name, path=None, target=None):
        return importlib.machinery.PathFinder.find_spec(name, [{str(ROOT)!r}]) if name == "agentrl" else None
sys.meta_path.insert(0, Editable)
sys.path[:] = [one for one in sys.path if one and not os.path.exists(one + "/agentrl/__init__.py")]
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@proof
def test_a_worker_with_another_agentrl_is_refused_by_its_path(other: Path) -> None:
    """In a Ray that the caller started, workers import from the working directory first."""
    ran = driven(
        other, before="import ray; os.remove('profile.py'); ray.init(address='local', num_cpus=1, include_dashboard=False)"
    )
    assert "ResourceError" in ran.stderr
    assert str(other / "agentrl" / "__init__.py") in ran.stderr
    assert agentrl.__file__ in ran.stderr


@pytest.mark.parametrize("under", ["", "sub/folder"])
def test_uv_run_starts_workers_with_the_drivers_python(other: Path, under: str) -> None:
    """Ray's hook for `uv run` starts workers by `uv run python` in a copy of the folder, and refuses a subfolder of a project."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    (other / "pyproject.toml").write_text('[project]\nname = "mine"\nversion = "0"\nrequires-python = ">=3.11"\n')
    folder = other / under
    folder.mkdir(parents=True, exist_ok=True)
    run = (uv, "run", "--no-sync", "--offline", "--python", sys.executable, sys.executable)
    found = seen(driven(folder, program=run))
    assert (found["python"], found["agentrl"]) == (sys.executable, agentrl.__file__)


def test_a_start_that_fails_says_why_and_blames_placement_only_for_placement(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "site").mkdir()
    # A worker process that ends before it knows its driver: only a log says why.
    (tmp_path / "site" / "sitecustomize.py").write_text("import os, sys\nif 'BREAKS' in os.environ: sys.exit('no libraries')\n")
    ran = driven(
        tmp_path / "here",
        limit=15,
        options='"runtime_env": {"env_vars": {"BREAKS": "1"}}',
        env={"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"},
    )
    said = ran.stderr.splitlines()[-1]
    assert "0 of 1 workers started within 15 s" in said
    assert "no libraries" in said
    assert "each asks for" not in said
