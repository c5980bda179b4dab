"""How the servers get weights: from files in a folder that they see too, or in the bodies of requests.

Both replace weights that nobody samples from: the caller has paused the servers in mode "retract", in which SGLang holds its
requests back without their caches and computes them again afterwards.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from agentrl.backends.sglang.files import tensors_of, weight_files
from agentrl.backends.sglang.servers import Server, Servers
from agentrl.errors import ConfigError, EngineError
from agentrl.executors import in_thread
from agentrl.weights.bucket import Named

FROM_DISK, FROM_TENSOR = "/update_weights_from_disk", "/update_weights_from_tensor"
BEGIN, END = "/begin_weight_update", "/end_weight_update"
BODY = 256 << 20
"""Bytes of weights in the body of one request, when a run's first weights are sent."""


class Update(ABC):
    """One way. `start`, `add` for all tensors, `finish`; or `drop` if they do not all come."""

    def __init__(self, servers: Servers, seconds: float) -> None:
        """`seconds`: how long a server may take to load weights."""
        self._servers, self._seconds = servers, seconds

    async def first(self, model: str, name: str) -> None:
        """Load the weights of a folder or hub name, as the version of that name. Raises EngineError, ModelError."""
        files = await in_thread("files", weight_files, model)
        await self._first(model, files, name)

    @abstractmethod
    async def _first(self, model: str, files: list[Path], name: str) -> None: ...

    @abstractmethod
    async def start(self, targets: Sequence[Server], name: str) -> None:
        """New weights of the version of that name begin to come."""

    @abstractmethod
    async def add(self, tensors: list[Named]) -> None:
        """The next of them; they may be overwritten when this returns. Raises EngineError if a server refuses them."""

    @abstractmethod
    async def finish(self) -> None:
        """All have come: the servers have them when this returns, and no cache of earlier ones. Raises EngineError."""

    async def drop(self) -> None:
        """They do not all come."""
        return None

    def close(self) -> None:
        """Free everything; idempotent."""
        return None


class FileUpdate(Update):
    """See the module. `parent`: the folder that the servers see too."""

    def __init__(self, servers: Servers, seconds: float, parent: str | None) -> None:
        super().__init__(servers, seconds)
        self._parent = Path(parent or tempfile.gettempdir()).absolute()
        self._targets: Sequence[Server] = ()
        self._name = ""
        self._folder: Path | None = None
        self._current: Path | None = None
        self._parts = 0

    async def _first(self, model: str, files: list[Path], name: str) -> None:
        self._targets, self._name = self._servers.alive(), name
        if not Path(model).is_dir():
            await self._load(model, f"the servers must be able to load {model} themselves")
            return
        folder = self._make()
        # Links in the folder that will have all later weights: so a folder that the servers do not see is found out now.
        for file in files:
            (folder / file.name).symlink_to(file.resolve())
        await self.finish()

    async def start(self, targets: Sequence[Server], name: str) -> None:
        self._targets, self._name, self._parts = targets, name, 0
        self._make()

    async def add(self, tensors: list[Named]) -> None:
        assert self._folder is not None
        self._parts += 1
        await in_thread("files", save_file, dict(tensors), self._folder / f"model-{self._parts:05d}.safetensors")

    async def finish(self) -> None:
        assert self._folder is not None
        where = f"the servers must see {self._folder} and the model's folder under these paths"
        await self._load(str(self._folder), f"{where}; set weights.folder to one that all machines share")
        # The one before is kept until now: servers read it again if they cannot load the new one.
        self._remove(self._current)
        self._current, self._folder = self._folder, None

    async def _load(self, path: str, condition: str) -> None:
        # "auto", as the server itself may have been started with `--load-format dummy`, and then loads nothing at all.
        body = {"model_path": path, "load_format": "auto", "weight_version": self._name, "flush_cache": True}
        try:
            await self._servers.post(self._targets, FROM_DISK, body, self._seconds)
        except EngineError as problem:
            raise EngineError(f"{problem} ({condition})") from problem

    async def drop(self) -> None:
        self._remove(self._folder)
        self._folder = None

    def close(self) -> None:
        self._remove(self._folder)
        self._remove(self._current)
        self._folder = self._current = None

    def _make(self) -> Path:
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="agentrl-sglang-", dir=self._parent))
            self._folder.chmod(0o755)  # the servers may run as another user
        except OSError as problem:
            raise ConfigError(f"sglang: cannot write to weights.folder {self._parent}: {problem}") from problem
        return self._folder

    def _remove(self, folder: Path | None) -> None:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class HttpUpdate(Update):
    """See the module. SGLang takes pickled tensors, one copy for each of its ranks, if only a few allowed types are in them.
    These are pickled by value, as those from another machine must be."""

    _targets: Sequence[Server] = ()
    _name = ""
    _last: str | None = None
    """The tensors that came last: the last of an update also name its version."""

    async def _first(self, model: str, files: list[Path], name: str) -> None:
        await self.start(self._servers.alive(), name)
        for part in tensors_of(files, BODY):
            await self.add(part)
        await self.finish()

    async def start(self, targets: Sequence[Server], name: str) -> None:
        self._targets, self._name, self._last = targets, name, None
        # A server refuses a second session, and one may be open since a run that was killed.
        await self._end()
        await self._servers.post(targets, BEGIN, {}, self._seconds)

    async def _end(self) -> None:
        for server in self._targets:
            with contextlib.suppress(EngineError):  # if none is open; what else is wrong, the next call says
                await server.http.post(END, {}, self._seconds)

    async def add(self, tensors: list[Named]) -> None:
        before = self._last
        self._last = await in_thread("weights", serialized, tensors)
        if before is not None:
            await self._send(before, None)

    async def finish(self) -> None:
        assert self._last is not None, "an update without tensors"
        await self._send(self._last, self._name)
        await self._servers.post([server for server in self._targets if server.cause is None], END, {}, self._seconds)
        self._last = None

    async def drop(self) -> None:
        await self._end()
        self._last = None

    async def _send(self, text: str, name: str | None) -> None:
        for workers in sorted({server.facts.workers for server in self._targets if server.facts is not None}):
            some = [server for server in self._targets if server.facts is not None and server.facts.workers == workers]
            body = {"serialized_named_tensors": [text] * workers, "weight_version": name, "flush_cache": name is not None}
            await self._servers.post([server for server in some if server.cause is None], FROM_TENSOR, body, self._seconds)


def serialized(tensors: list[Named]) -> str:
    """Tensors as SGLang's MultiprocessingSerializer reads them, in base64 as JSON must have it."""
    # Copies: a view would be pickled with all of the storage that it is in.
    return base64.b64encode(pickle.dumps([(name, tensor.cpu().clone()) for name, tensor in tensors])).decode()
