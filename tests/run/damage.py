"""Damage to run folders: what may happen to each file, and what each command then does, in this process.

A verdict is "right" (it went on or showed what there is; a resume ends with the weights of the unbroken run), "said" (a clear
error, or a line, names the file), or a fault: "traceback", "hang", "wrong" (a resume ends with other weights without a word),
"unnamed" (an error that does not say what is damaged).
"""

import contextlib
import io
import json
import os
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.run.folder import RunFolder
from agentrl.run.provenance import Provenance
from tests.e2e.inside import config_of, execute, logging_kept, numbers
from tests.run.broken_off import TINY, without_clock

STEPS = 4
NOBODY = 65534
CONFIG = [*TINY, "checkpoint.keep=3", "eval.tasks=2", "rollout.max_turns=2", "rollout.max_turn_tokens=48"]
LAST, PENULTIMATE = "checkpoints/step_000003", "checkpoints/step_000002"
FILES = [
    "config.toml", "provenance.json", "metrics.jsonl", "summary.json", "log.txt", ".lock", "curve.png", "config_history",
    "trajectories", "trajectories/step_000002.jsonl", "tokens", "tokens/step_000002.jsonl", "tensorboard", "checkpoints",
    LAST, f"{LAST}/manifest.json", f"{LAST}/driver.json", f"{LAST}/groups.jsonl", f"{LAST}/learner.json", f"{LAST}/actor",
    f"{LAST}/actor/__0_0.distcp", f"{LAST}/actor/meta.json", f"{LAST}/actor/rng_0.pt",
    "model", "model/config.json", "model/model.safetensors", "model/tokenizer.json",
    "final", "final/config.json", "final/model.safetensors", "exports",
]  # fmt: skip
"""What a run folder holds, and folders that a command makes in it."""


@dataclass(frozen=True)
class Runs:
    """The unbroken run of `STEPS` updates, one that ended an update earlier, and another run of as many."""

    whole: Path
    cut: Path
    other: Path


