"""Trackers for Weights & Biases, MLflow and Trackio."""

from __future__ import annotations

import math
import netrc
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from agentrl.config.envs import leaves
from agentrl.config.identity import without_secrets
from agentrl.run.folder import RunFolder
from agentrl.run.trackers import FLUSH_S, TRACKERS, Cell, Status, TrackedRun, Tracker
from agentrl.utils.errors import ConfigError, need_package
from agentrl.utils.files import atomic_write
from agentrl.utils.parsing import json_text, read_json

# Record of the rows sent to a service


class GivenRows:
    """Rows sent so far (`trackers/NAME.json`): the tracker's `ids`, last step per phase, number of rows."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        self._path = folder.path / "trackers" / f"{name}.json"
        found: dict[str, Any] = read_json(self._path.read_text()) if self._path.is_file() else {}
        self.ids: dict[str, str] = found.get("ids", {})
        self.rows: int = found.get("rows", 0)
        self._steps: dict[str, int] = found.get("steps", {})

    def knows(self, phase: str, step: int) -> bool:
        """Return True if the service already has that row."""
        return step <= self._steps.get(phase, -1)

    def add(self, phase: str, step: int) -> None:
        """Record that the service has the row."""
        self._steps[phase] = step
        self.rows += 1
        self.save()

    def save(self) -> None:
        """Write the file, for a later process that resumes the run."""
        self._path.parent.mkdir(exist_ok=True)
        atomic_write(self._path, json_text({"ids": self.ids, "steps": self._steps, "rows": self.rows}) + "\n")


# Weights & Biases

EXIT: Mapping[Status, int] = {"done": 0, "failed": 1, "interrupted": 255}
"""Exit codes in the meaning of W&B: 0 finishes a run, 255 is Ctrl-C, any other is a failure."""


@TRACKERS.register("wandb")
class WeightsAndBiases(Tracker):
    """Logs to one W&B run, also across resumes. A metric is named PHASE/KEY; its axis is the step of the run (`PHASE/step`),
    since W&B's step counts the rows of all phases."""

    def __init__(
        self,
        run: TrackedRun,
        *,
        project: str = "agentrl",
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        """`mode`: by default the environment variable WANDB_MODE, or online."""
        import wandb

        self._wandb, self._offline = wandb, _mode(mode) == "offline"
        self._given = GivenRows(run.folder, "wandb")
        self._given.ids.setdefault("run", secrets.token_hex(4))
        settings = wandb.Settings(finish_timeout=FLUSH_S / 2, console="off", x_disable_stats=True)
        self._run = wandb.init(
            project=project, entity=entity, group=group, tags=tags, name=run.name, id=self._given.ids["run"], resume="allow",
            mode=_mode(mode), dir=str(run.folder.path), config=without_secrets(run.config), settings=settings,
        )  # fmt: skip
        self._given.save()
        self._phases: set[str] = set()

    @classmethod
    def check(cls, args: Mapping[str, Any]) -> None:
        need_package("wandb", "trackers \"wandb\" needs wandb: pip install 'agentrl[wandb]'")
        # W&B finds a key without a prompt in these variables, and in the file that `wandb login` writes.
        login: Any = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
        if not login:
            host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
            with suppress(OSError, netrc.NetrcParseError):
                login = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
        if _mode(args["mode"]) == "online" and not login:
            raise ConfigError(
                'trackers "wandb": there is no login: run `wandb login` or set WANDB_API_KEY; or set args.mode = "offline" '
                "(also WANDB_MODE=offline), and bring the files there later with `wandb sync`"
            )

    def row(self, phase: str, step: int, values: Mapping[str, float | None]) -> None:
        if self._given.knows(phase, step):
            return
        self._log(phase, step, {key: value for key, value in values.items() if value is not None})
        self._given.add(phase, step)

    def episodes(self, phase: str, step: int, rows: Sequence[Mapping[str, Cell]]) -> None:
        if rows and not self._given.knows(f"{phase}/episodes", step):
            head = list(rows[0])
            table = self._wandb.Table(columns=head, data=[[row[key] for key in head] for row in rows], allow_mixed_types=True)
            self._log(phase, step, {"episodes": table})
            self._given.add(f"{phase}/episodes", step)

    def picture(self, name: str, path: Path) -> None:
        self._run.log({name: self._wandb.Image(str(path))}, step=self._given.rows)
        self._given.rows += 1
        self._given.save()

    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({key: value for key, value in summary.items() if value is not None} | {"status": status})
        self._run.finish(exit_code=EXIT[status])

    def look(self) -> str:
        return f"wandb sync {Path(self._run.dir).parent}" if self._offline else str(self._run.url)

    def _log(self, phase: str, step: int, values: Mapping[str, Any]) -> None:
        if phase not in self._phases:
            self._phases.add(phase)
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        row = {f"{phase}/{key}": value for key, value in values.items()}
        # W&B's step must not decrease, so it is the number of rows sent, over all resumes.
        self._run.log({**row, f"{phase}/step": step}, step=self._given.rows)


def _mode(mode: str | None) -> Any:
    return mode or os.environ.get("WANDB_MODE") or "online"


# MLflow

ENDS: Mapping[Status, str] = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
SQLITE = "sqlite:///"
BATCH, PARAMS, LONGEST = 1000, 100, 500
"""Limits of any MLflow server: metrics per request, parameters per request, characters per parameter."""


@TRACKERS.register("mlflow")
class MLflow(Tracker):
    """Logs to one MLflow run, also across resumes. A metric is named PHASE/KEY; characters that MLflow forbids in names become
    "_"."""

    def __init__(self, run: TrackedRun, *, uri: str | None = None, experiment: str = "agentrl") -> None:
        """`uri`: URI of the server, or `sqlite:///FILE`; by default the environment variable MLFLOW_TRACKING_URI."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._uri = Metric, _uri(uri)
        self._client = MlflowClient(self._uri)
        self._given = GivenRows(run.folder, "mlflow")
        if "run" in self._given.ids:
            self._client.update_run(self._given.ids["run"], status="RUNNING")
            return
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            # Next to the database, since MLflow's default is the working directory.
            beside = (Path(self._uri.removeprefix(SQLITE)).absolute().parent / "mlartifacts").as_uri()
            ident = str(self._client.create_experiment(experiment, beside if self._uri.startswith(SQLITE) else None))
        else:
            ident = str(found.experiment_id)
        made = self._client.create_run(ident, run_name=run.name)
        self._given.ids["run"] = made.info.run_id
        self._given.save()
        values = leaves(without_secrets(run.config))
        params = [Param(_name(".".join(map(str, keys))), str(value)[:LONGEST]) for keys, value in values]
        for start in range(0, len(params), PARAMS):
            self._client.log_batch(made.info.run_id, params=params[start : start + PARAMS])

    @classmethod
    def check(cls, args: Mapping[str, Any]) -> None:
        uri = _uri(args["uri"])
        database = uri.partition(":")[0].startswith(("sqlite", "postgresql", "mysql", "mssql"))
        for package in ("mlflow", *(("sqlalchemy", "alembic") if database else ())):
            need_package(package, f"trackers \"mlflow\" needs {package}: pip install 'agentrl[mlflow]'")
        if not uri:
            raise ConfigError(
                'trackers "mlflow": set args.uri or MLFLOW_TRACKING_URI to the address of your server; without a network use '
                f'a file: args.uri = "{SQLITE}{Path("mlflow.db").absolute()}", which `mlflow ui --backend-store-uri` shows'
            )

    def row(self, phase: str, step: int, values: Mapping[str, float | None]) -> None:
        if self._given.knows(phase, step):
            return
        now = round(1000 * time.time())
        metrics = [
            self._metric(_name(f"{phase}/{key}"), float(value), now, step)
            for key, value in values.items()
            if value is not None and math.isfinite(value)
        ]
        for start in range(0, len(metrics), BATCH):
            self._client.log_batch(self._given.ids["run"], metrics=metrics[start : start + BATCH])
        self._given.add(phase, step)

    def episodes(self, phase: str, step: int, rows: Sequence[Mapping[str, Cell]]) -> None:
        head = list(rows[0]) if rows else []
        table = {"columns": head, "data": [[row[key] for key in head] for row in rows]}
        self._client.log_dict(self._given.ids["run"], table, f"episodes/{phase}_{step:06d}.json")

    def picture(self, name: str, path: Path) -> None:
        self._client.log_artifact(self._given.ids["run"], str(path))

    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        self._client.log_dict(self._given.ids["run"], dict(summary), "summary.json")
        self._client.set_terminated(self._given.ids["run"], ENDS[status])

    def look(self) -> str:
        if self._uri.startswith("sqlite"):
            return f"mlflow ui --backend-store-uri {self._uri}"
        experiment = self._client.get_run(self._given.ids["run"]).info.experiment_id
        return f"{self._uri.rstrip('/')}/#/experiments/{experiment}/runs/{self._given.ids['run']}"


def _uri(uri: str | None) -> str:
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or ""


def _name(key: str) -> str:
    return re.sub(r"[^\w\-. /:]", "_", key)


# Trackio


@TRACKERS.register("trackio")
class Trackio(Tracker):
    """Logs to one Trackio run, also across resumes. A metric is named PHASE/KEY. Trackio resumes a run by its name, so the name
    has a random suffix."""

    def __init__(self, run: TrackedRun, *, project: str = "agentrl", space: str | None = None) -> None:
        """`space`: "user/name" of a Space; by default the environment variable TRACKIO_SPACE_ID. Without a Space, Trackio writes
        files on this machine (TRACKIO_DIR)."""
        import trackio

        self._given, self._project, self._space = GivenRows(run.folder, "trackio"), project, space
        self._given.ids.setdefault("run", f"{run.name}-{secrets.token_hex(2)}")
        self._run: Any = trackio.init(
            project=project, name=self._given.ids["run"], space_id=space, config=without_secrets(run.config), resume="allow",
            embed=False, auto_log_cpu=False, auto_log_gpu=False,
        )  # fmt: skip
        self._given.save()

    @classmethod
    def check(cls, args: Mapping[str, Any]) -> None:
        need_package("trackio", "trackers \"trackio\" needs trackio: pip install 'agentrl[trackio]'")
        space = args["space"] or os.environ.get("TRACKIO_SPACE_ID")
        if space:
            from huggingface_hub import get_token

            if get_token() is None:
                raise ConfigError(
                    f'trackers "trackio": there is no login for the Space {space}: run `hf auth login` or set HF_TOKEN; without '
                    "args.space (and TRACKIO_SPACE_ID) the run is kept on this machine"
                )

    def row(self, phase: str, step: int, values: Mapping[str, float | None]) -> None:
        if self._given.knows(phase, step):
            return
        self._run.log({f"{phase}/{key}": value for key, value in values.items() if value is not None}, step=step)
        self._given.add(phase, step)

    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        end = {f"summary/{key}": value for key, value in summary.items() if isinstance(value, (int, float))}
        self._run.log({**end, "summary/status": status}, step=summary.get("steps", 0))
        self._run.finish()

    def look(self) -> str:
        return f"trackio show --project {self._project}" if not self._space else f"https://huggingface.co/spaces/{self._space}"
