"""Tasks in Harbor's format: a folder each with task.toml, instruction.md, environment/, tests/test.sh and solution/solve.sh.

The fields are those of Harbor's task.toml (https://www.harborframework.com/docs/tasks), in their older spellings too; others
are ignored, as Harbor does. What would change a task's meaning and cannot be honoured is a reason not to run it (`unfit`).
"""

from __future__ import annotations

import base64
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentrl.contrib.sandboxes.contract import SandboxSpec
from agentrl.utils.errors import ConfigError, TaskDataError
from agentrl.utils.parsing import toml_table

DEEPEST = 6
LONGEST = 120_000
"""Bytes of a command: Linux has no argument of more than 128 KiB."""
NETWORKS: dict[str, Literal["none", "all"]] = {"public": "all", "no-network": "none", "none": "none"}


class Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Environment(Lenient):
    """`[environment]`: sizes in MiB."""

    docker_image: str | None = None
    workdir: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int = 0
    os: str = "linux"
    network_mode: str = "public"
    allowed_hosts: list[Any] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    mcp_servers: list[Any] = Field(default_factory=list)
    healthcheck: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def older(cls, value: Any) -> Any:
        """The spellings of the format's first version: memory = "2G", storage = "10G", allow_internet."""
        given = dict(value)
        for old in ("memory", "storage"):
            if old in given:
                given.setdefault(f"{old}_mb", mebibytes(given.pop(old)))
        if "allow_internet" in given:
            given.setdefault("network_mode", "public" if given.pop("allow_internet") else "no-network")
        return given


class Phase(Lenient):
    """A part of an episode, which may have a network of its own."""

    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: list[Any] = Field(default_factory=list)


class Verifier(Phase):
    """`[verifier]`: how the tests run."""

    timeout_sec: float = 600.0
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: str = "shared"


class Solution(Lenient):
    """`[solution]`: the variables that solve.sh runs with."""

    env: dict[str, str] = Field(default_factory=dict)


class Own(Lenient):
    """`[metadata.agentrl]`: what this project adds. `files_only`: the files of environment/ in the working folder are all that
    the task needs, so that it runs without an image; `split`: the split that it belongs to."""

    files_only: bool = False
    split: Literal["train", "heldout"] | None = None


class Metadata(Lenient):
    category: str | None = None
    agentrl: Own = Field(default_factory=Own)


class Settings(Lenient):
    """task.toml."""

    metadata: Metadata = Field(default_factory=Metadata)
    environment: Environment = Field(default_factory=Environment)
    verifier: Verifier = Field(default_factory=Verifier)
    agent: Phase = Field(default_factory=Phase)
    solution: Solution = Field(default_factory=Solution)
    steps: list[Any] = Field(default_factory=list)


@dataclass(frozen=True)
class HarborTask:
    """One task folder, read."""

    name: str
    folder: Path
    settings: Settings
    instruction: str
    solution: Mapping[str, bytes] = field(repr=False)
    """The files of solution/, by relative path."""

    @property
    def family(self) -> str:
        """The category in task.toml; a task without one is its own family."""
        return self.settings.metadata.category or self.name

    @property
    def workdir(self) -> str:
        """Of task.toml, of the Dockerfile's last WORKDIR, or /app."""
        if self.settings.environment.workdir:
            return self.settings.environment.workdir
        found = re.findall(r"(?im)^\s*WORKDIR\s+(/\S+)", self._dockerfile.read_text()) if self._dockerfile.is_file() else []
        return found[-1] if found else "/app"

    @property
    def _dockerfile(self) -> Path:
        return self.folder / "environment" / "Dockerfile"

    def solved(self, images: bool) -> str | None:
        """A command that runs solution/solve.sh, as Harbor's own solver does with the folder at /solution; None if there is none,
        if it lacks a variable of this process, if it is too large for a command, or if it is not alone and the sandbox has no
        folders of its own at the root."""
        script = self.solution.get("solve.sh")
        if script is None or not (images or len(self.solution) == 1) or unset(self.settings.solution.env):
            return None
        if len(self.solution) == 1 and not self.settings.solution.env:
            return script.decode("utf-8", "replace")
        packed = {name: base64.b64encode(body).decode() for name, body in self.solution.items()}
        lines = [f"export {name}={shlex.quote(value)}" for name, value in resolved(self.settings.solution.env).items()]
        for name, body in packed.items():
            place = shlex.quote(f"/solution/{name}")
            lines.append(f'mkdir -p "$(dirname {place})" && echo {body} | base64 -d > {place}')
        text = "\n".join([*lines, "bash /solution/solve.sh"])
        return text if len(text) < LONGEST else None

    def tests(self) -> dict[str, bytes]:
        """The files of tests/ by the paths that they have in the sandbox."""
        return {f"/tests/{path}": content for path, content in contents(self.folder / "tests").items()}

    def spec(self, images: bool) -> SandboxSpec:
        """The sandbox that the task needs. `images`: the provider runs container images. Raises ConfigError with the reason if
        the task cannot run."""
        if reason := self.unfit(images):
            raise ConfigError(reason)
        own = self.settings.environment
        memory = None if own.memory_mb is None else own.memory_mb << 20
        common = SandboxSpec(network=NETWORKS[own.network_mode], memory=memory, env=resolved(own.env), workdir=self.workdir)
        if not images:
            files = contents(self.folder / "environment")
            disk = None if own.storage_mb is None else own.storage_mb << 20
            return replace(common, files={name: body for name, body in files.items() if name != "Dockerfile"}, disk=disk)
        if own.docker_image is None and self._dockerfile.is_file():
            return replace(common, build=self.folder / "environment", cpus=own.cpus)
        return replace(common, image=own.docker_image, files=contents(self.folder / "environment"), cpus=own.cpus)

    def unfit(self, images: bool) -> str | None:
        """Why the task cannot run here, or None."""
        own, verifier = self.settings.environment, self.settings.verifier
        phases = (self.settings.agent, verifier)
        users = [phase.user for phase in phases if phase.user not in (None, "root", 0)]
        missing = sorted({*unset(own.env), *unset(verifier.env)})
        reasons = {
            "it has several steps ([[steps]]), which this environment does not play": bool(self.settings.steps),
            "it needs several containers (environment/docker-compose.yaml)": any(self.folder.glob("environment/*compose.y*ml")),
            f"it needs {own.gpus} GPUs": own.gpus > 0,
            f"it is for {own.os}": own.os != "linux",
            f"its network_mode is {own.network_mode!r}; known: {', '.join(NETWORKS)}": own.network_mode not in NETWORKS,
            "it reaches a list of hosts (allowed_hosts), to which no network here is limited": any(
                part.allowed_hosts for part in (own, *phases)
            ),
            "its agent or its tests have another network than its environment, which is one for both here": any(
                phase.network_mode not in (None, own.network_mode) for phase in phases
            ),
            "it has MCP servers": bool(own.mcp_servers),
            "it has a healthcheck, for which nothing waits here": own.healthcheck is not None,
            f"it runs as user {users[0] if users else ''!r}; commands here run as the image's": bool(users),
            "its tests run in an environment of their own": verifier.environment_mode != "shared",
            "it has no tests/test.sh": not (self.folder / "tests" / "test.sh").is_file(),
            f"it needs the environment variable {', '.join(missing)}": bool(missing),
            "it needs an image (environment/Dockerfile or docker_image), which this sandbox provider does not run; "
            'use provider = "docker" or "podman"': not images and not self.settings.metadata.agentrl.files_only,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)


