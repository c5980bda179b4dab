"""Compare configs of results that are to be combined, and check references to environment variables."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from agentrl.config.envs import Keys, leaves, named_leaves
from agentrl.config.schema import EnvConfig, TrainConfig
from agentrl.utils.errors import ConfigError
from agentrl.utils.redaction import redact_json, references, resolve_references, texts

# References to environment variables

REFERENCE_KEYS = (
    "env.params", "env.system", "env.wrappers", "env.tools.args", "env.tools.mcp", "env.sandbox.args", "env.sft.params",
    "env.sft.gate_params", "tools.args", "tools.mcp", "sft.params", "sft.gate_params", "agent.command", "agent.env", "agent.url",
    "api.base", "api.args", "reward.judge.api_base", "reward.judge.args", "trackers.args",
)  # fmt: skip
"""Keys (and keys below them) whose texts may refer to environment variables; resolved on use."""
PATH_KEYS = ("name", "out", "model.path", "critic.path", "reward_model.path", "*.distillation.path", "data.path",
             "weights.folder", "model.chat_template", "reward.judge.cache", "reward.judge.engines.*.path",
             "env.reward")  # fmt: skip
"""Keys of files and folders, where shell variables such as `$NAME` are not expanded."""
_ALMOST = re.compile(r"(?i)\$\{(?!(?-i:env:[a-zA-Z_][a-zA-Z0-9_]*\}))\s*(?:oc\.)?env\s*:")


def check_references(config: TrainConfig) -> None:
    """Raise ConfigError for a reference at a key that takes none, an unset variable, and an invalid API address."""
    for key, text in texts(config.model_dump(mode="json", exclude_none=True)):
        if _ALMOST.search(text):
            raise ConfigError(f"{key} = {text!r}: not a valid reference to an environment variable. Write ${{env:NAME}}")
        if any(references(text)):
            if not any(fnmatchcase(key, pattern) for name in REFERENCE_KEYS for pattern in (name, f"{name}.*")):
                raise ConfigError(
                    f"{key} = {text!r}: a reference to an environment variable is not resolved here, and would be taken for "
                    f"plain text; the keys that take one: {', '.join(REFERENCE_KEYS)}"
                )
            resolve_references(text, key)
        elif ("$" in text or text[:1] == "~") and any(fnmatchcase(key, name) for name in PATH_KEYS):
            raise ConfigError(f"{key} = {text!r}: shell variables and ~NAME are not expanded here. Write the value")
    check_base(config.api.base, "api.base")
    check_base(config.reward.judge.api_base, "reward.judge.api_base")


def check_base(address: str | None, key: str) -> str:
    """Return the address of an API with references resolved; "" for None. Raises ConfigError for an unset variable, and for an
    address with a query or fragment, because requests append `/chat/completions` to it."""
    found = str(resolve_references(address or "", key))
    parts = urlsplit(found)
    if "?" in found or "#" in found:
        server = parts.netloc.rpartition("@")[2]
        bare = f"{parts.scheme}://{server}{parts.path}"
        raise ConfigError(
            f"{key}: the address {bare} has a query or fragment (? or #), to which the path ({parts.path}/chat/completions) "
            f"would be appended; write {bare}, and give a key as the variable that litellm reads (OPENAI_API_KEY, ...) or as "
            f"a name and password: {parts.scheme}://NAME:${{env:PASSWORD}}@{server}{parts.path}"
        )
    return found


# Identity: the values that must be equal for results to be combined. It is the whole config except the keys below, each with its
# reason; a new config key is part of every identity until it is listed here.

Purpose = Literal["train", "eval", "rollout"]
Identity = dict[str, Any]
"""Dotted key -> JSON value; keys that are unset are absent."""

_ANYWHERE = {
    "says what a run is called or where it is written": "name out env.name",
    "says how long a run takes; that a decaying learning rate is stretched is said (run/provenance.py)": "steps",
    "says how long a run takes": "stop_at_success",
    "says what is recorded of a run": """trajectories_every checkpoint.every checkpoint.keep checkpoint.keep_best
        checkpoint.asynchronous keep trackers traces prometheus profile""",
    "says when a run reports that it does not learn": "health",
    "says where processes run": "cluster",
    "says where the environment runs; its identity and files are compared separately": "env.url",
    "says where a password is": "env.token_env sglang.api_key_env",
    "computes the same numbers in less memory":
        "model.activation_checkpointing model.shard_gradients model.offload rollout.colocate",
    "spreads the same computation over cores or ranks":
        "model.threads model.replicas model.sequence_parallel model.tensor_parallel model.expert_parallel",
    "computes the same numbers, more or fewer rows at once": "model.packing",
    "says in which processes the same episodes are played": "rollout.workers",
    "says where the same agent reaches the same policy": "agent.host env.agent.host",
    "says how much runs at once, and not what": """env.sandbox.limit env.sandbox.warm rollout.max_episodes agent.concurrency
        env.agent.concurrency vllm.replicas vllm.kv_cache_mib engine_args.kv_cache_mib reward.judge.engines.*.concurrency""",
    "bounds faults of the infrastructure, whose episodes are unscored and run again": """agent.idle_timeout env.agent.idle_timeout
        rollout.retries rollout.env_timeout rollout.stall_timeout rollout.turn_timeout vllm.max_respawns vllm.call_timeout
        vllm.startup_timeout sglang.timeout""",
    "says how judges are asked and paid; which, and what they are asked, is in the reward spec": """reward.judge.api_base
        reward.judge.cache reward.judge.calls reward.judge.usd reward.judge.usd_per_million reward.judge.concurrency
        reward.judge.timeout reward.judge.retries""",
    "says where the same model is served": "sglang.servers",
    "says whether a server that ignores seeds is refused": "sglang.seeds",
    "brings the same weights another way": "weights.route weights.bucket_mib weights.folder",
    "says how many tasks a run's own evaluations have": "eval.tasks env.eval.tasks",
    "says when a run evaluates": "eval.every",
    "says how a run's own evaluations are averaged": "env.eval.weight",
    "says where, how often and how patiently a model is asked; an outage leaves an episode unscored, which is run again":
        "api.base api.concurrency api.timeout api.retries",
}  # fmt: skip
"""Reason -> keys or sections. "*" is any name."""
_EPISODES = {
    "says how much runs at once, and not what": "vllm.args.max_num_seqs vllm.args.max_num_batched_tokens",
    "is asked for by --split": "env.eval.split eval.split",
}
_UPDATES = {
    "is read by training alone": """sft data env.sft env.advantage algorithm optim critic reward_model model.lora model.engine
        weights.lora rollout.router_replay callbacks""",
    "belongs to training runs (--out names a folder)": """out steps stop_at_success trajectories_every eval.every checkpoint.every
        checkpoint.keep checkpoint.keep_best checkpoint.asynchronous keep trackers traces prometheus profile""",
    "forms the groups of an update, and nothing is updated": """env.weight rollout.groups rollout.group_size rollout.oversample
        rollout.oversample_members rollout.max_staleness rollout.min_survivors rollout.filter_zero_variance rollout.accept
        rollout.max_filtered""",
    "chooses the tasks of updates; here they are numbered": "env.sampler rollout.sampler",
    "chooses the environments of updates": "rollout.mixture",
    "says by which score a run's checkpoints are compared": "checkpoint.best",
    "builds a model for training; the one that plays is at model.path": "model.init",
    "says where episodes of updates begin": "rollout.start",
    "says which episodes of updates branch off others": "rollout.branch",
}
_LATER = {
    "steers the updates from now on; past ones stay as they are, and the change is said and kept in config_history": """
        optim.lr optim.matrix_lr optim.weight_decay optim.betas optim.max_grad_norm optim.warmup optim.schedule
        critic.lr critic.clip critic.epochs algorithm.advantage.args env.advantage.args algorithm.loss.args algorithm.aggregate
        algorithm.epochs algorithm.minibatch algorithm.groups algorithm.proximal algorithm.correction algorithm.truncated
        algorithm.entropy_bonus algorithm.kl.coef algorithm.kl.target algorithm.kl.kind algorithm.kl.where algorithm.kl.horizon
        rollout.max_turns rollout.max_turn_tokens rollout.max_episode_tokens rollout.min_survivors rollout.filter_zero_variance
        rollout.max_filtered callbacks"""
}
_TRAINING = {
    "samples from the same weights; how far it is from the trainer is measured in each step": "engine vllm.args",
    "spreads the same computation over GPUs": "vllm.tensor_parallel",
    "says how long a run takes; a decaying learning rate is stretched": "data.epochs",
    "says when a run does not start": "data.max_bad",
    "cuts the same batch into other pieces": "optim.micro_tokens",
    "computes the same numbers once": "optim.prefix_sharing",
    "measures, and trains nothing": "eval.split eval.temperature env.eval.split env.eval.temperature",
    "is the price of requests": "api.usd_per_million",
}
_EVALUATION = {"gives way to eval.temperature": "rollout.temperature"}
_ROLLOUT = {"gives way to rollout.temperature": "eval.temperature env.eval.temperature"}
_OWN_JUDGE = "reward.judge.engines"


def _keys_of(*tables: Mapping[str, str]) -> frozenset[str]:
    return frozenset(key for table in tables for keys in table.values() for key in keys.split())


LATER = _keys_of(_LATER)
"""Keys that matter but that a resume may change: updates read them anew, and checkpoints remain compatible."""
MEASURES = ("eval.tasks", "eval.split", "eval.temperature", "env.eval")
"""Keys that a resume may change, after which evaluations measure something else."""
_EVERYWHERE = _keys_of(_ANYWHERE) | {f"{_OWN_JUDGE}.*.{key}" for key in _keys_of(_ANYWHERE) if key.startswith("vllm.")}
CANNOT_MATTER: dict[Purpose, frozenset[str]] = {
    "train": _EVERYWHERE | _keys_of(_LATER, _TRAINING),
    "eval": _EVERYWHERE | _keys_of(_EPISODES, _UPDATES, _EVALUATION),
    "rollout": _EVERYWHERE | _keys_of(_EPISODES, _UPDATES, _ROLLOUT),
}
"""Keys or sections that cannot matter, by purpose. "*" is any name."""

OF_A_START = ("name", "out", "data.max_bad")
"""Keys that a resume does not read: the run stays in its folder, with its data as read at the start."""

_DIGEST = "sha256:"


def identity_of(config: TrainConfig, purpose: Purpose) -> Identity:
    """Return the values that must be equal for `config` to continue a run."""
    found: Identity = {}
    for name, keys, value in named_leaves(without_secrets(config), config.envs):  # by name, as their order does not matter
        key = _without_place(keys)
        found |= {} if cannot_matter(key, purpose) else {name: value}
    return found


def _without_place(keys: Keys) -> str:
    """Return a dotted key without the number of an environment."""
    return ".".join(key for key in keys if isinstance(key, str))


def without_secrets(config: TrainConfig) -> dict[str, Any]:
    """Return the config as a JSON table for display, with digests in place of values that may contain passwords."""
    table = config.model_dump(mode="json", exclude_none=True)
    given = table.get("env", [])
    places: list[dict[str, Any]] = [table, *(given if isinstance(given, list) else [given])]
    servers = [server for place in places for server in place.get("tools", {}).get("mcp", {}).values()]
    for part in (*servers, *(place["agent"] for place in places if "agent" in place)):
        part.update({key: digest_of(part[key]) for key in ("command", "url") if key in part})
        part.update({"env": {name: digest_of(value) for name, value in part["env"].items()}} if "env" in part else {})
    shown: dict[str, Any] = redact_json(table, said=True)
    return shown


def digest_of(value: Any) -> str:
    """Digest a JSON value for an identity that must not contain it."""
    return _DIGEST + hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def cannot_matter(key: str, purpose: Purpose) -> bool:
    """Return True if `key`, or a section that contains it, is listed in CANNOT_MATTER."""
    parts = key.split(".")
    if key.startswith(f"{_OWN_JUDGE}."):
        parts[_OWN_JUDGE.count(".") + 1] = "*"
    return any(".".join(parts[:end]) in CANNOT_MATTER[purpose] for end in range(1, len(parts) + 1))


def check_overrides(given: Iterable[tuple[Sequence[str], Any]], purpose: Purpose) -> None:
    """Raise ConfigError for an override that an evaluation or a rollout would not read. `given`: keys and values."""
    own = _EVALUATION if purpose == "eval" else {**_ROLLOUT, "is asked for by -n and --split": "eval env.eval"}
    listed = [(key, reason) for reason, keys in {**own, **_UPDATES}.items() for key in keys.split()]
    for keys, value in (leaf for path, table in given for leaf in leaves(table, tuple(path))):
        of_env = keys[0] == "env" and len(keys) > 2 and keys[1] not in EnvConfig.model_fields  # named: env.NAME.weight
        name = ".".join(map(str, ("env", *keys[2:]) if of_env else keys))
        why = next((reason for key, reason in listed if f"{name}.".startswith(f"{key}.")), None)
        if why is not None and value is not False and value is not None:  # these unset a key
            raise ConfigError(f"{'.'.join(map(str, keys))}: agentrl {purpose} does not read it: it {why}. Leave it out")


def differences(before: Identity, now: Identity) -> str:
    """List every differing key with both values; "" without differences."""
    return "; ".join(changes(before, now))


def changes(before: Identity, now: Identity) -> list[str]:
    """List every differing key with both values, one text per key."""
    keys = sorted(key for key in before.keys() | now.keys() if json.dumps(before.get(key)) != json.dumps(now.get(key)))
    found = []
    for key in keys:
        shown = []
        for value in (before.get(key), now.get(key)):
            hidden = isinstance(value, str) and value.startswith(_DIGEST)
            shown.append("unset" if value is None else f"{value} (a digest)" if hidden else json.dumps(value))
        found.append(f"{key} was {shown[0]}, is {shown[1]}")
    return found


def changes_below(parts: Collection[str], before: TrainConfig, now: TrainConfig) -> list[str]:
    """List the changes of these keys and of keys below them, one text per key."""
    then, since = (
        {
            name: value
            for name, keys, value in named_leaves(without_secrets(config), config.envs)
            if any(f"{_without_place(keys)}.".startswith(f"{part}.") for part in parts)
        }
        for config in (before, now)
    )
    return changes(then, since)


def check_same_identity(before: Identity, now: Identity, of: str, folder: Path) -> None:
    """Raise ConfigError if the identity of `folder` differs from `now`. `of`: its content in that case."""
    if found := differences(before, now):
        raise ConfigError(f"{folder}: it holds {of}: {found if before else 'its values are not recorded'}; use another --out")


def check_resumed(before: TrainConfig, now: TrainConfig, folder: Path) -> None:
    """Raise ConfigError if the run in `folder`, started with `before`, cannot continue with `now`, or would ignore a change."""
    if found := differences(identity_of(before, "train"), identity_of(now, "train")):
        raise ConfigError(
            f"{folder / 'config.toml'}: what the run has learned so far was learned with other values: {found}; leave them as "
            "they are, or start another run (model.path can be a model folder of this one)"
        )
    if unread := changes_below(OF_A_START, before, now):
        raise ConfigError(f"{folder}: {unread[0]}: a resume goes on there, with its data, and would not read it. Leave it out")
