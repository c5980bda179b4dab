"""A folder with the record of a run: everything that a replay needs.

record.json   the config, the request, the model's context           calls.jsonl   every answer (rollout/tape.py)
reward.json   the reward spec                                        tokenizer/    the model's (none for an API)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.config import TrainConfig
from agentrl.config.envs import alone, the_env
from agentrl.config.identity import check_same_identity
from agentrl.render.vision import Vision, takes_images
from agentrl.rollout.replay import Recorder
from agentrl.rollout.tape import CONTINUED, Recorded
from agentrl.run.assembly import Inputs
from agentrl.run.engine_choice import talks_in_messages
from agentrl.run.reader import is_run
from agentrl.trainer.pretrained import load_model_config, load_tokenizer
from agentrl.utils.errors import ReplayError
from agentrl.utils.files import atomic_write, full_disk_said
from agentrl.utils.parsing import json_text, read_json
from agentrl.utils.redaction import redact_json

FORMAT = 1


class RecordFolder:
    """Paths of a record and its plain files. `request`: the run's request with its `identity`, for a new record's manifest."""

    def __init__(self, path: Path, request: dict[str, Any] | None = None) -> None:
        self.path = path
        self.calls = path / "calls.jsonl"
        self.tokenizer = path / "tokenizer"
        self._request = request or {}
        self._read: Recorded | None = None

    def manifest(self) -> dict[str, Any]:
        """record.json. Raises ReplayError if it is missing or has another format."""
        file = self.path / "record.json"
        try:
            manifest: dict[str, Any] = read_json(file.read_text())
        except (FileNotFoundError, NotADirectoryError):
            text = f"{self.path}: expected a folder that --record wrote, got one without {file.name}"
            played = f"; to play with the policy of this run and record that: agentrl eval --run {self.path} --record DIR"
            raise ReplayError(text + (played if is_run(self.path) else "")) from None
        except ValueError as problem:
            raise ReplayError(f"{file}: expected the JSON of a record, got: {problem}") from None
        if manifest.get("agentrl_record") != FORMAT:
            raise ReplayError(f"{file}: expected a record of format {FORMAT}, got {manifest.get('agentrl_record')!r}")
        return manifest

    def read(self) -> Recorded:
        """The calls, read once. Raises ReplayError if they are missing or were changed."""
        if self._read is None:
            self._read = Recorded.read(self.calls)
        return self._read

    def ended(self) -> set[str]:
        """The episodes that are complete in the record; empty if there is no record yet."""
        return set(self.read().episodes) if self.calls.exists() else set()

    def inputs(self) -> Inputs:
        """The inputs of the recorded run. Raises ReplayError if the folder is not a record, or was changed."""
        manifest = self.manifest()
        spec = read_json((self.path / "reward.json").read_text())
        model = manifest["config"]["model"]
        trust = model.get("trust_remote_code", False)
        tokenizer = None if talks_in_messages(model["path"]) else load_tokenizer(str(self.tokenizer), trust)
        return Inputs((spec,), tokenizer, manifest["context"], None if tokenizer is None else str(self.tokenizer))

    def open(self, config: TrainConfig, inputs: Inputs) -> Recorder:
        """Start the record of a config with one environment, or continue one of the same run. Raises ConfigError if the record
        is of another run, or if there are several environments."""
        config = alone(config, the_env(config))  # its own tools are then where those of the run are
        self.path.mkdir(parents=True, exist_ok=True)
        # Commands and addresses of tool servers may contain secrets, and a replay starts no server.
        table = config.model_dump(mode="json", exclude_none=True, exclude={"tools"})
        manifest = {"agentrl_record": FORMAT, **self._request, "context": inputs.context, "config": table}
        file = self.path / "record.json"
        if file.exists():
            before, of = self.manifest().get("identity"), f"the record of another run ({file})"
            check_same_identity(before, redact_json(self._request["identity"]), of, self.path, "--record")
        with full_disk_said(self.path, CONTINUED):
            self._write_inputs(config, inputs, manifest)
        return Recorder(self.calls, Recorded.read(self.calls).transcripts)

    def _write_inputs(self, config: TrainConfig, inputs: Inputs, manifest: dict[str, Any]) -> None:
        if inputs.tokenizer is not None:
            assert config.model.path is not None
            inputs.tokenizer.save_pretrained(str(self.tokenizer))
            # It names the tokenizer's class.
            model = load_model_config(config.model.path, config.model.trust_remote_code)
            model.save_pretrained(str(self.tokenizer))
            if takes_images(model):
                Vision(config.model.path, model).save(self.tokenizer)
        # The manifest last: a folder without it is not a record, so an interrupted start does not look like one.
        atomic_write(self.path / "reward.json", json_text(inputs.specs[0], indent=2) + "\n")
        atomic_write(self.path / "record.json", json_text(redact_json(manifest), indent=2) + "\n")
        self.calls.touch()
