"""Supervised learning of the quickstart's base model: a small Qwen2 decoder that adds, to a partial skill only."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config, Qwen2ForCausalLM

from workers.arithmetic import (
    EOS,
    LONGEST_SEQUENCE,
    PAD,
    PROMPT_TEMPLATE,
    VOCABULARY,
    answer_of,
    prompt_of,
    random_addition,
)

UNSCORED = -100
WARM_UP_STEPS = 100
STEPS_BETWEEN_CHECKS = 50
HELD_OUT_ADDITIONS = 512


def base_model_config() -> Qwen2Config:
    """Width 96 in 3 layers, 0.41M parameters. Heads of 32: vLLM's attention on CPU takes no smaller ones."""
    return Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=LONGEST_SEQUENCE,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=VOCABULARY[EOS],
        pad_token_id=VOCABULARY[PAD],
        dtype="float32",
    )


def supervised_batch(generator: random.Random, size: int, digits: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Inputs and targets of random additions, both int64 of shape (size, longest - 1), padded on the right.

    Targets are ``UNSCORED`` except on the answer and its end token. Padding needs no attention mask: under causal
    attention no scored position sees what lies to its right.
    """
    sequences, prompt_lengths = [], []
    for _ in range(size):
        addition = random_addition(generator, digits)
        prompt = PROMPT_TEMPLATE.format(prompt=prompt_of(addition))
        sequences.append([*(VOCABULARY[c] for c in prompt + answer_of(addition)), VOCABULARY[EOS]])
        prompt_lengths.append(len(prompt))
    longest = max(map(len, sequences))
    tokens = torch.full((size, longest), VOCABULARY[PAD])
    targets = torch.full((size, longest), UNSCORED)
    for row, (sequence, prompt_length) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        targets[row, prompt_length : len(sequence)] = torch.tensor(sequence[prompt_length:])
    return tokens[:, :-1], targets[:, 1:]


def train_base_model(
    *,
    seed: int,
    target_skill: float,
    most_steps: int,
    batch: int,
    learning_rate: float,
    digits: tuple[int, int],
    report: Callable[[str], None],
) -> Qwen2ForCausalLM:
    """The model at the first check, every 50 AdamW updates, that finds ``target_skill``, or after ``most_steps``.

    Skill is the mean probability of a right answer at temperature 1, over fixed additions drawn apart. Each update takes
    ``batch`` fresh additions, at a rate that is constant after a linear warm-up.

    The same seed gives the same bits on one build of torch and one kind of CPU (whose vector instructions decide in
    which order torch sums); elsewhere it gives other weights of about the same skill.
    """
    generator = random.Random(f"pretraining/{seed}")
    held_out = supervised_batch(random.Random(f"skill/{seed}"), HELD_OUT_ADDITIONS, digits)
    with _one_seeded_thread(seed):
        model = Qwen2ForCausalLM(base_model_config()).float().train()
        optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
        for step in range(1, most_steps + 1):
            for group in optimiser.param_groups:
                group["lr"] = learning_rate * min(step / WARM_UP_STEPS, 1.0)
            loss = answer_losses(model, *supervised_batch(generator, batch, digits))[0].mean()
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            if step % STEPS_BETWEEN_CHECKS == 0:
                skill = mean_answer_probability(model, *held_out)
                report(f"supervised step {step}: loss {loss.item():.3f}, skill {skill:.3f} of {target_skill}")
                if skill >= target_skill:
                    break
    return model.eval()


def answer_losses(model: Qwen2ForCausalLM, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats of each scored token, and the row it stands in; both (scored tokens,).

    ``inputs`` and ``targets`` are as ``supervised_batch`` makes them.
    """
    scored = targets != UNSCORED
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state[scored]
    return cross_entropy(model.lm_head(hidden), targets[scored], reduction="none"), scored.nonzero()[:, 0]


@torch.no_grad()
def mean_answer_probability(model: Qwen2ForCausalLM, inputs: Tensor, targets: Tensor) -> float:
    """Mean probability, over the rows, of sampling the whole answer and its end token at temperature 1."""
    losses, rows = answer_losses(model, inputs, targets)
    return torch.zeros(len(inputs)).index_add(0, rows, losses).neg().exp().mean().item()


@contextmanager
def _one_seeded_thread(seed: int) -> Iterator[None]:
    """Torch with one thread and this seed; its thread count and random state are put back at the end."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
