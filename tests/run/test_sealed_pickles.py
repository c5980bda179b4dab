"""Each file of a whole checkpoint is replaced by a pickle that would run, and sealed again: a resume runs none."""

import pickle
import shutil
from pathlib import Path

from agentrl.trainer.checkpoint import check_intact, seal
from tests.conftest import PROOFS
from tests.e2e.runs import small, train
from tests.trainer.test_hostile_checkpoints import Payload

INLINE = ("cluster.backend=inline", "engine=embedded", "sft=false", "trackers=[]", "steps=2", "eval.tasks=2", "rollout.groups=2")


def test_a_resume_runs_no_pickle_of_a_sealed_checkpoint(tmp_path: Path) -> None:
    train(tmp_path, *small(tmp_path, "whole", *INLINE, "checkpoint.every=1"))
    run = tmp_path / "whole"
    newest = max((run / "checkpoints").glob("step_*"))
    files = sorted(str(file.relative_to(newest)) for file in newest.rglob("*") if file.is_file() and file.name != "manifest.json")
    assert {"actor/.metadata", "actor/rng_0.pt"} <= set(files) and len(files) >= 5
    marker = tmp_path / "ran"
    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.is_dir(), "the payload works"
    marker.rmdir()
    for name in files if PROOFS else [file for file in files if file.startswith("actor/")]:
        copy = tmp_path / "r"
        shutil.copytree(run, copy)
        target = copy / "checkpoints" / newest.name
        (target / name).write_bytes(pickle.dumps(Payload(marker)))
        (target / "manifest.json").unlink()  # it would be listed, and change
        seal(target, int(newest.name.removeprefix("step_")))
        check_intact(target)
        said = train(tmp_path, "--resume", str(copy), "steps=3", code=2)
        assert not marker.exists(), f"{name}: its pickle ran"
        assert "Traceback" not in said and str(target) in said, f"{name}: {said[-500:]}"
        shutil.rmtree(copy)
