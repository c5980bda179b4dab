"""Queries of the index: episodes, groups, failures, and suspicions of reward hacking."""

from __future__ import annotations

import json
import math
import re
import sqlite3
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrl.env.official import success_rates
from agentrl.utils.errors import UserError, hint_text

Json = Any
MOST = 500
"""Rows per page."""
FACETS = ("phase", "step", "env", "stop", "tool", "error", "term", "task")
_EQUAL = ("phase", "env", "task", "split", "stop", "member")
_OTHER_FILTERS = ("step", "term", "min_reward", "max_reward", "success", "group", "q")
_PAGE = ("sort", "order", "offset", "limit")
_DETAIL_TABLES = {"tool": "tools", "error": "errors"}
_SORTS = {
    "step": "e.step", "reward": "e.reward", "success": "e.success", "turns": "e.turns", "calls": "e.calls",
    "tool_errors": "e.tool_errors", "tokens": "e.tokens", "seconds": "e.seconds", "task": "e.task", "env": "e.env",
    "stop": "e.stop", "phase": "e.phase",
}  # fmt: skip
_TERM = re.compile(r"(.*?)\s*(<=|>=|<|>|=)\s*(-?\d+(?:\.\d+)?|none)")
_SHOWN = (
    *("id", "step", "phase", "env", "task", "split", "member", "reward", "stop", "error", "turns", "calls", "tool_errors"),
    *("tokens", "seconds"),
)
COLUMNS = "f.name || '.' || e.row AS id, f.name || '.g' || e.grp AS grp_id, f.inode AS inode, e.*"
FROM = "FROM episodes e JOIN files f ON f.id = e.file"
GOLD_FAR, REPEATED, JUDGE_GAP, HIGH = 0.5, 0.5, 0.5, 0.8
"""Thresholds of suspicions: distance from gold, repetition, a judge's distance from other terms; HIGH: share of the spec's
maximum reward from which a reward is high."""
GOLD = "max(coalesce(e.gold_answer, 0), coalesce(e.gold_calls, 0))"


class NotFoundError(UserError):
    """A requested run, step or episode does not exist."""


def list_steps(steps: Iterable[int]) -> str:
    """Format steps in order for a message, at most twelve of them."""
    found = sorted(steps)
    return ", ".join(map(str, found[:12])) + (" ..." if len(found) > 12 else "") if found else "none"


def _condition(name: str, given: str) -> tuple[str, list[Any]]:
    if name in _EQUAL:
        return f"e.{name} = ?", [given]
    if name in _DETAIL_TABLES:
        return f"e.id IN (SELECT episode FROM {_DETAIL_TABLES[name]} WHERE name = ?)", [given]
    if name in ("min_reward", "max_reward"):
        try:
            bound = float(given)
        except ValueError:
            bound = math.nan
        if not math.isfinite(bound):
            raise UserError(f"{name}={given!r}: expected a number")
        return f"e.reward {'>=' if name == 'min_reward' else '<='} ?", [bound]
    if name == "step":
        return "e.step = ?", [_int(name, given)]
    if name == "success":
        meanings = {"1": "= 1", "true": "= 1", "0": "= 0", "false": "= 0", "none": "IS NULL", "null": "IS NULL"}
        if given not in meanings:
            raise UserError(f"success={given!r}: expected true, false or none")
        return f"e.success {meanings[given]}", []
    if name == "group":
        file, _, number = given.rpartition(".g")
        return "e.file = (SELECT id FROM files WHERE name = ?) AND e.grp = ?", [file, _int(name, number)]
    if name == "term":  # NAME: episodes with the term; NAME<0.5, NAME=none and the like: by value
        found = _TERM.fullmatch(given)
        if found is None:
            return "e.id IN (SELECT episode FROM terms WHERE name = ?)", [given]
        if found[3] == "none":
            return "e.id IN (SELECT episode FROM terms WHERE name = ? AND value IS NULL)", [found[1]]
        return f"e.id IN (SELECT episode FROM terms WHERE name = ? AND value {found[2]} ?)", [found[1], float(found[3])]
    words = [f'"{word}"' for word in re.findall(r"\w+", given)]
    if not words:
        raise UserError(f"q={given!r}: expected a word to search for")
    return "e.id IN (SELECT rowid FROM words WHERE words MATCH ?)", [" AND ".join([*words[:-1], f"{words[-1]}*"])]


