"""TRL's side of ``benchmarks.against_trl``: the cells of a grid, one after the other, by TRL's ``GRPOTrainer`` in one warm process.

Runs in TRL's own environment, so it imports nothing of this project:

    python -P benchmarks/trl_side.py SETTINGS.json RESULT.json

Each cell starts from the base model with a fresh optimiser. Timed is each cell's training from its first step's begin to its last
step's end; imports, loading and a few steps on a throw-away model come before and are the start-up.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

WARM_UP_STEPS = 3
"""On a model that is thrown away, with the sizes that are measured."""
SEQUENCE_TOKENS = 32
"""More than a prompt and a response of the quickstart have; a power of two."""


@dataclass
class Timer(TrainerCallback):
    """When training began and when its last step so far ended, on the monotonic clock."""

    began: float = 0.0
    ended: float = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Start the clock."""
        self.began = time.monotonic()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Note the time."""
        self.ended = time.monotonic()


@dataclass
class ExactMatch:
    """The reward: 1 for a response that is the gold answer, else 0. Counts what it sees."""

    rollouts_per_problem: int
    rollouts: int = 0
    right: float = 0.0
    tokens: int = 0
    groups: int = 0
    flat_groups: int = 0
    __name__: str = field(default="exact_match", init=False)

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: object
    ) -> list[float]:
        """Rewards of a batch, whose groups stand side by side."""
        rewards = [
            float(text.strip() == gold.strip()) for text, gold in zip(completions, answer, strict=True)
        ]
        n = self.rollouts_per_problem
        sums = [sum(rewards[start : start + n]) for start in range(0, len(rewards), n)]
        self.rollouts += len(rewards)
        self.right += sum(sums)
        self.tokens += sum(map(len, completion_ids))
        self.groups += len(sums)
        self.flat_groups += sum(total in (0, n) for total in sums)
        return rewards


def config(settings: dict[str, Any], seed: int, steps: int, folder: Path) -> GRPOConfig:
    """The grid's loss and optimiser in TRL's words; nothing is logged, saved or evaluated."""
    batch = settings["problems_per_batch"] * settings["rollouts_per_problem"]
    return GRPOConfig(
        output_dir=str(folder),
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=batch // settings["micro_batches"],
        gradient_accumulation_steps=settings["micro_batches"],
        num_generations=settings["rollouts_per_problem"],
        max_completion_length=settings["max_tokens"],
        temperature=settings["temperature"],
        use_transformers_continuous_batching=settings["generation"] == "continuous",
        # Left to itself its cache takes most of the machine's memory.
        transformers_continuous_batching_config={
            "page_size": SEQUENCE_TOKENS,
            "num_blocks": batch,
            "max_batch_tokens": batch,
            "max_requests_per_batch": batch,
        },
        use_vllm=settings["generation"] == "vllm",
        vllm_mode="colocate",  # the server takes weights by NCCL only
        vllm_max_model_length=SEQUENCE_TOKENS,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=settings["tis_cap"],
        ddp_find_unused_parameters=False,  # vLLM's process group makes accelerate wrap the model
        beta=settings["kl_coefficient"],
        use_bias_correction_kl=False,
        loss_type="dapo",  # a mean over the batch's tokens, as the grid's
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=settings["warmup_steps"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["max_gradient_norm"],
        use_cpu=True,
        bf16=False,  # the grid's float32; TRL's default is bfloat16
        gradient_checkpointing=False,  # TRL's default would compute every forward pass twice
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def train(settings: dict[str, Any], seed: int, steps: int, reward: ExactMatch, folder: Path) -> Timer:
    """Train one cell from the base model."""
    lines = Path(settings["train"]).read_text(encoding="utf-8").splitlines()
    problems = [json.loads(line) for line in lines]
    timer = Timer()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        reward_funcs=reward,
        args=config(settings, seed, steps, folder),
        train_dataset=Dataset.from_list(
            [
                {
                    "prompt": settings["prompt_template"].replace("{prompt}", problem["prompt"]),
                    "answer": problem["answer"],
                }
                for problem in problems
            ]
        ),
        callbacks=[timer],
    )
    trainer.train()
    return timer


def main() -> None:
    """Train the cells and write what was measured."""
    settings_path, result_path = map(Path, sys.argv[1:])
    settings = json.loads(settings_path.read_text())
    torch.set_num_threads(settings["threads"])
    n = settings["rollouts_per_problem"]
    folder = result_path.parent / "trainer"
    train(settings, 0, WARM_UP_STEPS, ExactMatch(n), folder)
    start_up = time.time() - settings["started_at"]
    reward = ExactMatch(n)
    timers = [train(settings, seed, settings["steps"], reward, folder) for seed in settings["seeds"]]
    seconds = sum(timer.ended - timer.began for timer in timers)
    result = {
        "seconds": seconds,
        "rollouts": reward.rollouts,
        "start_up_seconds": start_up,
        "train_reward": reward.right / reward.rollouts,
        "response_tokens": reward.tokens / reward.rollouts,
        "zero_variance": reward.flat_groups / reward.groups,
        "version": trl.__version__,
    }
    result_path.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
