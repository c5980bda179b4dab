"""Compile a valid spec to a tree with a run's functions, services and replay environments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

from agentrl.config.schema import RewardConfig
from agentrl.data.trajectory import Json
from agentrl.reward.leaf import LEAVES, SCOPES, Context, Leaf, Services, View
from agentrl.reward.nodes import GROUP_LEAVES, LINEAR, ConstantNode, GateNode, LeafNode, Mods, Node, OpNode, walk
from agentrl.reward.replays import MakeEnv
from agentrl.reward.score import Scorer, plain, success_rule, visible_ids
from agentrl.reward.spec import MODS, load_spec
from agentrl.reward.values import Absent, UnscorableError, is_ref, join, parse_pointer, references
from agentrl.utils.errors import RewardSpecError
from agentrl.utils.search_path import PREFIX, function_named, given_object, names

_NARROW = ("round", "turn", "call")


def compile_spec(spec: str | Path | Mapping[str, Any], *, context: Context | None = None, timeout: float = 120.0) -> Scorer:
    """Compile a spec (a dict, or a path to a JSON file) to a Scorer.

    Raises RewardSpecError with the JSON Pointer of a fault, also if the run lacks a resource (`context`: a replay environment,
    functions for the `python` leaf). `timeout`: seconds for an episode's replays and functions (services have their own
    timeout); then scoring raises LateError.
    """
    valid = load_spec(spec)
    build = _Builder(valid["name"], context or Context())
    root = build.node(valid["root"], "/root", "episode", None)
    metrics = [
        build.node(node, f"/metrics/{index}", "episode", "a metric emits nothing")
        for index, node in enumerate(valid.get("metrics", []))
    ]
    wanted = valid.get("success", {})
    known = visible_ids([valid["root"], *valid.get("metrics", [])])
    if "id" in wanted and not {"use", "op"} & set(wanted) and wanted["id"] not in known:
        options = ", ".join(sorted(known)) or "none"
        build.fail("/success/id", f"no node outside of a narrower scope has the id {wanted['id']!r}; known: {options}")
    rule = success_rule(valid, root, metrics)
    if rule is not None and rule.derived and rule.node == plain(valid["root"]):
        success: Node | None = root  # the task part is the whole root, so it is not evaluated twice
    else:
        success = None if rule is None else build.node(rule.node, "/success", "episode", "success emits nothing")
    return Scorer(valid, root, metrics, build.blocking, build.context.services, rule, success, timeout)


class _Builder:
    """Builder of nodes. `scope`: the part of the episode that a node sees; `mute`: the reason why it may not emit at steps."""

    def __init__(self, name: str, context: Context) -> None:
        self.name = name
        self.context = context
        self.blocking = False

    def fail(self, pointer: str, message: str) -> NoReturn:
        raise RewardSpecError(f"reward spec {self.name!r}: at {pointer}: {message}")

    def node(self, node: Mapping[str, Any], pointer: str, scope: str, mute: str | None) -> Node:
        given = {key: node[key] for key in MODS if key in node}
        given |= {key: tuple(map(float, given[key])) for key in ("scale", "clip") if key in given}
        mods = Mods(**{**given, "weight": float(given.get("weight", 1.0))})
        own = self._scope(node, mods, pointer, scope, mute)
        for key in ("when", "args"):
            if key in node and not str(node.get("use", "")).startswith("group."):
                self._reachable(node[key], join(pointer, key), own)
        if "use" in node:
            return self._leaf(node, mods, pointer, own)
        below = mute  # the outer reason comes first, since fixing the inner one would not suffice
        if below is None and mods.clip is not None:
            below = f"{pointer} clips the total, so a step has no share of its own"
        elif below is None and mods.scope in _NARROW:
            below = f"{pointer} already has a scope"
        elif below is None and node["op"] != "gate" and node["op"] not in LINEAR:
            below = f"below {node['op']!r} ({pointer}) a step has no share of its own; use sum, mean or gate"
        if node["op"] == "gate":
            test = self.node(node["if"], join(pointer, "if"), own, f"it decides the gate {pointer}")
            then, otherwise = (
                self.node(branch, place, own, below) if isinstance(branch, Mapping) else ConstantNode(place, float(branch))
                for branch, place in ((node["then"], join(pointer, "then")), (node.get("else", 0), join(pointer, "else")))
            )
            return GateNode(pointer, mods, float(node.get("gte", 1.0)), (test, then, otherwise))
        children = [self.node(child, join(pointer, "of", i), own, below) for i, child in enumerate(node["of"])]
        if node["op"] == "mean":
            weights = [child.mods.weight for child in children]
            # With a negative weight, a mean could leave the range of its children, which `range` relies on.
            if min(weights) < 0 or sum(weights) <= 0:
                self.fail(join(pointer, "of"), f"the weights of a mean must be >= 0 and not all 0, not {weights}")
        return OpNode(pointer, mods, node["op"], children)

    def _scope(self, node: Mapping[str, Any], mods: Mods, pointer: str, scope: str, mute: str | None) -> str:
        own = mods.scope or scope
        if mods.scope == "group" and not str(node.get("use", "")).startswith("group."):
            self.fail(join(pointer, "scope"), "scope group is only for group.rank and group.zscore")
        if mods.scope != "group" and SCOPES.index(own) < SCOPES.index(scope):
            self.fail(join(pointer, "scope"), f"{own!r} is wider than the scope {scope!r} around this node")
        narrowed = own in _NARROW and own != scope
        if "reduce" in node and not narrowed:
            self.fail(join(pointer, "reduce"), "there is nothing to reduce: the node has no scope of its own")
        if mods.emit == "step" and not narrowed:  # then its value must be a sum of shares per turn
            kind = LEAVES.get(str(node.get("use")))
            if kind is None or not kind.spreads(node.get("args", {})):
                self.fail(
                    join(pointer, "emit"),
                    "only a node with a scope (round, turn or call) emits at steps, or calls.match with credit matched or "
                    "partial",
                )
            if mods.clip is not None:
                self.fail(join(pointer, "emit"), f"{pointer} clips the total, so a step has no share of its own")
        if mods.emit == "step" and mute is not None:
            self.fail(join(pointer, "emit"), f"cannot emit at steps: {mute}")
        # The scope `group` only names the comparison: the child still sees the whole episode.
        return scope if own == "group" else own

    def _leaf(self, node: Mapping[str, Any], mods: Mods, pointer: str, scope: str) -> Node:
        kind, args = node["use"], node.get("args", {})
        if kind in GROUP_LEAVES:
            if pointer.startswith("/success"):
                self.fail(pointer, f"{kind} compares episodes; success must be decided for each episode on its own")
            if scope != "episode":
                self.fail(pointer, f"{kind} compares whole episodes; it cannot be inside of scope {scope!r}")
            place = join(pointer, "args", "of")
            # Its children are mute: a comparison uses the whole value, so no step has a share of it.
            of = self.node(args["of"], place, scope, f"{kind} compares totals")
            if any(isinstance(below, tuple(GROUP_LEAVES.values())) for below in walk(of)):
                self.fail(place, "a group leaf cannot contain another group leaf")
            return GROUP_LEAVES[kind](pointer, mods, of, args)
        cls = LEAVES[kind]
        if scope not in cls.scopes:
            self.fail(pointer, f"{kind} sees {' or '.join(cls.scopes)}, not a {scope}")
        if scope == "call" and args.get("by", "assistant") != "assistant":
            self.fail(join(pointer, "args", "by"), "with scope: call there is only that call, by the policy. Leave out by")
        try:
            leaf: Leaf = cls(args, self.context)
            leaf.kind = kind
            if cls.asks is not None:
                self.context.services[cls.asks]  # created now, so that its faults are reported before the first episode
        except ValueError as error:
            self.fail(join(pointer, "args"), str(error))
        except KeyError:
            self.fail(pointer, f"{kind} asks {cls.asks!r}, which this run does not provide (in Python: Context.services)")
        # One blocking leaf moves the whole pass over the tree to a thread.
        self.blocking = self.blocking or leaf.blocks()
        referring = [key for key, value in args.items() if any(is_ref(ref) for _, ref in references(value))]
        return LeafNode(pointer, mods, leaf, {key: _reader(args[key], key in cls.optional) for key in referring})

    def _reachable(self, value: Json, pointer: str, scope: str) -> None:
        """Check that references to a turn or call, and `at`, are within that scope."""
        for place, ref in references(value, pointer):
            if not isinstance(ref["$"], str):
                continue
            part, at = parse_pointer(ref["$"])[0], ref.get("at")
            if part in ("turn", "call") and SCOPES.index(scope) < SCOPES.index(part):
                self.fail(join(place, "$"), f"{ref['$']!r} needs scope {part!r}; this node's scope is {scope!r}")
            if at is not None and SCOPES.index(scope) < SCOPES.index(at):
                self.fail(join(place, "at"), f"at {at!r} needs scope {at!r}; this node's scope is {scope!r}")


def _reader(value: Json, optional: bool = False) -> Callable[[View], Json]:
    """Make a function that returns the value with its references resolved; for a dangling one it raises UnscorableError, or
    returns None if `optional`."""
    if is_ref(value):
        # Parsed once, since the function below runs for every part of every episode.
        tokens, at = parse_pointer(str(value["$"])), value.get("at")

        def follow_ref(view: View) -> Json:
            found = view.read(tokens, at)
            if isinstance(found, Absent):
                if optional:
                    return None
                raise UnscorableError(f"{value['$']!r} resolves to nothing" + (f" at this {at}" if at else ""))
            return found

        return follow_ref
    if isinstance(value, Mapping):
        items = {key: _reader(item) for key, item in value.items()}
        return lambda view: {key: read(view) for key, read in items.items()}
    if isinstance(value, (list, tuple)):
        readers = [_reader(item) for item in value]
        return lambda view: [read(view) for read in readers]
    return lambda view: value


# What a run provides


def make_context(config: RewardConfig, *, replay_env: MakeEnv | None = None, services: Services | None = None) -> Context:
    """Make the Context for `compile_spec`; `services` default to new ones.

    Functions are imported here because the run's config names them; a spec never causes an import. Raises ConfigError for a
    name that is not a function.
    """
    python = {name: function_named(f"reward.python.{name}", target) for name, target in config.python.items()}
    # Functions given in Python are allowed without an entry in the config.
    python |= {name: given_object(name, "env.reward").value for name in names()}
    python = {name: _as_leaf(made) for name, made in python.items() if callable(made) and not isinstance(made, type)}
    return Context(replay_env, python, Services(config) if services is None else services)


def given_spec(name: str) -> dict[str, Any]:
    """Load a spec given in Python ("given:NAME"), or make the spec that calls a given function. Raises ConfigError if it was
    not given, RewardSpecError if it is invalid."""
    value = given_object(name, "env.reward").value
    plain = {"agentrl_reward": 1, "name": name.removeprefix(PREFIX), "root": {"use": "python", "args": {"name": name}}}
    return load_spec(value if isinstance(value, Mapping) else plain)


def _as_leaf(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt a reward function to `function(view, args)`; one that takes one value by position gets the Trajectory."""
    try:
        known = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature
        return function
    placed = [one for one in known if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    whole = len(placed) == 1 and not any(one.kind is one.VAR_POSITIONAL for one in known)
    return wraps(function)(lambda view, args: function(view.trajectory)) if whole else function
