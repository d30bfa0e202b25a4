import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from grids.errors import UserError
from workers.problems import (
    Problem,
    batch_indices,
    check_disjoint,
    load_problems,
    render_prompt,
)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


def write_jsonl(file: Path, *rows: object) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_parquet(file: Path, *rows: dict) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    return file


def message_of(file: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_problems(file)
    message = str(caught.value)
    assert str(file) in message
    assert "\n" not in message
    return message


def character_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per printable character; ``^`` is the BOS, which encoding a text puts first."""
    vocabulary = {chr(code): code - 32 for code in range(32, 127)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = Split("", behavior="isolated")
    tokenizer.post_processor = TemplateProcessing(single="^ $A", special_tokens=[("^", vocabulary["^"])])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="^", unk_token="?")
    wrapped.chat_template = chat_template
    return wrapped


def rendered(problem: Problem, template: str, system: str | None, chat_template: str | None) -> str:
    tokens = render_prompt(problem, template, system, character_tokenizer(chat_template))
    assert all(type(token) is int for token in tokens)
    return "".join(chr(token + 32) for token in tokens)


class TestLoading:
    def test_a_jsonl_line_with_prompt_and_answer_becomes_a_problem_with_its_line_number(
        self, tmp_path: Path
    ) -> None:
        file = tmp_path / "set.jsonl"
        file.write_text(
            '{"prompt": "1+1", "answer": "2"}\n\n{"prompt": "2+2", "answer": " 4 ", "source": "x"}\n'
        )
        assert load_problems(file).problems == (Problem("1+1", "2", row=1), Problem("2+2", "4", row=3))

    def test_a_parquet_file_holds_the_same_set_as_the_jsonl_file(self, tmp_path: Path) -> None:
        rows = [{"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": "4"}]
        jsonl = load_problems(write_jsonl(tmp_path / "a.jsonl", *rows))
        parquet = load_problems(write_parquet(tmp_path / "b.parquet", *rows))
        assert parquet.problems == jsonl.problems
        assert parquet.fingerprint == jsonl.fingerprint

    @pytest.mark.parametrize("kind", ["jsonl", "parquet"])
    def test_verls_layout_is_read(self, tmp_path: Path, kind: str) -> None:
        row = {
            "data_source": "gsm8k",
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}],
            "answer": "The sum is 2.",
            "reward_model": {"style": "rule", "ground_truth": "2"},
        }
        write = write_jsonl if kind == "jsonl" else write_parquet
        (problem,) = load_problems(write(tmp_path / f"set.{kind}", row)).problems
        assert problem.answer == "2"
        assert problem.prompt == (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1+1"},
        )

    @pytest.mark.parametrize(("value", "answer"), [(7, "7"), (-3, "-3"), (0, "0"), (0.5, "0.5")])
    def test_a_number_as_answer_becomes_a_string(self, tmp_path: Path, value: float, answer: str) -> None:
        assert load_problems(write_jsonl(tmp_path / "s.jsonl", {"prompt": "p", "answer": value})).problems[
            0
        ].answer == (answer)

    def test_a_problem_may_occur_twice_in_one_set(self, tmp_path: Path) -> None:
        row = {"prompt": "1+1", "answer": "2"}
        assert len(load_problems(write_jsonl(tmp_path / "s.jsonl", row, row))) == 2

    def test_the_fingerprint_follows_the_contents_and_not_the_path(self, tmp_path: Path) -> None:
        rows = [{"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": "4"}]
        here = load_problems(write_jsonl(tmp_path / "a.jsonl", *rows))
        there = load_problems(write_jsonl(tmp_path / "b.jsonl", *rows))
        reordered = load_problems(write_jsonl(tmp_path / "c.jsonl", *reversed(rows)))
        assert here.fingerprint == there.fingerprint != reordered.fingerprint
        assert len(here.fingerprint) == 64


class TestLoadingErrors:
    def test_a_missing_file(self, tmp_path: Path) -> None:
        assert "no such problem file" in message_of(tmp_path / "absent.jsonl")

    def test_an_unknown_kind_of_file(self, tmp_path: Path) -> None:
        (tmp_path / "set.csv").write_text("prompt,answer\n")
        assert "'.csv'" in message_of(tmp_path / "set.csv")

    def test_an_empty_set(self, tmp_path: Path) -> None:
        assert "empty" in message_of(write_jsonl(tmp_path / "s.jsonl"))
        schema = pyarrow.schema([("prompt", pyarrow.string()), ("answer", pyarrow.string())])
        pyarrow.parquet.write_table(schema.empty_table(), tmp_path / "s.parquet")
        assert "empty" in message_of(tmp_path / "s.parquet")

    @pytest.mark.parametrize("line", [b'{"prompt": ', b'{"prompt": "\xff", "answer": "1"}', b"[1, 2]", b"3"])
    def test_an_unreadable_line_is_named(self, tmp_path: Path, line: bytes) -> None:
        file = tmp_path / "s.jsonl"
        file.write_bytes(b'{"prompt": "1+1", "answer": "2"}\n' + line + b"\n")
        assert "line 2: not a JSON object" in message_of(file)

    def test_an_unreadable_parquet_file(self, tmp_path: Path) -> None:
        (tmp_path / "s.parquet").write_bytes(b"PAR1 but not really")
        assert "not a readable Parquet file" in message_of(tmp_path / "s.parquet")

    def test_a_missing_column_is_named_with_those_present(self, tmp_path: Path) -> None:
        message = message_of(write_jsonl(tmp_path / "s.jsonl", {"question": "1+1", "answer": "2"}))
        assert "line 1: no column prompt; columns present: question, answer" in message
        message = message_of(write_parquet(tmp_path / "s.parquet", {"prompt": "1+1", "gold": "2"}))
        assert "row 1: no column answer" in message
        assert "columns present: prompt, gold" in message

    @pytest.mark.parametrize("answer", ["", "  ", None, float("nan"), True, ["2"]])
    def test_an_answer_that_is_none(self, tmp_path: Path, answer: object) -> None:
        good = {"prompt": "1+1", "answer": "2"}
        message = message_of(write_jsonl(tmp_path / "s.jsonl", good, {"prompt": "2+2", "answer": answer}))
        assert "line 2: answer is" in message

    def test_an_empty_ground_truth(self, tmp_path: Path) -> None:
        row = {"prompt": [{"role": "user", "content": "1+1"}], "reward_model": {"ground_truth": ""}}
        assert "row 1: reward_model.ground_truth is empty" in message_of(
            write_parquet(tmp_path / "s.parquet", row)
        )

    @pytest.mark.parametrize(
        "prompt",
        ["", " \n", None, 3, [], [{"role": "system", "content": "x"}], [{"content": "x"}], ["x"]],
    )
    def test_a_prompt_that_is_none(self, tmp_path: Path, prompt: object) -> None:
        message = message_of(write_jsonl(tmp_path / "s.jsonl", {"prompt": prompt, "answer": "2"}))
        assert "line 1: prompt" in message


class TestDisjointness:
    def test_a_problem_shared_by_both_sets_is_named_with_both_rows(self, tmp_path: Path) -> None:
        train = load_problems(
            write_jsonl(
                tmp_path / "train.jsonl", {"prompt": "1+1", "answer": 2}, {"prompt": "2+2", "answer": 4}
            )
        )
        chat = [{"role": "user", "content": "2+2\n"}]
        validation = load_problems(
            write_jsonl(tmp_path / "val.jsonl", *({"prompt": p, "answer": 4} for p in ("1+3", "0+4", chat)))
        )
        with pytest.raises(UserError) as caught:
            check_disjoint(train, validation)
        assert f"{validation.path}: row 3" in str(caught.value)
        assert f"row 2 of {train.path}" in str(caught.value)

    def test_different_problems_with_one_answer_pass(self, tmp_path: Path) -> None:
        train = load_problems(write_jsonl(tmp_path / "train.jsonl", {"prompt": "1+3", "answer": 4}))
        validation = load_problems(write_jsonl(tmp_path / "val.jsonl", {"prompt": "2+2", "answer": 4}))
        check_disjoint(train, validation)


class TestPrompts:
    def test_without_a_chat_template_the_texts_are_concatenated_after_one_bos(self) -> None:
        assert rendered(Problem("12+7", "19", 1), "{prompt}=", None, None) == "^12+7="
        assert rendered(Problem("12+7", "19", 1), "{prompt}=", "Add: ", None) == "^Add: 12+7="

    def test_a_template_that_writes_the_bos_itself_gets_no_second_one(self) -> None:
        assert rendered(Problem("12+7", "19", 1), "^{prompt}=", None, None) == "^12+7="

    def test_braces_of_latex_stay_as_they_are(self) -> None:
        problem = Problem(r"\frac{1}{x} {0}", "1", 1)
        assert rendered(problem, r"{prompt} Use \boxed{}.", None, None) == r"^\frac{1}{x} {0} Use \boxed{}."

    def test_a_chat_template_formats_the_messages_and_opens_the_answer(self) -> None:
        problem = Problem("1+1", "2", 1)
        assert rendered(problem, "{prompt}=", "Add.", CHAT_TEMPLATE) == "^<s>Add.<u>1+1=<a>"
        assert rendered(problem, "{prompt}=", None, CHAT_TEMPLATE) == "^<u>1+1=<a>"

    def test_a_chat_keeps_its_own_system_prompt_and_wraps_the_last_user_message(self) -> None:
        roles = [("system", "Own."), ("user", "1+1"), ("assistant", "2"), ("user", "2+2")]
        problem = Problem(tuple({"role": role, "content": text} for role, text in roles), "4", 1)
        assert rendered(problem, "[{prompt}]", "Add.", CHAT_TEMPLATE) == "^<s>Own.<u>1+1<a>2<u>[2+2]<a>"
        assert problem.messages[-1]["content"] == "2+2"


class TestBatches:
    @pytest.mark.parametrize(("problems_per_batch", "set_size"), [(4, 12), (5, 12), (30, 12), (1, 7)])
    def test_every_epoch_holds_every_problem_once(self, problems_per_batch: int, set_size: int) -> None:
        epochs = 5
        steps = -(-epochs * set_size // problems_per_batch)
        stream = np.concatenate(
            [batch_indices(3, step, problems_per_batch, set_size) for step in range(1, steps + 1)]
        )
        for epoch in range(epochs):
            assert sorted(stream[epoch * set_size : (epoch + 1) * set_size]) == list(range(set_size))

    def test_cells_of_one_seed_see_one_order_whatever_their_batch(self) -> None:
        small = np.concatenate([batch_indices(1, step, 4, 10) for step in range(1, 13)])
        large = np.concatenate([batch_indices(1, step, 16, 10) for step in range(1, 4)])
        assert small.tolist() == large.tolist()

    def test_a_batch_larger_than_the_set_repeats_problems(self) -> None:
        counts = Counter(batch_indices(0, 1, 25, 10).tolist())
        assert len(counts) == 10
        assert set(counts.values()) == {2, 3}

    def test_seeds_and_epochs_have_orders_of_their_own(self) -> None:
        orders = {
            tuple(batch_indices(seed, step, 50, 50).tolist()) for seed in range(4) for step in range(1, 5)
        }
        assert len(orders) == 16

    def test_the_order_is_frozen(self) -> None:
        """A finished run replays only while these hold: they may never change."""
        first, second = batch_indices(0, 1, 10, 10), batch_indices(0, 2, 10, 10)
        assert first.dtype == np.int64
        assert first.tolist() == [0, 8, 9, 3, 7, 5, 1, 2, 6, 4]
        assert second.tolist() == [3, 7, 4, 2, 9, 8, 1, 6, 5, 0]

    @pytest.mark.parametrize("arguments", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)])
    def test_steps_batches_and_sets_start_at_one(self, arguments: tuple[int, int, int, int]) -> None:
        with pytest.raises(ValueError, match="start at 1"):
            batch_indices(*arguments)
