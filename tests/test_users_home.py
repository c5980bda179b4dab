"""The suite sees nothing of who runs it: no home, no keys, no settings of agentrl or of the programs around it."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLANTED = {
    "AGENTRL_PATH": "/somewhere", "AGENTRL_HUB": "mine", "OPENAI_API_KEY": "sk-planted", "MY_TOKEN": "planted",
    "WANDB_MODE": "online", "HF_HUB_OFFLINE": "0", "RAY_ADDRESS": "10.0.0.1:6379", "https_proxy": "http://10.0.0.1:3128",
    "COLUMNS": "40", "NO_COLOR": "1", "LANG": "de_DE.UTF-8", "TZ": "Asia/Tokyo", "XDG_CACHE_HOME": "/somewhere",
    "RANK": "3", "MASTER_PORT": "1", "PYTHONHASHSEED": "7", "NCCL_SOCKET_IFNAME": "eth9", "TMPDIR": "/a folder",
    "PYTEST_ADDOPTS": "-v", "PYTHONWARNINGS": "error::ResourceWarning", "A_PROGRAM_THAT_IS_NEW": "1",
}  # fmt: skip
KEPT = {"AGENTRL_REQUIRE_VLLM": "", "AGENTRL_BFCL_SOURCE": "/b", "AGENTRL_PROOFS": "", "PATH": os.environ["PATH"]}


def test_variables_and_home_of_the_user_are_taken_away(tmp_path: Path) -> None:
    (tmp_path / ".agentrl").mkdir()
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    program = (
        "import json, os, sys, time, warnings, tests.conftest; tests.conftest.forget_warnings(); "
        "found = {'ZONE': time.tzname[0], 'WARNED': [*sys.warnoptions, *{how for how, *_ in warnings.filters}]}; "
        "print(json.dumps({**os.environ, **found}))"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**env, **PLANTED, **KEPT, "HOME": str(tmp_path), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    seen = json.loads(done.stdout.splitlines()[-1])
    assert {name: seen[name] for name in PLANTED if name in seen} == {"LANG": "C.UTF-8", "TZ": "UTC"}
    assert {name: seen[name] for name in KEPT} == KEPT
    assert seen["PYTHONPATH"] == str(ROOT) and seen["ZONE"] == "UTC" and "error" not in seen["WARNED"]
    assert seen["HOME"] != str(tmp_path) and not (Path(seen["HOME"]) / ".agentrl").exists()