def whole(asked: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    """Parse an integer of a URL and clip it to [low, high]. Raises UserError for other values."""
    return min(max(_int(name, asked[name]), low), high) if asked.get(name) else default


def _int(name: str, given: str) -> int:
    try:
        return int(given[:20])
    except ValueError:
        raise UserError(f"{name}={given!r}: expected a whole number") from None


Page = tuple[str, list[Any], str, int, int]


def page_of(asked: Mapping[str, str]) -> Page:
    """Build the query of a URL's parameters: condition, values, order, limit, offset. Raises UserError for an unknown parameter
    or value."""
    known = (*_EQUAL, *_DETAIL_TABLES, *_OTHER_FILTERS, *_PAGE)
    for name in asked:
        if name not in known:
            raise UserError(f"there is no filter {name!r}{hint_text(name, known)}")
    parts: list[str] = []
    values: list[Any] = []
    for name, given in asked.items():
        if given != "" and name not in _PAGE:
            part, own = _condition(name, given)
            parts.append(part)
            values.extend(own)
    sort, order = asked.get("sort") or "", asked.get("order") or ""
    if sort and sort not in _SORTS:
        raise UserError(f"sort={sort!r}: expected one of {', '.join(_SORTS)}{hint_text(sort, _SORTS)}")
    if order not in ("", "asc", "desc"):
        raise UserError(f"order={order!r}: expected asc or desc")
    way = "ASC" if order == "asc" else "DESC"
    by = f"{_SORTS[sort]} {way}, e.id {way}" if sort else "e.id ASC" if order == "asc" else "e.step DESC, e.id ASC"
    offset, limit = whole(asked, "offset", 0, 0, 1 << 40), whole(asked, "limit", 50, 1, MOST)
    return f"WHERE {' AND '.join(parts)}" if parts else "", values, by, limit, offset


def episodes(db: sqlite3.Connection, page: Page, high: Mapping[str, float]) -> dict[str, Json]:
    """Return a page of episodes, and their total number."""
    where, values, by, limit, offset = page
    total = db.execute(f"SELECT count(*) FROM episodes e {where}", values).fetchone()[0]
    # First the page's ids, from an index if there is one; then their rows.
    found = db.execute(
        f"SELECT {COLUMNS} {FROM} WHERE e.id IN "
        f"(SELECT e.id FROM episodes e {where} ORDER BY {by} LIMIT ? OFFSET ?) ORDER BY {by}",
        (*values, limit, offset),
    )
    return {"total": total, "rows": [episode_row(row, high) for row in found]}


def episode_row(row: sqlite3.Row, high: Mapping[str, float]) -> dict[str, Json]:
    """Convert an index row for the page, with the episode's own kinds of suspicion. `high`: as `high_rewards`."""
    gold = max(row["gold_answer"] or 0.0, row["gold_calls"] or 0.0)
    earned = row["reward"] is not None and row["reward"] >= high.get(row["env"], math.inf)
    signs = {
        "gold_far": earned and gold >= GOLD_FAR,
        "repeated_text": row["repeated"] >= REPEATED,
        "judge_disagreement": row["judge"] is not None and row["judge"] >= JUDGE_GAP,
    }
    return {
        **{name: row[name] for name in _SHOWN},
        "group": row["grp_id"],
        "success": None if row["success"] is None else bool(row["success"]),
        "terms": json.loads(row["terms"]),
        "suspects": [name for name, there in signs.items() if there],
    }


def high_rewards(db: sqlite3.Connection, maxima: Mapping[str, float]) -> dict[str, float]:
    """Return the reward from which it counts as high, per environment: a share of the spec's maximum, or else of the best one
    seen; without environments in which nothing was earned."""
    best = db.execute("SELECT env, max(reward) FROM episodes GROUP BY env").fetchall()
    return {env: HIGH * maxima.get(env, most) for env, most in best if most is not None and most > 0}


def facets(db: sqlite3.Connection) -> dict[str, Json]:
    """Return the filterable values with counts, mean reward and success."""
    out = {name: _facet(db, f"e.{name}", "FROM episodes e", name) for name in ("phase", "step", "env", "stop", "task")}
    for name, table in (("tool", "tools"), ("error", "errors"), ("term", "terms")):
        out[name] = _facet(db, "t.name", f"FROM {table} t JOIN episodes e ON e.id = t.episode", name)
    return {name: out[name] for name in FACETS}


def _facet(db: sqlite3.Connection, column: str, source: str, name: str) -> list[dict[str, Json]]:
    order = f"{column} ASC" if name == "step" else "n DESC, 1 ASC"
    rows = db.execute(
        f"SELECT {column}, count(*) AS n, avg(e.reward), avg(e.success) {source} GROUP BY {column} ORDER BY {order} LIMIT ?",
        (5000 if name == "step" else 200,),
    )
    return [{"value": value, "episodes": n, "reward": reward, "success": success} for value, n, reward, success in rows]


def groups(db: sqlite3.Connection, step: int | None, limit: int, offset: int) -> list[dict[str, Json]]:
    """Return groups with their members in order, of training and of evaluations with several episodes per task."""
    where, values = ("WHERE e.step = ?", (step,)) if step is not None else ("", ())
    chosen = db.execute(
        f"SELECT e.file, e.grp FROM episodes e {where} GROUP BY e.step, e.file, e.grp HAVING e.phase = 'train' OR count(*) > 1 "
        "ORDER BY e.step, e.file, e.grp LIMIT ? OFFSET ?",
        (*values, limit, offset),
    ).fetchall()
    out = []
    for file, number in chosen:
        rows = db.execute(f"SELECT {COLUMNS} {FROM} WHERE e.file = ? AND e.grp = ? ORDER BY e.member", (file, number)).fetchall()
        first, rewards = rows[0], [row["reward"] for row in rows if row["reward"] is not None]
        out.append({
            "group": first["grp_id"], "step": first["step"], "phase": first["phase"], "task": first["task"], "env": first["env"],
            "members": [member(row) for row in rows],
            # Population standard deviation of its scored members.
            "mean": statistics.fmean(rewards) if rewards else None, "std": statistics.pstdev(rewards) if rewards else None,
            "advantage_zero": not rewards or max(rewards) == min(rewards),
        })  # fmt: skip
    return out


def member(row: sqlite3.Row) -> dict[str, Json]:
    """Return an episode as a member of a group or pair."""
    success = None if row["success"] is None else bool(row["success"])
    return {"id": row["id"], "reward": row["reward"], "success": success, "stop": row["stop"], "turns": row["turns"]}


def failures(db: sqlite3.Connection, step: int | None, kind: str | None = None) -> list[dict[str, Json]]:
    """Count the reasons of unsuccessful episodes, each with its newest episodes; reasons that differ only in names and numbers
    are merged. An episode can have several reasons."""
    parts = [("e.step = ?", step), ("t.kind = ?", kind)]
    given = [(part, value) for part, value in parts if value is not None]
    where = f"WHERE {' AND '.join(part for part, _ in given)}" if given else ""
    rows = db.execute(
        f"SELECT t.reason, t.kind, count(*) AS n, min(e.step), max(e.step) FROM failures t JOIN episodes e ON e.id = t.episode "
        f"{where} GROUP BY t.kind, t.reason ORDER BY n DESC, t.kind, t.reason LIMIT 200",
        [value for _, value in given],
    ).fetchall()
    out = []
    for reason, of, n, first, last in rows:
        found = db.execute(
            f"SELECT f.name || '.' || e.row FROM failures t JOIN episodes e ON e.id = t.episode JOIN files f ON f.id = e.file "
            f"WHERE t.kind = ? AND t.reason = ? {'AND e.step = ?' if step is not None else ''} ORDER BY e.id DESC LIMIT 5",
            (of, reason, *([step] if step is not None else [])),
        )
        examples = [row[0] for row in found]
        out.append({"reason": reason, "kind": of, "episodes": n, "examples": examples, "first_step": first, "last_step": last})
    return out


def find_file(db: sqlite3.Connection, name: str, held_out: bool = True) -> list[int]:
    """Return the files of `STEP` or a file name: for a step its evaluation if there is one (and `held_out`), else its training.

    Raises NotFoundError.
    """
    if name.isdigit():
        rows = db.execute("SELECT id, phase FROM files WHERE step = ?", (int(name),)).fetchall()
        held = [row["id"] for row in rows if row["phase"] != "train"] if held_out else []
        found = held[-1:] or [row["id"] for row in rows if row["phase"] == "train"]
    else:
        found = [row["id"] for row in db.execute("SELECT id FROM files WHERE name = ?", (name,))]
    if not found:
        known = [row["name"] for row in db.execute("SELECT name FROM files ORDER BY step")]
        raise NotFoundError(f"there are no episodes of step {name!r}; there are {', '.join(known[:20]) or 'none'}")
    return found


def by_task(db: sqlite3.Connection, files: Sequence[int]) -> dict[tuple[str, ...], list[dict[str, Json]]]:
    """Group episodes of files by environment, split, and the task's id and content, as an id may be ambiguous."""
    out: dict[tuple[str, ...], list[dict[str, Json]]] = {}
    marks = ", ".join("?" * len(files))
    for row in db.execute(f"SELECT {COLUMNS} {FROM} WHERE e.file IN ({marks}) ORDER BY e.id", tuple(files)):
        out.setdefault((row["env"], row["split"], row["task"], row["content"]), []).append(member(row))
    return out


def evaluations(db: sqlite3.Connection) -> list[dict[str, Json]]:
    """Return per file of held-out episodes and environment: tasks, episodes, unscored ones, and `rates` (pass@k and pass^k)."""
    found: dict[tuple[Any, ...], list[dict[str, int]]] = {}
    for row in db.execute(
        "SELECT f.name AS file, e.phase, e.step, e.env, count(*) AS total, count(e.success) AS n, "
        "coalesce(sum(e.success), 0) AS c, sum(e.reward IS NULL AND e.success IS NULL) AS unscored "
        "FROM episodes e JOIN files f ON f.id = e.file "
        "WHERE e.phase != 'train' GROUP BY e.file, e.env, e.split, e.task, e.content ORDER BY e.step, e.file, e.env"
    ):
        found.setdefault((row["file"], row["phase"], row["step"], row["env"]), []).append(dict(row))
    out = []
    for (file, phase, step, env), tasks in found.items():
        rates = success_rates([(one["n"], one["c"]) for one in tasks if one["n"]], max(one["total"] for one in tasks))
        counts = {"episodes": sum(one["total"] for one in tasks), "unscored": sum(one["unscored"] for one in tasks)}
        out.append({"file": file, "phase": phase, "step": step, "env": env, "tasks": len(tasks), **counts, "rates": rates})
    return out


def verdict(one: Sequence[Mapping[str, Json]], other: Sequence[Mapping[str, Json]]) -> str:
    """Compare the success of two sides on a task. Rewards do not count: without a success, neither side wins."""
    known = [[float(row["success"]) for row in side if row["success"] is not None] for side in (one, other)]
    if not all(known):
        return "unknown"
    a, b = (sum(side) / len(side) for side in known)
    if a != b:
        return "won" if b > a else "lost"
    return "neither solved" if a == 0 else "both solved" if a == 1 else "same"


EXAMPLES = 20
GROWTH, GAIN = 1.3, 0.02
"""Length growth: tokens per episode in the last third of steps over the first third, while success rose by less than GAIN."""


def suspects(db: sqlite3.Connection, rows: Sequence[Mapping[str, Json]], maxima: Mapping[str, float]) -> list[dict[str, Json]]:
    """Return each kind of suspicion with its worst episodes. `rows`: the run's metrics; `maxima`: of the environments' specs."""
    found = []
    if high := high_rewards(db, maxima):
        values = ", ".join(sorted({f"{maxima[env]:.3g}" for env in high if env in maxima}))
        known = [f"spec's maximum ({values})"] if values else []
        rest = [] if high.keys() <= maxima.keys() else ["best one seen (the spec's maximum is not known)"]
        most = " or the ".join(known + rest)
        found += _suspicion_row(
            db,
            f"({' OR '.join('(e.env = ? AND e.reward >= ?)' for _ in high)}) AND {GOLD} >= {GOLD_FAR}",
            [part for pair in high.items() for part in pair],
            f"{GOLD} DESC, e.reward DESC",
            _gold_distance_text,
            "gold_far",
            "High reward, gold far away",
            f"the reward is at least {HIGH:.0%} of the {most}, and {GOLD_FAR:.0%} or more of the gold answer "
            "are not in the last text, or of the gold calls were not made: another way to the goal, or a hole in the reward",
        )
    found += _suspicion_row(
        db,
        f"e.repeated >= {REPEATED}",
        [],
        "e.repeated DESC, e.id DESC",
        lambda row: f"{row['repeated']:.0%} repeated, {row['tokens']} tokens",
        "repeated_text",
        "Repeated text",
        "half of a turn's 4-grams of words or more repeat others, or half of the turns say what an earlier one said",
    )
    unlike = (
        "SELECT env, task, content, did FROM episodes WHERE judged IS NOT NULL GROUP BY env, task, content, did "
        f"HAVING max(judged) - min(judged) >= {JUDGE_GAP}"
    )
    found += _suspicion_row(
        db,
        f"e.judge >= {JUDGE_GAP} OR (e.judged IS NOT NULL AND (e.env, e.task, e.content, e.did) IN ({unlike}))",
        [],
        "coalesce(e.judge, 0) DESC, e.id DESC",
        lambda row: (
            f"the judge is {row['judge']:.2g} from the other terms"
            if (row["judge"] or 0) >= JUDGE_GAP
            else f"judged {row['judged']:.2g}, and an equal episode of the task otherwise"
        ),
        "judge_disagreement",
        "The judge disagrees",
        f"a judge's value is {JUDGE_GAP:g} or more from the mean of the terms that are computed, from another judge's, or from "
        "its own of an equal episode",
    )
    # Growth of the whole run, or per environment if there are several.
    train = [row for row in rows if row.get("phase") == "train"]
    names = sorted({key.split("/")[1] for row in train for key in row if key.startswith("env/") and key.endswith("/tokens")})
    return found + [row for name in (names if len(names) > 1 else [""]) if (row := _growth_row(db, train, name)) is not None]


def _gold_distance_text(row: sqlite3.Row) -> str:
    said = []
    if (row["gold_answer"] or 0) > 0:
        said.append(f"{row['gold_answer']:.0%} of the gold answer is not in the last text")
    if (row["gold_calls"] or 0) > 0:
        said.append(f"{row['gold_calls']:.0%} of the gold calls were not made")
    return f"reward {row['reward']:.3g}: {', '.join(said)}"


def _suspicion_row(
    db: sqlite3.Connection, where: str, values: Sequence[Any], order: str, say: Any, kind: str, title: str, why: str
) -> list[dict[str, Json]]:
    """Return a suspicion with its count and its worst episodes, later steps first among equals; [] without episodes."""
    count = db.execute(f"SELECT count(*) FROM episodes e WHERE {where}", tuple(values)).fetchone()[0]
    worst = db.execute(f"SELECT {COLUMNS} {FROM} WHERE {where} ORDER BY {order} LIMIT ?", (*values, EXAMPLES))
    listed = [{"id": row["id"], "why": say(row)} for row in worst]
    return [{"kind": kind, "title": title, "why": why, "value": count, "episodes": listed}] if count else []


def _growth_row(db: sqlite3.Connection, train: Sequence[Mapping[str, Json]], env: str) -> dict[str, Json] | None:
    at = f"env/{env}/" if env else ""
    points = []
    for row in train:
        episodes = (row.get(f"{at}scored") or 0) + (row.get(f"{at}unscored") or 0)
        tokens, success = row.get(f"{at}tokens"), row.get(f"{at}success")
        if episodes and tokens is not None and success is not None:
            points.append((tokens / episodes, success))
    third = len(points) // 3
    if third < 2:
        return None
    (short, before), (long, after) = (
        tuple(sum(point[i] for point in part) / third for i in (0, 1)) for part in (points[:third], points[-third:])
    )
    if short <= 0 or long / short < GROWTH or after - before >= GAIN:
        return None
    last = max(row["step"] for row in train)
    longest = db.execute(
        "SELECT f.name || '.' || e.row AS id, e.tokens FROM episodes e JOIN files f ON f.id = e.file WHERE e.phase = 'train' "
        f"AND e.step >= ? {'AND e.env = ?' if env else ''} ORDER BY e.tokens DESC LIMIT ?",
        (last - last // 3, *([env] if env else []), EXAMPLES),
    )
    what = f"of {env} " if env else ""
    return {
        "kind": "length_growth",
        "title": f"Episodes {what}grow, success does not",
        "why": f"from the first to the last third of the steps, sampled tokens per episode went from {short:.0f} to {long:.0f}, "
        f"success from {before:.3f} to {after:.3f}",
        "value": long / short,
        "episodes": [{"id": row["id"], "why": f"{row['tokens']} tokens"} for row in longest],
    }
