"""One table describes every number in metrics.jsonl: name, unit, formula, rows.

The documentation page, the viewer and the trackers use it; tests check every row of the suite's runs against it. A row has "step"
(updates done; in the warm start: supervised steps) and "phase".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

PHASES = {
    "sft": "a supervised step of the warm start",
    "gate": "a greedy evaluation that decides whether the warm start ends",
    "before": "the held-out evaluation before the first update",
    "train": "an update",
    "eval": "a held-out evaluation after `eval.every` updates",
    "after": "the held-out evaluation after the last update",
    "data": "an optimizer step of a run on data (`agentrl sft` with [data])",
    "heldout": "its held-out examples, before the first step, every `eval.every` steps, and after the last",
}
_PLAYED = ("gate", "before", "train", "eval", "after")
_DATA = ("data", "heldout")
_STEPS = ("train", "sft", "data")


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """Description of a number in a row. `name`: key, or a pattern with `<placeholders>`. `per_env`: with several environments
    also per environment, as `env/<name>/KEY`. `meaning`: with the formula and its source."""

    name: str
    unit: str
    meaning: str
    phases: tuple[str, ...] = ("train",)
    per_env: bool = False


_episodes = partial(MetricInfo, phases=_PLAYED, per_env=True)
TABLE: dict[str, tuple[MetricInfo, ...]] = {
    "What episodes scored": (
        _episodes("success", "share", "share of successes among the episodes whose success is known; evaluations of several "
            "environments: the mean over them, by `env.eval.weight`"),
        _episodes("reward", "reward", "mean reward of the scored episodes; evaluations of several environments: as `success`"),
        _episodes("term/<id>", "reward", "mean value, before its weight, of the root's node with this `id`"),
        _episodes("metric/<name>", "value", "mean value of the node with this `id` among the reward spec's `metrics`"),
        _episodes("scored", "episodes", "episodes with a reward; in evaluations: with a reward or a known success"),
        _episodes("unscored", "episodes", "the other episodes: no mean counts them as 0"),
        _episodes("unscored/<cause>", "episodes", "of these, by cause: `env_error`, ... or `reward_spec`: a null root"),
        _episodes("n/<key>", "episodes", "episodes in the mean KEY, if these are not exactly the scored ones"),
    ),
    "By horizon, the number of calls in the gold solution of a task": (
        _episodes("horizon/<calls>/success", "share", "as `success`, of episodes whose task has this many calls: a number, or "
            "a range (`5-6`, `7-8`, `9-12`, ...). With several environments only of each. "
            "Without a gold solution there are no such keys"),
        _episodes("horizon/<calls>/reward", "reward", "as `reward`, of these episodes"),
        _episodes("horizon/<calls>/scored", "episodes", "as `scored`, of these episodes"),
        _episodes("horizon/<calls>/unscored", "episodes", "as `unscored`, of these episodes"),
        _episodes("horizon/<calls>/given", "calls", "as `given`, of these episodes"),
        _episodes("horizon/<calls>/turns", "turns", "turns per episode, mean over all of these episodes"),
        _episodes("horizon/<calls>/response_length", "tokens", "sampled tokens per episode, mean over all of these episodes"),
    ),
    "How episodes went": (
        _episodes("tokens", "tokens", "sampled tokens of all episodes, over all their ledgers"),
        _episodes("given", "calls", "gold calls given to an episode at its start (`rollout.start`), mean over all"),
        _episodes("turns", "turns", "turns per episode, mean over all episodes"),
        _episodes("turns_max", "turns", "most turns of an episode"),
        _episodes("response_length/mean", "tokens", "sampled tokens per episode, mean over all episodes"),
        _episodes("response_length/max", "tokens", "most sampled tokens of an episode"),
        _episodes("response_length/cut", "share", "share of the turns that a token limit cut"),
        _episodes("truncated", "share", "share of the episodes that a budget of turns, tokens or time ended"),
        _episodes("forks", "share", "share of the later turns whose prompt does not continue the last: another ledger begins"),
        _episodes("tool_calls", "calls", "tool calls per episode, mean over all episodes"),
        _episodes("tool_error_rate", "share", "share of the answered tool calls that were errors, over all calls together"),
        _episodes("repetition", "share", "share of the 4-grams of a turn (16 tokens or more) that it had before"),
        _episodes("same_answer", "share", "share of the episodes with the commonest last message; null if all are of one task"),
        _episodes("stop/<reason>", "share", "share of all episodes that ended for this reason (`StopReason`)"),
        MetricInfo("rewrites", "rewrites", "rewrites of the conversation by `rollout.context` per episode"),
    ),
    "What groups teach": (
        MetricInfo("reward_std", "reward", "unbiased standard deviation of rewards within a group, mean", per_env=True),
        MetricInfo("zero_variance", "share", "share of the groups whose rewards are all equal: they teach nothing", per_env=True),
        MetricInfo("groups_zero_variance", "groups", "number of these groups"),
        MetricInfo("thin_groups", "share", "share of groups with less than 4 scored members, mostly unscored", per_env=True),
        MetricInfo("groups_filtered", "groups", "groups without variance that were replaced (`rollout.filter_zero_variance`)"),
        MetricInfo("groups_refused", "groups", "groups that `rollout.accept` refused for this update, which were replaced"),
        MetricInfo("env/<name>/groups_<state>", "groups", "groups of this environment dropped for this update, by state"),
        MetricInfo("members_cancelled", "episodes", "given up in full groups, since the start (`rollout.oversample_members`)"),
        MetricInfo("episodes_played", "episodes", "episodes that ended since the last update, also those of dropped groups"),
        MetricInfo("episodes_unscored", "episodes", "of these, without a reward (`health.max_unscored`)"),
        MetricInfo("faults/<cause>", "attempts", "attempts since the last update without a score, by cause, retries included"),
        MetricInfo("groups/<state>", "groups", "by state: `pending`, `running`, `complete` now; others since the start"),
        MetricInfo("advantage_abs", "advantage", "mean of |A| over the sampled tokens"),
        MetricInfo("advantage_zero", "share", "share of the sampled tokens with an advantage of exactly 0"),
    ),
    "The update": (
        MetricInfo("loss", "loss", "mean over the optimizer steps of the loss; supervised: cross entropy per assistant token, in "
            "nats; of pairs: their mean", ("train", "sft", "data", "heldout")),
        MetricInfo("grad_norm", "norm", "L2 norm of the gradient before clipping, mean over the optimizer steps that were "
            "taken", _STEPS),
        MetricInfo("lr", "1", "learning rate of this update (`optim.lr` times its schedule)", ("train", "data")),
        MetricInfo("lr_factor", "1", "learning rate of the supervised step over `sft.lr`", ("sft",)),
        MetricInfo("entropy", "nats", "of the policy at the rollout's temperature, mean over computed, trained tokens"),
        MetricInfo("temperature", "1", "with points in `rollout.temperature`: that of this update's episodes and policies"),
        MetricInfo("ratio", "1", "importance ratio of trained to proximal policy, mean over these tokens; gspo: of the row"),
        MetricInfo("clip_fraction", "share", "share of these tokens on which the loss's bound on the ratio is active"),
        MetricInfo("dual_clip_fraction", "share", "share of them under the dual clip (Ye et al. 2020, arXiv:1912.09729)"),
        MetricInfo("picked", "share", "share of them that the loss picked by covariance (clip_cov, kl_cov)"),
        MetricInfo("behaviour_weight", "1", "mean weight of decoupled_ppo (Hilton et al. 2022, arXiv:2110.00641)"),
        MetricInfo("kl_reference", "nats", "KL of the policy to the reference by `algorithm.kl.kind`, mean over tokens"),
        MetricInfo("kl_reward", "nats", "the same of the proximal policy, over all sampled tokens (`algorithm.kl.where`)"),
        MetricInfo("kl_coef", "1", "coefficient of the KL penalty (adaptive with `algorithm.kl.target`)"),
        MetricInfo("tokens_trained", "tokens", "tokens that the denominators count: sampled, and not rejected by a correction",
            _STEPS),
        MetricInfo("tokens_computed", "tokens", "of these, computed (in every epoch): without rows that cannot have a gradient"),
        MetricInfo("episodes_trained", "episodes", "episodes that the denominators count"),
        MetricInfo("minibatches", "steps", "minibatches of the update"),
        MetricInfo("optimizer_steps", "steps", "optimizer steps that were taken; a minibatch without a gradient takes none",
            _STEPS),
        MetricInfo("skipped_optimizer_steps", "steps", "steps that were skipped because a loss or gradient was not "
            "finite", _STEPS),
        MetricInfo("gpu/memory_gib", "GiB", "on GPUs: peak memory of a training process's tensors in the update, of the fullest "
            "card", _STEPS),
        MetricInfo("gpu/tokens_per_s", "tokens/s", "on GPUs: tokens of trained rows, prompts included, per second of the update "
            "and rank", _STEPS),
        MetricInfo("gpu/mfu", "share", "model FLOPs utilization, in bfloat16 on cards of known peak: FLOPs of forward and "
            "backward passes (Chowdhery et al. 2022, arXiv:2204.02311, appendix B) over the cards' peak by data sheet; not "
            "with shared prefixes", _STEPS),
        MetricInfo("skipped_steps", "0 or 1", "1: nothing was trained, because a number in the batch was not finite"),
        MetricInfo("transcripts_skipped", "transcripts", "teacher transcripts that were too long, since the start", ("sft",)),
        MetricInfo("prefix_ratio", "1", "tokens of the computed rows per token that went through the model"),
        MetricInfo("prefix_ratio_possible", "1", "the same if each shared prefix of the whole batch were computed once"),
        MetricInfo("experts_max_violation", "1", "largest load of an expert over the mean, less 1 (arXiv:2408.15664)"),
        MetricInfo("experts_entropy", "1", "entropy of the experts' shares over that of even ones; 1: even"),
        MetricInfo("experts_unused", "share", "share of the experts to which no token went"),
        MetricInfo("teacher/kl", "nats per token", "reverse KL to the teacher, mean over the sampled tokens"),
        MetricInfo("reward_model/score", "reward", "mean score of the [reward_model]"),
        MetricInfo("experience/held", "episodes", "rare successes that are kept (`algorithm.experience`)"),
        MetricInfo("experience/episodes", "episodes", "of these, added to the update; seen by `loss`, `grad_norm` alone"),
        MetricInfo("experience/tokens", "tokens", "their sampled tokens"),
        MetricInfo("experience/age_mean", "updates", "age in updates of the oldest weights that sampled them, mean"),
        MetricInfo("experience/age_max", "updates", "maximum age: at most `algorithm.experience.max_age`"),
        MetricInfo("experience/kl_behaviour", "nats", "as `kl_behaviour`, of their tokens"),
        MetricInfo("experience/log_ratio_max", "nats", "largest |log pi(trained) - log pi(engine)| of their tokens"),
        MetricInfo("experience/<metric>", "1", "the loss's metrics (`ratio`, `clip_fraction`, ...) on their tokens"),
        MetricInfo("experience/nll", "nats", "mean of -log pi over their tokens (`term = \"supervised\"`)"),
        MetricInfo("demonstrations/episodes", "episodes", "gold solutions added to the update (`algorithm.demonstrations`)"),
        MetricInfo("demonstrations/skipped", "episodes", "those that were left out: too long for a row, or not to be played"),
        MetricInfo("demonstrations/tokens", "tokens", "their tokens as the policy would have sampled them"),
        MetricInfo("demonstrations/nll", "nats", "mean of -log pi over these"),
        MetricInfo("opsd/shown", "share", "rows of which the teacher read the gold solution"),
        MetricInfo("echo/tokens", "tokens", "tokens that callback `echo` learns"),
        MetricInfo("echo/nll", "nats", "mean of -log pi over these"),
        MetricInfo("critic/loss", "loss", "value loss, mean over the critic's optimizer steps"),
        MetricInfo("critic/value", "reward", "mean value of the tokens"),
        MetricInfo("critic/explained_variance", "1", "1 - mean (value - return)^2 / variance of the returns; 1: exact"),
        MetricInfo("critic/grad_norm", "norm", "as `grad_norm`"),
        MetricInfo("critic/gpu/<figure>", "1", "as `gpu/memory_gib`, `gpu/tokens_per_s` and `gpu/mfu`"),
        MetricInfo("critic/optimizer_steps", "steps", "as `optimizer_steps`"),
        MetricInfo("critic/skipped_optimizer_steps", "steps", "as `skipped_optimizer_steps`"),
        MetricInfo("critic/lr", "1", "as `lr`"),
    ),
    "How far off policy": (
        MetricInfo("staleness_mean", "updates", "age in updates of the weights that sampled the batch's tokens, mean"),
        MetricInfo("staleness_max", "updates", "maximum age: at most `rollout.max_staleness`"),
        MetricInfo("mismatch_kl", "nats", "k3 = exp(-d) - 1 + d with d = log pi(trainer) - log pi(engine) of the same tokens, "
            "mean (Schulman 2020, Approximating KL Divergence), before any of them is trained on; without staleness it is "
            "the disagreement of trainer and engine"),
        MetricInfo("mismatch_max", "nats", "largest |d|"),
        MetricInfo("kl_behaviour", "nats", "k1 to what sampled: mean log pi(engine) - log pi(trained) of computed tokens"),
    ),
    "The engine and the rollouts": (
        MetricInfo("tokens_sampled", "tokens", "all tokens sampled for training since the last row, retried attempts, greedy "
            "episodes and dropped groups included"),
        MetricInfo("tokens_thrown", "tokens", "tokens, of these or earlier ones, that will not be trained: thrown away. "
            "With `rollout.max_staleness` 0, `tokens` + `tokens_thrown` are `tokens_sampled` (and greedy episodes)"),
        MetricInfo("tokens_thrown/<why>", "tokens", "those of groups that were `filtered`, `refused`, `stale` or `failed`, "
            "of `cancelled` groups and members (without unfinished turns), and of attempts that were `retried`"),
        MetricInfo("throughput/sampled_tokens_per_s", "tokens/s", "tokens that the engine sampled for anything since the "
            "last row, over all seconds since then, with `rollout.max_staleness` 0 those of the update too (above 0: none in the "
            "first row, whose tokens were sampled before the updates began)"),
        MetricInfo("throughput/trained_tokens_per_s", "tokens/s", "`tokens_trained` over the seconds of the update"),
        MetricInfo("engine/cache_hit", "share", "share of the prompt tokens that came from the prefix cache"),
        MetricInfo("engine/running", "requests", "running requests when the row is written"),
        MetricInfo("engine/waiting", "requests", "waiting requests at that time"),
        MetricInfo("engine/kv_used", "share", "share of the KV cache in use at that time (vLLM: by running "
            "requests, shared prefixes counted for each; embedded: of its memory limit)"),
        MetricInfo("engine/steps", "steps", "decoding steps of the embedded engine since its start"),
        MetricInfo("engine/idle", "episodes", "episodes whose cache waits for their next turn, at that time (embedded engine)"),
        MetricInfo("engine/replicas", "replicas", "replicas of vLLM that are alive"),
        MetricInfo("engine/respawns", "replicas", "restarted replicas of vLLM"),
        MetricInfo("engine/servers", "servers", "servers of SGLang that are alive"),
        MetricInfo("engine/calls", "calls", "calls of a policy that is a Python function, since the start"),
        MetricInfo("engine/attempts", "requests", "requests to an API, retries included, since the start"),
        MetricInfo("loop/blocked_s", "s", "time in which the driver's event loop was blocked, in blocks of at least 0.2 s"),
        MetricInfo("loop/longest_s", "s", "the longest such time"),
        MetricInfo("judge/<name>/verdicts", "verdicts", "asked of judge <name> on an engine of the run", _PLAYED),
        MetricInfo("judge/<name>/cached", "verdicts", "of these, cached, or shared with an equal question in progress", _PLAYED),
        MetricInfo("judge/<name>/failed", "verdicts", "of these, failed: an engine error, or no verdict in the answer", _PLAYED),
        MetricInfo("judge/<name>/prompt_tokens", "tokens", "prompt tokens of the others, not counted for the policy", _PLAYED),
        MetricInfo("judge/<name>/sampled_tokens", "tokens", "sampled for verdicts", _PLAYED),
        MetricInfo("time/judge/<name>_s", "s", "time in which judge <name> was busy", _PLAYED),
        MetricInfo("throughput/judge/<name>_tokens_per_s", "tokens/s", "its sampled tokens per busy second", _PLAYED),
        MetricInfo("rollout/workers", "workers", "rollout workers that play"),
        MetricInfo("rollout/respawns", "workers", "replaced dead workers, since the start"),
        MetricInfo("rollout/returned", "episodes", "episodes played again because their worker died, since the start"),
        MetricInfo("rollout/worker_<i>/episodes", "episodes", "episodes of worker i"),
        MetricInfo("rollout/worker_<i>/turns", "turns", "turns of worker i"),
        MetricInfo("rollout/worker_<i>/turn_ms", "ms", "median time of a turn of worker i without the engine's"),
        MetricInfo("rollout/worker_<i>/lag_ms", "ms", "longest time that its event loop was blocked"),
        MetricInfo("rollout/worker_<i>/blocked_s", "s", "as `loop/blocked_s`, of worker i"),
    ),
    "Which tasks": (
        MetricInfo("mixture/<env>/share", "share", "share of the groups that go to this environment now"),
        MetricInfo("mixture/<env>/group_tokens", "tokens", "sampled tokens per group, estimated by by_tokens"),
        MetricInfo("mixture/<env>/learnable", "1", "4 p (1 - p) of its success rate p, decayed mean, estimated by by_success"),
        MetricInfo("sampler/epoch", "passes", "passes over the pool of tasks"),
        MetricInfo("sampler/pool", "tasks", "tasks in the pool"),
        MetricInfo("sampler/success", "share", "mean estimated success over the arms (success_weighted)"),
        MetricInfo("sampler/effective_arms", "arms", "exp of the entropy of the arms' shares"),
        MetricInfo("sampler/<arm>/success", "share", "estimated success of an arm"),
        MetricInfo("sampler/<arm>/share", "share", "its share of the groups"),
        MetricInfo("sampler/stage", "stage", "stage of the curriculum, from 0 (staged)"),
        MetricInfo("sampler/stage_success", "share", "success of the last groups of this stage"),
        MetricInfo("sampler/left/<calls>", "calls", "calls left to the policy in a task with this many (`rollout.start`)"),
        MetricInfo("sampler/<env>/<key>", "value", "with several environments: the same for each sampler"),
    ),
    "Time": (
        MetricInfo("time/rollout_s", "s", "waiting for the groups of the update"),
        MetricInfo("time/batch_s", "s", "making the batch"),
        MetricInfo("time/update_s", "s", "advantages and updates of all roles"),
        MetricInfo("time/publish_s", "s", "publishing the weights to the engine"),
        MetricInfo("time/data_s", "s", "a step on data", ("data",)),
        MetricInfo("time/eval_s", "s", "the evaluation", ("gate", "before", "eval", "after")),
        MetricInfo("time/episode_s", "s", "an episode from its setup to its end, without scoring, mean", _PLAYED),
        MetricInfo("time/episode_max_s", "s", "the longest one", _PLAYED),
        MetricInfo("time/episode_engine_s", "s", "of an episode, waiting for the engine, mean", _PLAYED),
        MetricInfo("time/episode_env_s", "s", "of an episode, waiting for the environment and its tools, mean", _PLAYED),
    ),
    "Runs on data (docs/offline.md)": (
        MetricInfo("epoch", "passes", "passes over the data so far", ("data",)),
        MetricInfo("examples", "examples", "held-out examples that were measured", ("heldout",)),
        MetricInfo("accuracy", "share", "pairs whose chosen episode has the higher reward", _DATA),
        MetricInfo("reward_chosen", "reward", "score of the chosen episodes; with \"dpo\" beta (log pi - log ref)", _DATA),
        MetricInfo("reward_rejected", "reward", "the same for the rejected episodes", _DATA),
        MetricInfo("reward_margin", "reward", "`reward_chosen` - `reward_rejected`", _DATA),
    ),
}  # fmt: skip


def metrics_table() -> Iterator[tuple[str, MetricInfo]]:
    """Yield every entry with the title of its section."""
    for title, entries in TABLE.items():
        for entry in entries:
            yield title, entry


@cache
def info_of(key: str) -> MetricInfo | None:
    """Find the entry of a row's key, by name, else by the first matching pattern; None for unknown keys, as of plug-ins.
    `env/NAME/KEY` has the entry of KEY if that is `per_env`; `n/KEY` has the phases of KEY."""
    for _, entry in sorted(metrics_table(), key=lambda found: "<" in found[1].name):  # a name before any pattern
        # Names of environments, arms and ids may contain dots, commas and slashes; a worker's number may not.
        parts = re.split(r"(<\w+>)", entry.name)
        pattern = "".join(r"\d+" if part == "<i>" else ".+" if part.startswith("<") else re.escape(part) for part in parts)
        if re.fullmatch(pattern, key):
            if not key.startswith("n/") or (of := info_of(key.removeprefix("n/"))) is None:
                return entry
            return replace(entry, phases=of.phases)
    if found := re.fullmatch(r"env/[^/]+/(.+)", key):
        entry_of = info_of(found[1])
        return entry_of if entry_of is not None and entry_of.per_env else None
    return None


def as_markdown() -> str:
    parts = [_INTRODUCTION, *(f"| `{phase}` | {meaning} |\n" for phase, meaning in PHASES.items())]
    for title, entries in TABLE.items():
        parts.append(f"\n## {title}\n\n| name | unit | meaning | rows |\n|---|---|---|---|\n")
        for entry in entries:
            rows = "all but `sft`" if entry.phases == _PLAYED else ", ".join(f"`{phase}`" for phase in entry.phases)
            meaning = entry.meaning.replace("|", "\\|") + (" [E]" if entry.per_env else "")
            parts.append(f"| `{entry.name}` | {entry.unit} | {meaning} | {rows} |\n")
    return "".join(parts)


_INTRODUCTION = """# Metrics

<!-- Made by `agentrl metrics --markdown`; edit agentrl/run/metrics.py. -->

The rows of a run's `metrics.jsonl`, as the trackers and the viewer have them too. `agentrl metrics` shows this table,
`agentrl metrics entropy kl` its entries with these words.

A row is one JSON object: `step` (updates done; in the warm start: supervised steps), `phase`, and numbers. An unknown value is
null, never 0: a mean over no episode, a rate without calls, a number that is not finite. A mean is over the scored episodes; if
it is over others, `n/KEY` has their number. With several environments, the numbers marked [E] exist for all episodes together
and, as `env/NAME/KEY`, for each environment. Losses, samplers and engines of plug-ins add further names.

| phase | a row of |
|---|---|
"""
