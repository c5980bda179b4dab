"""A run of `agentrl test` from its options to its exit code."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from agentrl.contrib.gpu_tests.cards import (
    IN_USE_MIB,
    SETTLE_S,
    VISIBLE,
    CardLocks,
    CardPool,
    CardReader,
    NvidiaSmi,
    SimulatedCards,
    choose_cards,
)
from agentrl.contrib.gpu_tests.declare import (
    Earlier,
    FolderLock,
    failed_before,
    find_files,
    listed_tests,
    local_folder,
    read_declaration,
    recall,
    remember,
)
from agentrl.contrib.gpu_tests.report import HEARTBEAT_S, Lines, as_json, junit, report
from agentrl.contrib.gpu_tests.scheduler import RunLimits, Scheduler, exit_code
from agentrl.contrib.gpu_tests.session import FileJob, FileSession, SessionOptions
from agentrl.contrib.gpu_tests.verdict import Case, FileResult
from agentrl.utils.errors import ConfigError, ResourceError
from agentrl.utils.files import atomic_write
from agentrl.utils.terminal import say

OUT = Path(".pytest_cache") / "agentrl"


@dataclass(frozen=True)
class TestRun:
    """The options of `agentrl test`; times in seconds. `words`: files, folders, `FILE::TEST`. `cards`: their numbers, None for
    all. `simulate`: this many made-up cards instead. `args`: for pytest. `junit_xml`: None for `junit.xml` in `out`."""

    __test__ = False  # no class of tests, whatever pytest thinks of its name

    words: Sequence[str] = ()
    args: Sequence[str] = ()
    cards: Sequence[int] | None = None
    simulate: int | None = None
    slots: int = 1
    timeout: float = 1800.0
    collect_timeout: float = 120.0
    wait: float = 300.0
    settle: float = SETTLE_S
    in_use_mib: int = IN_USE_MIB
    heartbeat: float = HEARTBEAT_S
    failed: bool = False
    out: Path = OUT
    junit_xml: Path | None = None
    as_json: bool = False


def run_tests(options: TestRun) -> int:
    """Run test files on cards and slots; returns the code of `scheduler.exit_code`. Raises UserError for what cannot be right."""
    began, date = time.monotonic(), datetime.now().astimezone()
    found = find_files(options.words)
    with folder_lock(options.out):
        known = recall(options.out)
        found = failed_before(found, known) if options.failed else found
        stream = sys.stderr if options.as_json else sys.stdout
        lines = Lines(lambda line: say(line, file=stream, flush=True), began, options.heartbeat)
        jobs, unreadable = read_jobs(found, known, options.timeout)
        for result in unreadable:
            lines.ended(result, time.monotonic())
        reader: CardReader = NvidiaSmi() if options.simulate is None else SimulatedCards(options.out / "cards", options.simulate)
        pool = make_pool(reader, options, lines, needed=any(job.gpus for job in jobs))
        with temporary_folder(lines) as env:
            of_all = SessionOptions(options.out, {**reader.env, **env}, options.args, options.collect_timeout)
            limits = RunLimits(options.slots, options.wait)
            scheduler = Scheduler(jobs, pool, limits, lambda job, cards, now: FileSession(job, cards, of_all, now), lines)
            with signals_to(scheduler):
                results = [*unreadable, *scheduler.run()]
        code = exit_code(results, scheduler.interrupted)
        remember(options.out, results)
        atomic_write(options.junit_xml or options.out / "junit.xml", junit(results, date))
        told = as_json(results, pool.out, time.monotonic() - began, code)
        atomic_write(options.out / "results.json", json.dumps(told, indent=1))
        say(json.dumps(told) if options.as_json else report(results, pool.out, told["seconds"]), flush=True)
    return code


def read_jobs(
    found: Mapping[str, tuple[str, ...]], known: Mapping[str, Earlier], timeout: float
) -> tuple[list[FileJob], list[FileResult]]:
    """Jobs, as each file declares them; a file that cannot be read has its result at once, and the others are run."""
    jobs, unreadable = [], []
    for file, targets in found.items():
        try:
            said = read_declaration(Path(file), file)
        except ConfigError as error:
            cases = tuple(Case(name, "not run", reason=str(error)) for name in listed_tests(Path(file)))
            unreadable.append(FileResult(file, cases, problem=f"not run: {error}"))
            continue
        listed = said.tests if targets == (file,) else tuple(target.partition("::")[2] for target in targets)
        earlier = known.get(file, Earlier()).seconds
        jobs.append(FileJob(file, targets, said.gpus, said.timeout or timeout, earlier, listed))
    return jobs, unreadable


def make_pool(reader: CardReader, options: TestRun, lines: Lines, needed: bool) -> CardPool:
    """The cards of a run; none if no file needs one. Raises ResourceError for `--cards` that are not there."""
    numbers: list[int] = []
    uuids: dict[int, str] = {}
    missing = ""
    if needed:
        # Made-up cards are numbered by themselves; what hides real ones says nothing of them.
        visible = os.environ.get(VISIBLE) if options.simulate is None else None
        try:
            cards = reader.read()
            numbers, uuids = choose_cards(cards, options.cards, visible), {card.number: card.uuid for card in cards}
            missing = f"{VISIBLE}={visible} hides all" if cards and not numbers else ""
        except ResourceError as error:
            if options.cards is not None:
                raise
            missing = str(error)
    locks = CardLocks(reader.locks, uuids)
    return CardPool(reader, numbers, locks, lines.say, options.in_use_mib, options.settle, missing)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """The folder of logs and records for this run alone. Raises UserError if another one has it."""
    lock = FolderLock(folder)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def temporary_folder(lines: Lines) -> Iterator[dict[str, str]]:
    """The environment for temporary files: as it is if they are local, else with a local folder, which is removed at the end."""
    current = Path(tempfile.gettempdir())
    place, network = local_folder(current)
    if network is None:
        yield {}
        return
    folder = tempfile.mkdtemp(prefix="agentrl-test-", dir=place)
    lines.say(f"{current} is on a network mount ({network}): temporary files of the tests go to {folder}")
    try:
        yield {"TMPDIR": folder}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def signals_to(scheduler: Scheduler) -> Iterator[None]:
    """Ctrl-C, and what a terminal or a CI sends to end a job, stop the scheduler while the block lasts."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: scheduler.stop()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
