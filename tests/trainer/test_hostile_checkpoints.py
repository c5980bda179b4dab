"""Loading a checkpoint that another wrote runs nothing in it: each payload would make a file."""

import json
import os
import pickle
import pickletools
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

import agentrl
from agentrl.trainer.checkpoint import check_intact, seal
from agentrl.trainer.train_state import load_state, metadata_of, save_state, saved_tensors
from agentrl.utils.errors import CheckpointError


class Payload:
    """Pickles as a call of os.mkdir."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def engine(fill: float = 0.0) -> Any:
    held = {"model.a": torch.full((3, 2), fill), "optimizer.a": torch.full((4,), fill, dtype=torch.bfloat16)}
    return SimpleNamespace(state=lambda: held)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_state(engine(2.0), tmp_path / "actor", {"updates": 7})
    return tmp_path / "actor"


def metadata(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


def rewrite(folder: Path, found: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    seal(folder.parent, 7)  # as one would who wants it to pass for whole
    check_intact(folder.parent)


def fails(folder: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        load_state(engine(), folder)
    with pytest.raises(CheckpointError, match=match):
        names, read = saved_tensors(folder)
        for name in names:
            read(name)


def test_a_checkpoint_is_read_as_torch_reads_it(folder: Path) -> None:
    into = engine()
    assert load_state(into, folder) == {"updates": 7}
    assert torch.equal(into.state()["model.a"], torch.full((3, 2), 2.0))
    found, was = metadata_of((folder / ".metadata").read_bytes()), metadata(folder)
    assert (found.state_dict_metadata, found.storage_data) == (was.state_dict_metadata, was.storage_data)
    names, read = saved_tensors(folder)
    assert sorted(names) == ["model.a", "optimizer.a"] and read("optimizer.a").tolist() == [2.0] * 4


def test_an_index_is_read_whose_enums_were_pickled_by_getattr(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    was = metadata(folder)
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    assert b"getattr" in (content := pickle.dumps(was)) and metadata_of(content).storage_data == was.storage_data


def test_a_call_in_the_index_is_not_made(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    rewrite(folder, Payload(marker))
    with pytest.raises(Exception, match=r".*"):
        FileSystemReader(folder).read_metadata().anything  # noqa: B018
    assert marker.is_dir()  # the payload works: torch's own reader runs it
    marker.rmdir()
    fails(folder, r"names posix\.mkdir")
    assert not marker.exists()


@pytest.mark.parametrize("at", ["planner_data", "storage_data", "state_dict_metadata", "storage_meta", "version"])
def test_nor_one_that_is_deep_in_it(folder: Path, tmp_path: Path, at: str) -> None:
    rewrite(folder, replace(metadata(folder), **{at: {"x": [Payload(tmp_path / "ran")]}}))
    fails(folder, r"names posix\.mkdir")
    assert not (tmp_path / "ran").exists()


def test_nor_one_in_what_is_no_tensor(folder: Path, tmp_path: Path) -> None:
    """Torch unpickles entries that are no tensors, so the index may have none."""
    save({"state": {"model.a": Payload(tmp_path / "ran")}}, checkpoint_id=folder, no_dist=True)
    assert isinstance(metadata(folder).state_dict_metadata["state.model.a"], BytesStorageMetadata)
    seal(folder.parent, 7)
    fails(folder, "BytesStorageMetadata")
    assert not (tmp_path / "ran").exists()


def test_nor_one_in_random_states_or_tensors(folder: Path, tmp_path: Path) -> None:
    payload = Payload(tmp_path / "ran")
    (folder / "rng_0.pt").write_bytes(pickle.dumps(payload))
    with pytest.raises(CheckpointError, match=r"rng_0\.pt: not a random state"):
        load_state(engine(), folder)
    (data,) = folder.glob("*.distcp")
    torch.save(payload, data)
    found = metadata(folder)
    for entry in found.storage_data.values():
        entry.offset, entry.length = 0, data.stat().st_size
    rewrite(folder, found)
    fails(folder, "data|cannot|Error|pickle")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", ["../secret", "/dev/zero", "a/../../b", "..", ".metadata", ""])
def test_no_file_outside_is_opened(folder: Path, path: str) -> None:
    found = metadata(folder)
    for entry in found.storage_data.values():
        entry.relative_path = path
    rewrite(folder, found)
    fails(folder, "is no file of this folder")


def test_sizes_that_no_machine_has(folder: Path) -> None:
    found = metadata(folder)
    found.state_dict_metadata["state.model.a"].size = torch.Size([1 << 40, 1 << 20])
    rewrite(folder, found)
    with pytest.raises(CheckpointError):
        saved_tensors(folder)[1]("model.a")


def test_what_a_pickle_sets_on_a_class_outlives_nothing() -> None:
    """BUILD with a pair sets attributes, on a class as on anything else."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    hostile = b"\x80\x04" + name + b"}(" + pickletools.optimize(pickle.dumps("fqn", 2))[2:-1] + b"K\x05uN\x86b."
    swapped = b"\x80\x04" + name + b"N}(X\x03\x00\x00\x00fqnK\x05u\x86b."
    for content in (hostile, swapped):
        with pytest.raises(ValueError):
            metadata_of(content)
    assert not hasattr(MetadataIndex, "fqn") and MetadataIndex("x").fqn == "x"


@pytest.mark.parametrize("name", ["/dev/zero", "../../other"])
def test_a_manifest_names_files_of_its_folder_only(folder: Path, name: str) -> None:
    """/dev/zero has the size 0 and no end."""
    (folder / "manifest.json").write_text(json.dumps({"step": 1, "files": {name: {"size": 0, "sha256": ""}}}))
    (folder.parent.parent / "other").touch()
    with pytest.raises(CheckpointError, match="manifest is damaged"):
        check_intact(folder)


TRUSTED = {
    "cluster/host.py": "arguments of a run's own processes (Ray, pipes)",
    "rollout/workers/channel.py": "from the driver or a worker, which has proved that it knows the run's secret",
    "env/check.py": "from `agentrl env check` to its own child",
    "utils/search_path.py": "from a run to its own workers, by Ray",
    "reward/replays.py": "a copy in the same process",
    "utils/child_process.py": "from the user's own tool, in a process of its own",
    "trainer/weight_files.py": "torch.load, weights_only",
    "trainer/train_state.py": "a closed list of names, none of them called; torch.load, weights_only",
    "engines/weights/distributed_routes.py": "from a run's trainer to its engine, by Ray",
    "engines/vllm/vllm_worker.py": "from a run's replica to its own vLLM workers",
    "contrib/sandboxes/code_tests/boot.py": "in a sandbox: the code of pytest and of the runner, which grade.py made",
}
"""Every file that unpickles, and why that runs nothing of others (docs/trust.md)."""


def test_nothing_else_is_unpickled() -> None:
    root, found = Path(agentrl.__file__).parent, set()
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if calls := re.findall(r"\b(?:(?:pickle|cloudpickle|dill|marshal|shelve|torch)\.(?:loads?|open)|_Unpickler)\(.*", text):
            found.add(str(path.relative_to(root)))
            assert all("weights_only=True" in call for call in calls if call.startswith("torch.")), calls
    assert found == set(TRUSTED)
