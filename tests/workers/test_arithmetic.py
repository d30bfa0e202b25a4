"""Additions, their tokenizer, and the supervised learning of the base model."""

import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from workers.arithmetic import character_tokenizer, distinct_additions, random_addition
from workers.pretraining import answer_losses, mean_answer_probability, supervised_batch, train_base_model


def trained(seed: int, most_steps: int) -> Qwen2ForCausalLM:
    return train_base_model(
        seed=seed,
        target_skill=0.9,
        most_steps=most_steps,
        batch=8,
        learning_rate=1e-3,
        digits=(2, 5),
        report=lambda line: None,
    )


def trained_bytes(seed: int, folder: Path) -> bytes:
    trained(seed, most_steps=3).save_pretrained(folder)
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "text", ["123+4567=", " 1 + 2 = 3 ", "\\boxed{45}\n", "--", "  ", "naïve café ≠ 42", "don't 'stop"]
)
def test_the_saved_tokenizer_returns_every_text_unchanged(text: str, tmp_path: Path) -> None:
    character_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) == len(text.encode())


def test_the_tokenizer_adds_no_special_token_and_tells_padding_from_the_end() -> None:
    tokenizer = character_tokenizer()
    assert tokenizer.encode("7") == tokenizer.encode("7", add_special_tokens=False)
    assert len(tokenizer.encode("77")) == 2
    assert tokenizer.bos_token is None
    assert {tokenizer.pad_token_id, tokenizer.eos_token_id} == {0, 1}
    assert (
        tokenizer.decode([*tokenizer.encode("15"), tokenizer.eos_token_id], skip_special_tokens=True) == "15"
    )


def test_operands_have_every_asked_number_of_digits_and_no_other() -> None:
    generator = random.Random(5)
    additions = [random_addition(generator, (2, 5)) for _ in range(400)]
    assert {(len(str(first)), len(str(second))) for first, second in additions} == {
        (i, j) for i in range(2, 6) for j in range(2, 6)
    }


def test_distinct_additions_repeat_no_pair_in_any_order() -> None:
    # One-digit operands (1 to 9): 9 * 10 / 2 = 45 pairs in all, so 45 draws must be all of them.
    additions = list(islice(distinct_additions(random.Random(0), (1, 1)), 45))
    assert {tuple(sorted(addition)) for addition in additions} == {
        (i, j) for i in range(1, 10) for j in range(i, 10)
    }


def test_a_batch_asks_for_the_sum_and_the_end_token_only() -> None:
    inputs, targets = supervised_batch(random.Random(3), 32, (2, 5))
    tokenizer = character_tokenizer()
    assert inputs.shape == targets.shape
    for given, wanted in zip(inputs, targets, strict=True):
        scored = wanted != -100
        assert wanted[scored][-1] == tokenizer.eos_token_id
        text = tokenizer.decode(given[given > tokenizer.eos_token_id])
        problem, answer = text.split("=")
        first, second = problem.split("+")
        assert answer == str(int(first) + int(second)) == tokenizer.decode(wanted[scored][:-1])
        # Each target is the token after its input; the equals sign is the first input that is scored.
        assert tokenizer.decode(given[scored][:1]) == "="
        assert given[scored][1:].tolist() == wanted[scored][:-1].tolist()


def test_padding_does_not_change_the_losses() -> None:
    model = trained(0, most_steps=1)
    inputs, targets = supervised_batch(random.Random(3), 6, (2, 5))
    padded = (
        torch.nn.functional.pad(inputs, (0, 5), value=0),
        torch.nn.functional.pad(targets, (0, 5), value=-100),
    )
    with torch.no_grad():
        torch.testing.assert_close(answer_losses(model, *padded), answer_losses(model, inputs, targets))


def test_skill_is_the_mean_probability_of_the_whole_answer() -> None:
    model = trained(0, most_steps=1)
    # With a head of zeros every token has probability 1/258: an answer of 1 digit and its end token has 258^-2.
    torch.nn.init.zeros_(model.lm_head.weight)
    inputs = torch.tensor([[17, 12, 17, 30, 18], [17, 12, 22, 30, 23]])
    targets = torch.tensor([[-100, -100, -100, 18, 1], [-100, -100, -100, 23, 1]])
    assert mean_answer_probability(model, inputs, targets) == pytest.approx(258**-2)
    longer = torch.tensor([[-100, -100, -100, 18, 1], [-100, -100, 17, 23, 1]])
    assert mean_answer_probability(model, inputs, longer) == pytest.approx((258**-2 + 258**-3) / 2)


def test_training_ends_at_the_first_check_that_finds_the_skill() -> None:
    lines: list[str] = []
    train_base_model(
        seed=0,
        target_skill=0.0,
        most_steps=120,
        batch=2,
        learning_rate=1e-3,
        digits=(1, 1),
        report=lines.append,
    )
    assert [line.split(":")[0] for line in lines] == ["supervised step 50"]


def test_training_repeats_bit_for_bit_from_its_seed(tmp_path: Path) -> None:
    first = trained_bytes(0, tmp_path / "first")
    torch.manual_seed(99)
    random.seed(99)
    assert trained_bytes(0, tmp_path / "again") == first
    assert trained_bytes(1, tmp_path / "other") != first


def test_training_leaves_torchs_threads_and_random_state_alone(tmp_path: Path) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    trained_bytes(0, tmp_path)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
