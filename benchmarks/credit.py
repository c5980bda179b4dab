"""Measure bias and noise of advantage estimators against the exact policy gradient, at equal sampled calls.

    python benchmarks/credit.py [--updates 400] [--policies 10] [--calls 512]

A task asks for a number of right calls within HORIZON turns. Each turn calls one of three tools: one makes progress, one does
not, one loses the task. Only success is rewarded, at the end. The policy is a softmax per state (task, turn, progress), with
random logits, so the value of each state, and with it the gradient of expected success, is exact. Each call counts as one
token.

An update holds groups of 8 members, so many that they cost `--calls` sampled calls on average; `tree` has 4 roots with a branch
each, forked before a random later turn. g = sum of A * grad log pi estimates the exact gradient G. Over the updates:

- bias:   |E[g] / c - G| / |G|, c = <E[g], G> / |G|^2, since the learning rate sets the scale. It includes the noise of a mean
          over few updates; the estimator `exact` (the true advantage of each call) shows how much;
- noise:  sqrt(E|g - E[g]|^2) / |E[g]|, of one update;
- cosine: mean of cos(g, G), of one update: the cost of both together.

Each is the mean over policies, with two standard errors.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from agentrl.contrib.branching.advantage import tree
from agentrl.trainer.algorithms.advantages import gae_turns, gigpo, grpo, rloo, turn_returns
from agentrl.trainer.algorithms.base import AdvantageInput, AdvantageOutput

OUT = Path(__file__).parent / "learning" / "credit.json"
HORIZON, TOOLS, MEMBERS, ROOTS = 6, 3, 8, 4
NEEDED = (2, 3, 4, 5)
"""Number of right calls of each task."""
State = tuple[int, int, int]
"""Task, turn, progress."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Policy:
    """Call probabilities, and exact values, per state."""

    chances: Floats
    values: Floats
    advantages: Floats
    gradient: Floats
    """Gradient of the mean success over tasks by the logits, [tasks, HORIZON, HORIZON, TOOLS]."""


def make_policy(rng: np.random.Generator) -> Policy:
    """Make a policy with normally distributed logits, and compute its values by dynamic programming."""
    shape = (len(NEEDED), HORIZON, HORIZON, TOOLS)
    logits = rng.normal(size=shape)
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    values, after = np.zeros((len(NEEDED), HORIZON + 1, HORIZON + 1)), np.zeros(shape)
    reached = np.zeros_like(values)
    reached[:, 0, 0] = 1 / len(NEEDED)
    for task, needed in enumerate(NEEDED):
        for turn in reversed(range(HORIZON)):
            for done in range(min(turn + 1, needed)):
                right = 1.0 if done + 1 == needed else values[task, turn + 1, done + 1]
                after[task, turn, done] = right, values[task, turn + 1, done], 0.0
                values[task, turn, done] = chances[task, turn, done] @ after[task, turn, done]
        for turn in range(HORIZON):
            for done in range(min(turn + 1, needed)):
                reached[task, turn + 1, done] += reached[task, turn, done] * chances[task, turn, done, 1]
                if done + 1 < needed:
                    reached[task, turn + 1, done + 1] += reached[task, turn, done] * chances[task, turn, done, 0]
    advantages = after - values[:, :HORIZON, :HORIZON, None]
    return Policy(chances, values, advantages, reached[:, :HORIZON, :HORIZON, None] * chances * advantages)


@dataclass
class Episode:
    """Samples of one member, from its first sampled turn on."""

    states: list[State]
    calls: list[int]
    reward: float = 0.0
    member: int = 0
    parent: int = -1


def play(policy: Policy, rng: np.random.Generator, start: State) -> Episode:
    """Play from a state to the end."""
    task, first, done = start
    episode = Episode([], [])
    for turn in range(first, HORIZON):
        call = int(np.searchsorted(policy.chances[task, turn, done].cumsum(), rng.random()))
        episode.states.append((task, turn, done))
        episode.calls.append(min(call, TOOLS - 1))
        done += call == 0
        if done == NEEDED[task] or call >= TOOLS - 1:
            episode.reward = float(done == NEEDED[task])
            break
    return episode


def play_group(policy: Policy, rng: np.random.Generator, branches: bool) -> list[Episode]:
    """Play the members of a group of one random task."""
    start = (int(rng.integers(len(NEEDED))), 0, 0)
    group = [play(policy, rng, start) for _ in range(ROOTS if branches else MEMBERS)]
    for root in group[:ROOTS] if branches else ():
        turn = int(rng.integers(1, max(len(root.states), 2)))
        forked = turn < len(root.states)  # else the root ends at once: the member starts at the task, as in a run
        branch = play(policy, rng, root.states[turn] if forked else start)
        branch.parent = group.index(root) if forked else -1
        group.append(branch)
    for number, episode in enumerate(group):
        episode.member = number
    return group


