"""Measure seconds of GRPO steps in TRL 1.16.0: 8 prompts x 8 generations, two tool turns, 3 x 42 forced new tokens.

    python peer_trl.py template            prints its training chat template for Qwen3
    python peer_trl.py MODEL PROMPTS STEPS BATCH   measures; BATCH rows per forward pass, 64 rows per optimizer step

Run by train.py with the interpreter of .integrations/trl. Every turn is parsed as usual and then replaced by a tool call,
since a random model makes none.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS, TOKENS = 64, 42


def template() -> str:
    from trl.chat_template_utils import qwen3_training_chat_template

    return str(qwen3_training_chat_template)


def get(key: str) -> str:
    """
    value of a key

    Args:
        key: a key
    """
    return "17"


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(number % 2) for number in range(len(completions))]


def measure(model: str, prompts: str, steps: int, batch: int) -> dict[str, object]:
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_chat_template
    from trl.trainer import grpo_trainer

    torch.set_num_threads(1)
    parse = grpo_trainer.parse_response

    def forced(*args: Any, **kwargs: Any) -> dict[str, Any]:
        with contextlib.suppress(ValueError):  # the output of a random model is rarely parsable
            parse(*args, **kwargs)
        call = {"type": "function", "function": {"name": "get", "arguments": {"key": "a"}}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    grpo_trainer.parse_response = forced
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = qwen3_chat_template
    clock: list[tuple[float, float]] = []
    seen: list[int] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.append((time.perf_counter(), time.process_time()))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.append((time.perf_counter(), time.process_time()))

    class Counted(GRPOTrainer):
        generating = 0.0

        def _generate(self, prompts: Any) -> Any:
            start = time.perf_counter()
            output = super()._generate(prompts)
            Counted.generating += time.perf_counter() - start
            prompt_ids, completion_ids, tool_mask = output[:3]
            assert all(sum(mask) == 3 * TOKENS for mask in tool_mask), [sum(mask) for mask in tool_mask]
            seen.append(sum(map(len, prompt_ids)) + sum(map(len, completion_ids)))
            return output

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            use_cpu=True,
            bf16=False,
            beta=0.0,
            learning_rate=1e-3,
            max_steps=steps,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=ROWS // batch,
            num_generations=8,
            max_completion_length=400,
            max_tool_calling_iterations=2,
            temperature=1.0,
            generation_kwargs={"min_new_tokens": TOKENS, "max_new_tokens": TOKENS},
            report_to=[],
            save_strategy="no",
            logging_steps=1000,
            disable_tqdm=True,
            gradient_checkpointing=False,
        )
        rows = json.loads(Path(prompts).read_text())
        data = Dataset.from_list([{"prompt": row} for row in rows])
        trainer = Counted(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=reward,
            args=config,
            train_dataset=data,
            tools=[get],
            callbacks=[Clock()],
        )
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    steps_clock = list(zip(clock[::2], clock[1::2], strict=True))
    spans = [end[0] - begin[0] for begin, end in steps_clock]
    cpu = [end[1] - begin[1] for begin, end in steps_clock]
    return {
        "version": trl.__version__,
        "seconds": spans[1:],
        "cpu_seconds": cpu[1:],
        "tokens": seen[-1],
        "rows": ROWS,
        "generating": Counted.generating / steps,
        "prompt": rows and len(trainer._tokenize_prompts([rows[0]])[0][0]),
    }


if __name__ == "__main__":
    if sys.argv[1] == "template":
        print(json.dumps({"template": template()}))
    else:
        print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