def make_runs(out: Path) -> Runs:
    found = {}
    for name, more in (("whole", [f"steps={STEPS}"]), ("cut", [f"steps={STEPS - 1}"]), ("other", ["steps=3", "seed=7"])):
        config = config_of(out / name, "run", *CONFIG, *more)
        found[name] = execute(config)
        (found[name] / "provenance.json").write_text(Provenance(RunFolder(found[name]), config).record())
    return Runs(**found)


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    def damage(path: Path, other: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return damage


def _missing(path: Path, other: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _replaced(make: Callable[[Path], None]) -> Callable[[Path, Path], None]:
    def damage(path: Path, other: Path) -> None:
        if path.exists():
            _missing(path, other)
        make(path)

    return damage


def _flip(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :] if data else data


def _others(path: Path, other: Path) -> None:
    _missing(path, other)
    (shutil.copytree if other.is_dir() else shutil.copy2)(other, path)


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "missing": _missing, "empty": _bytes(lambda data: b""), "cut in half": _bytes(lambda data: data[: len(data) // 2]),
    "a flipped bit": _bytes(_flip), "garbage at its end": _bytes(lambda data: data + b"\0\xff\xfe{[garbage"),
    "other JSON": _bytes(lambda data: b'["x", 1]\n'), "zeros": _bytes(lambda data: bytes(len(data))),
    "deep JSON": _bytes(lambda data: b"[" * 100_000 + b"\n"), "unreadable": lambda path, other: path.chmod(0),
    "read-only": lambda path, other: path.chmod(0o555 if path.is_dir() else 0o444),
    "a folder": _replaced(lambda path: path.mkdir()), "a file": _replaced(lambda path: path.write_bytes(b"x")),
    "a link to itself": _replaced(lambda path: path.symlink_to(path.name)), "a pipe": _replaced(os.mkfifo),
    "another run's": _others,
}  # fmt: skip
_OF_FOLDERS = ("missing", "unreadable", "read-only", "a file", "a link to itself", "another run's")
DENIED = ("unreadable", "read-only")


def kinds_of(path: Path) -> list[str]:
    """What may happen to it: a folder has no bits."""
    if not path.exists():
        return ["a file", "a link to itself"]
    return list(_OF_FOLDERS) if path.is_dir() else [kind for kind in KINDS if kind != "a file"]


def cases(run: Path) -> list[tuple[str, str]]:
    """(file, kind) of all damage; "." is the folder itself."""
    return [(".", "read-only"), *((file, kind) for file in FILES for kind in kinds_of(run / file))]


@dataclass(frozen=True)
class Outcome:
    """What a command did: exit code, all that it said, the error that came through, seconds."""

    code: int | None
    said: str
    error: BaseException | None


class HungError(BaseException):
    pass


def _rung(*_: Any) -> None:
    raise HungError


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _rung)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def as_nobody(folder: Path) -> Iterator[None]:
    """Without root's rights, which no permission stops."""
    if os.geteuid() != 0:
        yield
        return
    for at in (folder, *folder.rglob("*")):
        os.chown(at, NOBODY, NOBODY, follow_symlinks=False)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


LIMIT_S = 60


def command(words: list[str], seconds: int = 0) -> Outcome:
    """`agentrl WORDS`, here."""
    from agentrl.cli.main import main

    said = io.StringIO()
    with logging_kept(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            with limited(seconds or LIMIT_S):
                return Outcome(main(words), said.getvalue(), None)
        except SystemExit as error:
            return Outcome(int(error.code or 0), said.getvalue(), None)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return Outcome(None, said.getvalue() + "".join(traceback.format_exception(error)), error)


def resume(run: Path) -> Outcome:
    return command(["train", "--resume", str(run), f"steps={STEPS}", "health.lint=false"])


def show(run: Path) -> Outcome:
    return several([["show", str(run), *more] for more in ([], ["--step", "2"], ["--episode", "step_000002.1"], ["--json"])])


def runs_list(run: Path) -> Outcome:
    return several([["runs", "list", str(run.parent)], ["runs", "failures", str(run)]])


def evaluate(run: Path) -> Outcome:
    of = [["--checkpoint", which] for which in ("last", "3")]
    return several(
        [["eval", "--run", str(run), "-n", "1", "--out", f"{run.parent}/eval{step}", *one] for step, one in enumerate(of)]
    )


def view(run: Path) -> Outcome:
    """All questions of the page, as `agentrl view` answers them."""
    from agentrl.contrib.view.api import Api
    from agentrl.contrib.view.library import Library
    from agentrl.utils.errors import AgentrlError

    said: list[str] = []
    of_run = ("run", "metrics", "episodes", "facets", "failures", "suspects", "groups")
    of_episode = {name: ("run", "step_000002.1", {}) for name in ("episode", "tokens")}
    try:
        with limited(10):
            library = Library([run.parent])
            for one in library.scan():
                library.refresh(one)  # as its thread does
            api = Api(library)
            for name, arguments in {"runs": ({},), **dict.fromkeys(of_run, ("run", {})), **of_episode}.items():
                try:
                    said.append(str(getattr(api, name)(*arguments)))
                except AgentrlError as error:
                    said.append(str(error))
    except AgentrlError as error:  # before the page is there: the command's one line
        return Outcome(2, str(error), None)
    except BaseException as error:
        return Outcome(None, "".join(traceback.format_exception(error)), error)
    return Outcome(0, "\n".join(said), None)


def several(commands: list[list[str]]) -> Outcome:
    """The worst of them."""
    found = [command(words) for words in commands]
    return next((one for one in found if one.error is not None), max(found, key=lambda one: one.code or 0))


COMMANDS: dict[str, Callable[[Path], Outcome]] = {
    "resume": resume, "eval": evaluate, "show": show, "view": view, "runs": runs_list,
}  # fmt: skip


def verdict(name: str, file: str, outcome: Outcome, run: Path, whole: Path) -> str:
    """One word, as at the top of this file."""
    if isinstance(outcome.error, HungError):
        return "hang"
    if outcome.error is not None:
        return "traceback"
    named = said_of(file, outcome.said, run)
    if outcome.code == 0 and name == "resume":
        same = weights(run) == weights(whole)
        return "right" if same and numbers_or_none(run) == numbers_or_none(whole) else "said" if same and named else "wrong"
    if outcome.code == 0:
        return "right"
    return "said" if named and "Traceback" not in outcome.said else "unnamed"


def said_of(file: str, said: str, run: Path) -> bool:
    """Whether the damaged thing, or the checkpoint or folder that it is in, is named."""
    path = Path(file)
    above = [part.name for part in path.parents if part.name not in ("", "checkpoints")]
    # What is wrong with one that is missing.
    names = ["--step 2: the run has no such step"] if file.startswith("trajectories") else []
    return any(name in said.replace("\n", "") for name in ([str(run)] if file == "." else [path.stem, *above, *names]))


def weights(run: Path) -> bytes:
    file = run / "final" / "model.safetensors"
    return file.read_bytes() if file.is_file() else b""


def numbers_or_none(run: Path) -> Any:
    try:
        rows = numbers(run)
    except (OSError, ValueError, AssertionError):
        return None
    # Speeds and the loop's silence are a clock's.
    return [json.dumps(without_clock(row)) for row in rows if row["phase"] != "after" or row["step"] == STEPS]


def tried(name: str, file: str, kind: str, runs: Runs, place: Path) -> tuple[str, Outcome]:
    """Damage a copy of the run, and what the command makes of it."""
    shutil.rmtree(place, ignore_errors=True)
    run = place / "run"
    shutil.copytree(runs.cut, run)
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace(str(runs.cut.parent), str(place)))
    place.chmod(0o777)
    try:
        with as_nobody(place) if kind in DENIED else contextlib.nullcontext():
            if kind != "nothing":
                KINDS[kind](run / file, runs.other / file)
            outcome = COMMANDS[name](run)
    finally:
        restore(place)
    return verdict(name, file, outcome, run, runs.whole), outcome


def warmed(runs: Runs, place: Path) -> dict[str, str]:
    """What the commands make of an undamaged run: all right. What they import is then there, also for nobody."""
    for warm in (True, False):
        found = {}
        for name in COMMANDS:
            outcome = tried(name, "log.txt", "nothing", runs, place)
            found[name] = outcome[0]
            assert warm or outcome[0] == "right", outcome[1].said
    return found


def restore(place: Path) -> None:
    """Give back the rights to read and remove it."""
    for at, folders, files in os.walk(place):
        for item in (*folders, *files):
            path = Path(at, item)
            if not path.is_symlink():
                path.chmod(0o755)
