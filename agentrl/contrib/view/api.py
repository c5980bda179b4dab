"""Answer the page's questions as JSON, one method per question."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import math
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, aclosing, suppress
from pathlib import Path
from typing import Any

from agentrl.config.schema import TrainConfig
from agentrl.contrib.toolkit.branches import differences
from agentrl.contrib.view import episode as episodes_of
from agentrl.contrib.view import queries
from agentrl.contrib.view.library import Library, Shelved
from agentrl.contrib.view.queries import suspects
from agentrl.run.metrics import metrics_table
from agentrl.run.reader import LIVE_S, RunRecord
from agentrl.utils.errors import AgentrlError, UserError
from agentrl.utils.parsing import read_json, toml_table
from agentrl.utils.redaction import learn, redact_json, redact_said

# The initial state of an episode, and its changes.
#
# A trajectory stores only the final state. The initial one is set up again from the task's seed on request, which costs a run
# nothing. It is shown only if the environment still makes the same task. Nothing beyond Python code is started for it (no
# server, sandbox, tools in other processes, or agent's program).

Json = Any
log = logging.getLogger(__name__)
LIMIT_S = 10.0
MOST = 500
"""Maximum number of listed differences."""


def state_diff(run: RunRecord, found: Mapping[str, Json], allowed: bool) -> dict[str, Json]:
    """Return `state_diff`, the differences from the initial to the final state or None, and `state_problem`, the reason for
    None."""
    out: dict[str, Json] = {"state_before": None, "state_diff": None, "state_problem": None}
    if found.get("state") is None:
        return out | {"state_problem": "the environment has recorded no state"}
    if not allowed:
        return out | {"state_problem": "environments are not run (--no-envs)"}
    task = found["task"]
    seed, split, name = task.get("seed"), str(task.get("split", "train")), str(found.get("env") or "")
    content = json.dumps([task.get("data"), task.get("gold")], sort_keys=True)
    try:
        before = read_json(_initial(run.path, run.text, name, seed, split, content))
    except Exception as problem:  # an environment's code may raise anything
        said = str(problem) if isinstance(problem, AgentrlError) else f"{type(problem).__name__}: {problem}"
        return out | {"state_problem": f"the first state could not be made again: {said}"}
    made = differences(before, found["state"])
    return out | {"state_before": before, "state_diff": [item for item, _ in zip(made, range(MOST), strict=False)]}


@functools.lru_cache(maxsize=256)
def _initial(path: Path, config: str, env: str, seed: int, split: str, content: str) -> str:
    """Return the initial state of a task as JSON text. Raises AgentrlError if the task has changed or would start other
    processes, TimeoutError, and errors of the environment."""
    from agentrl.env.catalog import EnvRef

    whole = _config_of(RunRecord(path))
    chosen = next((one for one in whole.envs if one.called == env), whole.envs[0])
    tools, agent = chosen.tools or whole.tools, chosen.agent or whole.agent
    for key, value in {"url": chosen.url, "sandbox": chosen.sandbox, "agent": agent, "tools": tools.mcp}.items():
        if value:
            raise AgentrlError(f"env.{key}: it would be started for it")

    async def set_up() -> str:
        made = EnvRef(chosen.id, chosen.params).build()
        # For classes that run commands in a sandbox, or have a tool server: a run folder must not choose what is started.
        if "sandbox" in inspect.signature(type(made).__init__).parameters or made._sources:
            raise AgentrlError(f"{made.id} starts other processes")
        async with aclosing(made):
            await made.areset(seed=seed, options={"split": split})
            if json.dumps([made.task.data, made.task.gold], sort_keys=True, default=dict) != content:
                raise AgentrlError("the environment makes another task of this seed than then")
            return json.dumps(made.state())

    return asyncio.run(asyncio.wait_for(set_up(), LIMIT_S))


def _config_of(run: RunRecord) -> TrainConfig:
    """Return the config of a run; for a folder of episodes, one with the environment of its note."""
    return run.config if run.evaluation is None else TrainConfig.model_validate({"env": run.evaluated_env()})


@functools.lru_cache(maxsize=256)
def spec_maxima(path: Path, config: str) -> dict[str, float]:
    """Return the maximum reward of each environment's spec in a run or evaluation, as far as known: not for a missing spec, an
    environment that does not load, or an unbounded reward."""
    from agentrl.env.catalog import EnvRef, find_spec, make_scorer

    found: dict[str, float] = {}
    try:
        whole = _config_of(RunRecord(path))
    except (AgentrlError, ValueError) as problem:
        log.info("%s: the maxima of its rewards are not known: %s", path, problem)
        return found
    for env in whole.envs:
        try:
            ref = EnvRef.of(env, whole.tools)
            found[env.called] = make_scorer(find_spec(ref, env.reward), whole.reward, ref).range[1]
        except Exception as problem:  # an environment's code may raise anything
            log.info("%s: the maximum of the reward of %s is not known: %s", path, env.called, problem)
    return {name: most for name, most in found.items() if 0 < most < math.inf}


Asked = Mapping[str, str]
_KEPT = 64
FIRST_S = 0.5
"""Seconds that the first question about a run's episodes waits for its index; enough for a small run."""


