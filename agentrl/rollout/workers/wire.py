"""What travels between the driver and a worker, as JSON and columns: jobs, trajectories, turns and faults."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl import columns, errors
from agentrl.errors import AgentrlError, WorkerError
from agentrl.rollout.course import EpisodeSpec
from agentrl.rollout.engine import Generation, Sampling, Usage
from agentrl.rollout.player import Job
from agentrl.trajectory import TokenLedger, Trajectory

Fields = dict[str, Any]


# -- jobs --------------------------------------------------------------------------------------------


def job_fields(job: Job) -> Fields:
    """A job as JSON. Raises TypeError for parameters that JSON has no form for."""
    return {
        "env": job.env,
        "spec": asdict(job.spec),
        "params": dict(job.params),
        "temperature": job.temperature,
        "trained": job.trained,
        **({"branches": [[asdict(spec) for spec in attempts] for attempts in job.branches]} if job.branches else {}),
    }


def job_of(fields: Mapping[str, Any]) -> Job:
    """Inverse of `job_fields`."""
    branches = tuple(tuple(EpisodeSpec(**spec) for spec in attempts) for attempts in fields.get("branches", ()))
    return Job(**{**fields, "spec": EpisodeSpec(**fields["spec"]), "branches": branches})


# -- trajectories ------------------------------------------------------------------------------------


def trajectory_frame(trajectory: Trajectory, record: str) -> tuple[Fields, bytes]:
    """A trajectory: its ledgers' columns end to end, then its record (`Trajectory.record_text`), which is JSON already."""
    ledgers: list[Fields] = []
    parts: list[npt.NDArray[Any]] = []
    for ledger in trajectory.ledgers:
        state = ledger.__getstate__()
        experts = state.get("experts")
        ledgers.append({"tokens": len(ledger)} | ({} if experts is None else {"experts": _shape(experts)}))
        parts += [state[name] for name in columns.KINDS]
        parts += [] if experts is None else [experts]
    return {"ledgers": ledgers}, _joined(parts) + record.encode()


def trajectory_of(fields: Mapping[str, Any], blob: memoryview) -> Trajectory:
    """Inverse of `trajectory_frame`."""
    reader, ledgers = _Reader(blob), []
    for row in fields["ledgers"]:
        state = {name: reader.take(kind, (row["tokens"],)) for name, kind in columns.KINDS.items()}
        if "experts" in row:
            state["experts"] = reader.shaped(row["experts"])
        ledger = TokenLedger.__new__(TokenLedger)
        ledger.__setstate__(state)
        ledgers.append(ledger)
    trajectory = Trajectory.from_json({**json.loads(reader.rest()), "ledgers": []})
    trajectory.ledgers = ledgers
    return trajectory


def trajectories_frame(trajectories: Sequence[Trajectory], records: Sequence[str]) -> tuple[Fields, bytes]:
    """Several trajectories, one frame after the other."""
    frames = [trajectory_frame(*pair) for pair in zip(trajectories, records, strict=True)]
    return {"episodes": [{**head, "bytes": len(blob)} for head, blob in frames]}, b"".join(blob for _, blob in frames)


def trajectories_of(fields: Mapping[str, Any], blob: memoryview) -> list[Trajectory]:
    """Inverse of `trajectories_frame`."""
    found, at = [], 0
    for head in fields["episodes"]:
        found.append(trajectory_of(head, blob[at : at + head["bytes"]]))
        at += head["bytes"]
    return found


# -- turns -------------------------------------------------------------------------------------------


def sampling_of(fields: Mapping[str, Any]) -> Sampling:
    """Inverse of `dataclasses.asdict`."""
    return Sampling(**{**fields, **{name: tuple(fields[name]) for name in ("stop_token_ids", "stop")}})


def prompt_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as int32. Raises ValueError if one does not fit."""
    return columns.numbers(token_ids, np.int32).tobytes()


def prompt_of(blob: memoryview) -> list[int]:
    """Inverse of `prompt_bytes`."""
    ids: list[int] = np.frombuffer(blob, np.int32).tolist()
    return ids


def generation_frame(generation: Generation) -> tuple[Fields, bytes]:
    """What an engine sampled; log probabilities as float64, so that what enters a ledger is rounded once, as in the driver."""
    parts: list[npt.NDArray[Any]] = [
        np.asarray(generation.token_ids, np.int32),
        np.asarray(generation.logprobs, np.float64),
        np.asarray(generation.versions, np.int32),
    ]
    fields: Fields = {
        "tokens": len(generation.token_ids),
        "finish": generation.finish,
        "usage": None if generation.usage is None else asdict(generation.usage),
        "seconds": generation.seconds,
    }
    if generation.experts is not None:
        fields["experts"] = _shape(generation.experts)
        parts.append(generation.experts)
    return fields, _joined(parts)


def generation_of(fields: Mapping[str, Any], blob: memoryview) -> Generation:
    """Inverse of `generation_frame`."""
    reader, shape = _Reader(blob), (fields["tokens"],)
    ids, logprobs, versions = (reader.take(kind, shape).tolist() for kind in (np.int32, np.float64, np.int32))
    usage, experts = fields["usage"], fields.get("experts")
    return Generation(
        ids,
        logprobs,
        versions,
        fields["finish"],
        None if usage is None else Usage(**usage),
        fields["seconds"],
        None if experts is None else reader.shaped(experts),
    )


# -- faults ------------------------------------------------------------------------------------------


def fault_fields(error: BaseException) -> Fields:
    """An exception as text: its class may not exist on the other side, and a traceback cannot be sent."""
    return {
        "error": type(error).__name__,
        "message": str(error),
        "trace": "".join(traceback.format_exception(error)),
        "errno": error.errno if isinstance(error, OSError) else None,
    }


def fault_of(fields: Mapping[str, Any], who: str) -> AgentrlError | OSError:
    """The error of agentrl's own class; an OSError if a disk is full; of any other, a WorkerError with the remote traceback.
    `who`: where it happened."""
    kind = getattr(errors, fields["error"], None)
    if isinstance(kind, type) and issubclass(kind, AgentrlError):
        # As it was: what is recorded of an episode must not depend on where it was played.
        return kind(fields["message"])
    if fields["errno"] in errors.FULL:
        return OSError(fields["errno"], f"{who}: {fields['message']}")
    message = f"{who}: {fields['error']}: {fields['message']}"
    return WorkerError(f"{message}\n--- remote traceback ---\n{fields['trace'].rstrip()}")


# -- columns -----------------------------------------------------------------------------------------


def _shape(array: npt.NDArray[Any]) -> Fields:
    return {"shape": list(array.shape), "type": array.dtype.str}


def _joined(parts: Sequence[npt.NDArray[Any]]) -> bytes:
    return b"".join(np.ascontiguousarray(part).data.cast("B") for part in parts if part.size)


class _Reader:
    """Columns one after the other, each copied: the frame that they came in is freed."""

    def __init__(self, blob: memoryview) -> None:
        self._blob, self._at = blob, 0

    def take(self, kind: npt.DTypeLike, shape: Sequence[int]) -> npt.NDArray[Any]:
        count = math.prod(shape)
        found = np.frombuffer(self._blob, kind, count, self._at) if count else np.empty(0, kind)
        self._at += found.nbytes
        return found.reshape(shape).copy()

    def rest(self) -> bytes:
        """All that follows the columns."""
        return bytes(self._blob[self._at :])

    def shaped(self, fields: Mapping[str, Any]) -> npt.NDArray[Any]:
        return self.take(np.dtype(fields["type"]), fields["shape"])
