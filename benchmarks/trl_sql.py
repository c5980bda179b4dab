"""Train the SQL run of docs/results.md in TRL: same start, tasks, episodes and rewards, one update per 32 episodes.

    python benchmarks/trl_sql.py RUN OUT [--steps 20] [--bf16] [--threads 2] [--micro 8] [--continuous]

RUN is an agentrl run of configs/results/sql_135m.toml that started from a supervised model (model.path); its tasks are used
again, in order. OUT gets `metrics.jsonl` (per update: seconds, sampled tokens, mean reward) and the model in `final/`, for
`agentrl eval`. Run it with the interpreter that `.ci/integrations.py trl` prints.

In TRL, a tool cannot end an episode. TRL's loop ends when a tool's result exceeds the episode's tokens, and drops that
result; so `submit` returns a long text, and no turn is sampled after the last call, as in agentrl.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

import agentrl
from agentrl.data.trajectory import Message, Task, ToolCall
from agentrl.render.chatml import CHATML_TEMPLATE

END = "over " * 1000


class SqlEpisode:
    """An episode of agentrl's environment, as TRL drives one: `reset`, tools as methods, `get_reward`."""

    params: dict[str, Any]

    def __init__(self) -> None:
        self._env = agentrl.make("sql", **self.params).unwrapped
        self._reward = 0.0

    def reset(self, task: str, **_: Any) -> None:
        self._reward = 0.0
        self._env.reset(options={"task": Task(**json.loads(task))})

    def get_reward(self) -> float:
        return self._reward

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        messages, reward, ended, cut, _ = self._env.step(Message("assistant", tool_calls=(ToolCall(name, arguments),)))
        self._reward += float(reward)
        return END if ended or cut else messages[-1].content

    def tables(self) -> str:
        """The tables of the database, as CREATE statements."""
        return self._call("tables", {})

    def query(self, sql: str) -> str:
        """Run one SELECT statement (SQLite) and see its result.

        Args:
            sql: the statement
        """
        return self._call("query", {"sql": sql})

    def submit(self, sql: str) -> str:
        """Submit the final query; this ends the task. A query that fails is not taken.

        Args:
            sql: one SELECT statement with the asked columns in the asked order
        """
        return self._call("submit", {"sql": sql})


class Updates(TrainerCallback):  # type: ignore[misc]
    """Writes a line per update."""

    trainer: Counted

    def __init__(self, path: Path) -> None:
        self.file, self.began = path.open("w"), (0.0, 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        row = {
            "step": state.global_step,
            "seconds": round(time.perf_counter() - self.began[0], 3),
            "cpu_seconds": round(time.process_time() - self.began[1], 3),
            **self.trainer.seen,
        }
        print(row, flush=True)
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()


class Counted(GRPOTrainer):  # type: ignore[misc]
    """Counts sampled tokens and the seconds of generation."""

    seen: dict[str, float]

    def _generate(self, prompts: Any) -> Any:
        began = time.perf_counter()
        output = super()._generate(prompts)
        rewards = [episode.get_reward() for episode in self.environments]
        self.seen = {
            "rollout_seconds": round(time.perf_counter() - began, 3),
            "sampled_tokens": sum(map(sum, output[2])),
            "episodes": len(rewards),
            "reward": sum(rewards) / len(rewards),
        }
        return output


def tasks_of(run: Path, groups: int) -> list[dict[str, Any]]:
    """Return the first tasks that a run trained on, in the order of its updates, one per group."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(run.glob("trajectories/*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row.get("split", row["task"]["split"]) == "train":
                found.setdefault(row["task"]["id"], row["task"])
    if len(found) < groups:
        raise SystemExit(f"{run}: {len(found)} training tasks, {groups} needed")
    return list(found.values())[:groups]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro", type=int, default=8, help="rows per forward pass")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast (default: float32)")
    parser.add_argument("--continuous", action="store_true", help="transformers' continuous batching")
    options = parser.parse_args()
    config = tomllib.loads((options.run / "config.toml").read_text())
    rollout, optim = config["rollout"], config["optim"]
    rows = rollout["groups"] * rollout["group_size"]
    SqlEpisode.params = config["env"]["params"]
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True)

    env: Any = agentrl.make("sql", **SqlEpisode.params).unwrapped
    data = []
    for task in tasks_of(options.run, options.steps * rollout["groups"]):
        messages = env.prompt(Task(**task))
        prompt = [{"role": message.role, "content": message.content} for message in messages]
        data.append({"prompt": prompt, "task": json.dumps(task)})

    model = config["model"]["path"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    # TRL sorts the tools by name; the supervised model was trained with the order of the environment.
    listing = "{% for tool in tools %} {{ signature(tool) }}{% endfor %}"
    tokenizer.chat_template = CHATML_TEMPLATE.replace(listing, " tables() query(sql) submit(sql)")
    tokenizer.response_template = qwen3_template
    updates = Updates(options.out / "metrics.jsonl")
    trainer = Counted(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=tokenizer,
        environment_factory=SqlEpisode,
        train_dataset=Dataset.from_list(data),
        callbacks=[updates],
        args=GRPOConfig(
            output_dir=str(options.out / "trl"),
            use_cpu=True,
            bf16=options.bf16,
            seed=config["seed"],
            max_steps=options.steps,
            per_device_train_batch_size=options.micro,
            gradient_accumulation_steps=rows // options.micro,
            num_generations=rollout["group_size"],
            shuffle_dataset=False,
            temperature=rollout["temperature"],
            max_completion_length=rollout["max_episode_tokens"],
            generation_kwargs={"max_new_tokens": rollout["max_turn_tokens"]},
            max_tool_calling_iterations=rollout["max_turns"] - 1,
            beta=config["algorithm"]["kl"]["coef"],
            loss_type="dapo",  # the mean over the tokens of an update
            scale_rewards="group",
            epsilon=0.2,
            learning_rate=optim["lr"],
            lr_scheduler_type="constant",
            adam_beta2=optim["betas"][1],
            weight_decay=optim["weight_decay"],
            max_grad_norm=optim["max_grad_norm"],
            gradient_checkpointing=False,
            use_transformers_continuous_batching=options.continuous,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    updates.trainer = trainer
    trainer.train()
    trainer.save_model(str(options.out / "final"))


if __name__ == "__main__":
    main()