class Api:
    """Read-only answers about the runs of a library."""

    def __init__(self, library: Library, envs: bool = True) -> None:
        """`envs`: environments may be run, for initial states of episodes."""
        self.library, self._envs = library, envs
        self._kept: OrderedDict[Any, Json] = OrderedDict()
        self._lock = threading.Lock()

    def runs(self, asked: Asked) -> Json:
        return [self.library.row(one) for one in self.library.scan()]

    def run(self, ident: str, asked: Asked) -> Json:
        one = self.library.get(ident)
        row = self.library.row(one)
        with self._index(one) as db:
            # A last row without its end: of a live evaluation it is being written, so it counts once the file is still.
            cut = f"(done < size AND mtime < {(time.time() - LIVE_S) * 1e9:.0f})"
            why = f"iif({cut}, coalesce(problem, 'row ' || (rows + 1) || ': the file ends within it'), problem)"
            found = db.execute(f"SELECT name, rows - damaged, damaged + {cut}, {why} FROM files")
            known = {name: {"episodes": n, "damaged": damaged, "problem": problem} for name, n, damaged, problem in found}
            evaluations = self._once(db, (ident, "evaluations"), lambda: queries.evaluations(db))
        indexed, of = one.index.progress()
        unread = {"episodes": None, "damaged": 0, "problem": None}
        steps = [
            {"file": file.name, "phase": file.phase, "step": file.step, **known.get(file.name, unread)} for file in one.run.files
        ]
        fresh = RunRecord(one.run.path)
        summary = None if row["status"] == "damaged" else fresh.summary
        with suppress(ValueError):
            learn(toml_table(fresh.text))
        # Name (or pattern), unit, meaning and phases of all metrics in metrics.jsonl, under the table's headings.
        metric_table = [
            {"name": info.name, "unit": info.unit, "meaning": info.meaning, "phases": list(info.phases), "heading": heading}
            for heading, info in metrics_table()
        ]
        return {
            **row,
            "config": redact_said(fresh.text),
            "evaluations": evaluations,
            "official": redact_json({} if fresh.evaluation is None else fresh.official, said=True),
            "summary": redact_json(summary, said=True),
            "metric_table": metric_table,
            "steps": steps,
            "indexed": indexed,
            "of": of,
        }

    def metrics(self, ident: str, asked: Asked) -> Json:
        one = self.library.get(ident)
        _check_parameters(asked, "after", "edition")
        rows = one.metrics.rows()
        after = queries.whole(asked, "after", 0, 0, 1 << 40)
        edition = one.metrics.edition
        # A resumed run rewrites its last rows: a client with more rows, or of another edition, starts over.
        anew = after > len(rows) or queries.whole(asked, "edition", edition, 0, 1 << 40) != edition
        return {"rows": rows[0 if anew else after :], "next": len(rows), "edition": edition, "anew": anew}

    def episodes(self, ident: str, asked: Asked) -> Json:
        one, page = self.library.get(ident), queries.page_of(asked)
        with self._index(one) as db:
            found = queries.episodes(db, page, self._high_rewards(db, ident))
        indexed, of = one.index.progress()
        return {"total": found["total"], "indexed": indexed, "of": of, "rows": found["rows"], "problem": one.problem}

    def facets(self, ident: str, asked: Asked) -> Json:
        _check_parameters(asked)
        with self._index(self.library.get(ident)) as db:
            return self._once(db, (ident, "facets"), lambda: queries.facets(db))

    def episode(self, ident: str, episode: str, asked: Asked) -> Json:
        one = self.library.get(ident)
        with self._index(one) as db:
            row = episodes_of.find(db, episode)
            found = episodes_of.stored_row(one.run, row)
            with episodes_of.name_damage(one.run, row):
                out = {**queries.episode_row(row, self._high_rewards(db, ident)), **episodes_of.detail(found, row, db)}
        out["signs"] = {name: row[name] for name in ("gold_answer", "gold_calls", "repeated", "judge")}
        return out | state_diff(RunRecord(one.run.path), found, self._envs)

    def tokens(self, ident: str, episode: str, asked: Asked) -> Json:
        _check_parameters(asked, "ledger", "offset", "limit")
        one = self.library.get(ident)
        ledger, offset = (queries.whole(asked, name, 0, 0, 1 << 31) for name in ("ledger", "offset"))
        limit = queries.whole(asked, "limit", 4000, 1, episodes_of.MOST)
        with self._index(one) as db:
            row = episodes_of.find(db, episode)
        with episodes_of.name_damage(one.run, row):
            return episodes_of.columns(RunRecord(one.run.path), row, episodes_of.stored_row(one.run, row), ledger, offset, limit)

    def groups(self, ident: str, asked: Asked) -> Json:
        _check_parameters(asked, "step", "limit", "offset")
        limit, offset = queries.whole(asked, "limit", 200, 1, queries.MOST), queries.whole(asked, "offset", 0, 0, 1 << 40)
        with self._index(self.library.get(ident)) as db:
            return queries.groups(db, _step(asked), limit, offset)

    def failures(self, ident: str, asked: Asked) -> Json:
        _check_parameters(asked, "step", "kind")
        with self._index(self.library.get(ident)) as db:
            step, kind = _step(asked), asked.get("kind") or None
            return self._once(db, (ident, "failures", step, kind), lambda: queries.failures(db, step, kind))

    def suspects(self, ident: str, asked: Asked) -> Json:
        _check_parameters(asked)
        one = self.library.get(ident)
        with self._index(one) as db:
            rows = one.metrics.rows()
            key = (ident, "suspects", len(rows), one.metrics.edition)
            return self._once(db, key, lambda: suspects(db, rows, self._maxima(one)))

    def compare(self, asked: Asked) -> Json:
        """Compare episodes of the same tasks."""
        _check_parameters(asked, "a", "b")
        sides = [self._tasks(asked.get(side, ""), side) for side in ("a", "b")]
        if sides[0][0] != sides[1][0]:  # only one run has an evaluation at the step: compare training
            sides = [self._tasks(asked[side], side, held_out=False) for side in ("a", "b")]
        one, other = (tasks for _, tasks in sides)
        shared = [key for key in one if key in other]

        def distance(key: tuple[str, ...]) -> list[float]:
            """Sort key: largest difference in success first, then in reward."""
            means = [
                [sum(float(row[name] or 0) for row in side[key]) / len(side[key]) for side in (one, other)]
                for name in ("success", "reward")
            ]
            return [-abs(a - b) for a, b in means]

        pairs = [
            {"task": key[2], "env": key[0], "split": key[1], "content": key[3], "a": a, "b": b, "verdict": queries.verdict(a, b)}
            for key in sorted(shared, key=distance)
            for a, b in [(one[key], other[key])]
        ]
        alone = [
            [{"task": key[2], "env": key[0], "split": key[1], "episodes": mine[key]} for key in mine if key not in others]
            for mine, others in ((one, other), (other, one))
        ]
        return {"pairs": pairs, "only_a": alone[0], "only_b": alone[1]}

    def _tasks(self, given: str, side: str, held_out: bool = True) -> tuple[bool, Json]:
        """Return whether a side's episodes are of training, and its episodes by task."""
        ident, colon, step = given.rpartition(":")
        if not colon:
            raise UserError(f"{side}={given!r}: expected RUN:STEP")
        with self._index(self.library.get(ident)) as db:
            files = queries.find_file(db, step, held_out)
            trains = db.execute("SELECT phase FROM files WHERE id = ?", files[:1]).fetchone()["phase"] == "train"
            return trains, queries.by_task(db, files)

    def _high_rewards(self, db: sqlite3.Connection, ident: str) -> Mapping[str, float]:
        maxima = self._maxima(self.library.get(ident))
        found: Mapping[str, float] = self._once(db, (ident, "high"), lambda: queries.high_rewards(db, maxima))
        return found

    def _maxima(self, one: Shelved) -> Mapping[str, float]:
        return spec_maxima(one.run.path, one.run.text) if self._envs else {}

    def _once(self, db: sqlite3.Connection, key: tuple[Any, ...], make: Callable[[], Json]) -> Json:
        """Return counts over all episodes, cached per state of the index."""
        # A rewritten file gets a new number.
        stamp = tuple(db.execute("SELECT count(*), max(id), total(done) FROM files").fetchone())
        with self._lock:
            held = self._kept.get(key)
        if held is not None and held[0] == stamp:
            return held[1]
        made = make()
        with self._lock:
            self._kept[key] = stamp, made
            self._kept.move_to_end(key)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made

    def _index(self, one: Shelved) -> AbstractContextManager[sqlite3.Connection]:
        self.library.want(one, FIRST_S)
        return one.index.reading()


def _step(asked: Asked) -> int | None:
    return queries.whole(asked, "step", 0, 0, 1 << 40) if asked.get("step") else None


def _check_parameters(asked: Asked, *names: str) -> None:
    for name in asked:
        if name not in names:
            raise UserError(f"there is no parameter {name!r}; expected {', '.join(names) or 'none'}")