def read_tasks(root: Path) -> list[HarborTask]:
    """All task folders below a folder (or it alone), by name. Raises ConfigError if there are none, TaskDataError for one that
    is broken."""
    found = [read_task(folder) for folder in sorted(_task_folders(root))]
    if not found:
        raise ConfigError(f"harbor: no folder below {root} has a task.toml")
    names = [task.name for task in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise TaskDataError(f"harbor: two folders below {root} are called {twice[0]!r}")
    return found


def read_task(folder: Path) -> HarborTask:
    """Raises TaskDataError, naming file and key, for a folder that is no task, or has a link to what is not its own: a policy
    would read this machine's files."""
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise TaskDataError(f"{path}: a link out of the task's folder")
    file = folder / "task.toml"
    try:
        settings = Settings.model_validate(toml_table(file.read_text()))
    except ValidationError as problem:
        first = problem.errors()[0]
        raise TaskDataError(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, UnicodeDecodeError) as problem:
        raise TaskDataError(f"{file}: {problem}") from None
    instruction = folder / "instruction.md"
    if not instruction.is_file() and not settings.steps:
        raise TaskDataError(f"{instruction}: missing")
    text = instruction.read_text() if instruction.is_file() else ""
    return HarborTask(folder.name, folder, settings, without_canary(text), contents(folder / "solution"))


def without_canary(text: str) -> str:
    """The instruction without leading lines that only mark it for filters of training data."""
    return re.sub(r"\A(?:\s*(?:<!--[^>]*canary[^>]*-->|#[^\n]*canary[^\n]*)\s*\n)+", "", text, flags=re.IGNORECASE).strip() + "\n"


def resolved(env: Mapping[str, str]) -> dict[str, str]:
    """Values of the form ${NAME} or ${NAME:-default} are those of this process's variables (see `unset`)."""
    found = {name: (value, _VARIABLE.fullmatch(value)) for name, value in env.items()}
    return {name: os.environ.get(of[1], of[2]) if of else value for name, (value, of) in found.items()}


def unset(env: Mapping[str, str]) -> list[str]:
    """The variables of this process that the values need, and that are not set."""
    found = map(_VARIABLE.fullmatch, env.values())
    return [of[1] for of in found if of and of[2] is None and of[1] not in os.environ]


_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder by relative path."""
    if not folder.is_dir():
        return {}
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def mebibytes(text: Any) -> int:
    """ "2G", "512M" or a number of MiB. Raises ValueError for another text."""
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"(?i)(\d+(?:\.\d+)?)\s*([KMGT])i?B?", str(text).strip())
    if found is None:
        raise ValueError(f"a size like '2G' was expected, not {text!r}")
    return int(float(found[1]) * {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1 << 20}[found[2].upper()])


def _task_folders(root: Path, depth: int = 0) -> Iterator[Path]:
    if (root / "task.toml").is_file():
        yield root
    elif depth < DEEPEST and root.is_dir():
        for inner in sorted(root.iterdir()):
            if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith("."):
                yield from _task_folders(inner, depth + 1)