def batch_of(groups: list[list[Episode]], values: Floats) -> AdvantageInput:
    """Return the columns of a run, with one token per call."""
    rows = [(number, episode) for number, group in enumerate(groups) for episode in group]
    lengths = [len(episode.calls) for _, episode in rows]
    states = [state for _, episode in rows for state in episode.states]
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    rewards = torch.zeros(len(states), dtype=torch.float64)
    reward = torch.tensor([episode.reward for _, episode in rows], dtype=torch.float64)
    rewards[offsets[1:] - 1] = reward
    return AdvantageInput(
        token_rewards=rewards,
        mask=torch.ones(len(states), dtype=torch.bool),
        offsets=offsets,
        group=torch.tensor([number for number, _ in rows]),
        reward=reward,
        values=torch.tensor([values[state] for state in states]),
        turns=torch.tensor([turn for _, turn, _ in states]),
        member=torch.tensor([episode.member for _, episode in rows]),
        anchors=torch.tensor([np.ravel_multi_index(state, values.shape) for state in states]),
        parent=torch.tensor([episode.parent for _, episode in rows]),
        branch_turn=torch.tensor([-1 if e.parent < 0 else e.states[0][1] for _, e in rows]),
    )


def fitted_values(policy: Policy, rng: np.random.Generator, episodes: int) -> Floats:
    """Return the mean success after each state in earlier episodes, like a critic with limited data; 0.5 without data."""
    won, seen = np.zeros_like(policy.values), np.zeros_like(policy.values)
    for _ in range(episodes):
        episode = play(policy, rng, (int(rng.integers(len(NEEDED))), 0, 0))
        for state in episode.states:
            won[state] += episode.reward
            seen[state] += 1
    return np.where(seen > 0, won / np.maximum(seen, 1), 0.5)


Estimate = Callable[[AdvantageInput], AdvantageOutput]
ARMS: dict[str, tuple[Estimate, str]] = {
    "grpo": (grpo, ""),
    "rloo": (rloo, ""),
    "turn_returns": (turn_returns, ""),
    "gigpo": (gigpo, ""),
    "gigpo, gamma 1": (lambda batch: gigpo(batch, gamma=1.0), ""),
    "tree": (tree, "branches"),
    "tree, share 1": (lambda batch: tree(batch, share=1.0), "branches"),
    "gae_turns, critic of 100 episodes": (gae_turns, "100"),
    "gae_turns, critic of 1,000 episodes": (gae_turns, "1000"),
    "gae_turns, exact critic": (gae_turns, "exact"),
    "gae_turns, exact critic, lam 0": (lambda batch: gae_turns(batch, lam=0.0, whitened=False), "exact"),
    "exact": (grpo, "truth"),
}
"""Estimators (default arguments, unless shown) and their input: branches, or the kind of values."""


def measure(policy: Policy, arm: str, rng: np.random.Generator, updates: int, calls: int) -> dict[str, float]:
    """Measure an arm with a policy, over `updates` updates of `calls` calls each."""
    estimate, given = ARMS[arm]
    pilot = [sum(len(e.calls) for e in play_group(policy, rng, given == "branches")) for _ in range(400)]
    groups = max(round(calls / float(np.mean(pilot))), 1)
    found = np.zeros((updates, *policy.gradient.shape))
    for update in range(updates):
        played = [play_group(policy, rng, given == "branches") for _ in range(groups)]
        values = fitted_values(policy, rng, int(given)) if given.isdigit() else policy.values
        batch = batch_of(played, values)
        steps = [step for group in played for e in group for step in zip(e.states, e.calls, strict=True)]
        exact = [policy.advantages[state][call] for state, call in steps]
        advantages = exact if given == "truth" else estimate(batch).advantages.tolist()
        for (state, call), advantage in zip(steps, advantages, strict=True):
            found[update][state] -= advantage * policy.chances[state]
            found[update][state][call] += advantage
    flat, truth = found.reshape(updates, -1), policy.gradient.reshape(-1)
    mean = flat.mean(0)
    scale = mean @ truth / (truth @ truth)
    norms = np.linalg.norm(flat, axis=1) * np.linalg.norm(truth)
    return {
        "bias": float(np.linalg.norm(mean / scale - truth) / np.linalg.norm(truth)),
        "noise": float(np.sqrt(((flat - mean) ** 2).sum(1).mean()) / np.linalg.norm(mean)),
        "cosine": float(np.mean(flat @ truth / np.maximum(norms, 1e-300))),
    }


def main() -> None:
    """Measure every arm with every policy; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--policies", type=int, default=10)
    parser.add_argument("--calls", type=int, default=512)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    print("| estimator | bias | noise | cosine |\n|---|--:|--:|--:|")
    for number, arm in enumerate(ARMS):
        for seed in range(args.policies):
            policy = make_policy(np.random.default_rng(seed))
            found[arm].append(measure(policy, arm, np.random.default_rng([seed, number]), args.updates, args.calls))
        cells = []
        for column in ("bias", "noise", "cosine"):
            values = [row[column] for row in found[arm]]
            cells.append(f"{np.mean(values):.2f} ± {2 * np.std(values, ddof=1) / len(values) ** 0.5:.2f}")
        print(f"| {arm} | {' | '.join(cells)} |", flush=True)
    OUT.write_text(json.dumps({"arguments": vars(args), "found": found}, indent=1) + "\n")
    print(f"figures of each policy: {OUT}")


if __name__ == "__main__":
    main()
