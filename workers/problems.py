"""Problem sets: loading, prompts as token ids, and which problems an update step trains on."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from grids.errors import UserError

Message = dict[str, str]
"""One chat message: ``{"role": ..., "content": ...}``."""


@dataclass(frozen=True)
class Problem:
    """A prompt and its gold answer.

    ``row`` is where the problem stands in its file, from 1: the line of a JSONL file, the row of a Parquet file.
    """

    prompt: str | tuple[Message, ...]
    answer: str
    row: int

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as chat messages; a plain string is one user message."""
        if isinstance(self.prompt, str):
            return ({"role": "user", "content": self.prompt},)
        return self.prompt


@dataclass(frozen=True)
class ProblemSet:
    """The problems of one file, in file order.

    ``fingerprint`` is a SHA-256 of prompts and answers in order; it depends neither on the path nor on the file format.
    """

    path: str
    problems: tuple[Problem, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.problems)


def load_problems(path: str | Path) -> ProblemSet:
    """Read a ``.jsonl`` or ``.parquet`` file of problems.

    A row has ``prompt`` (a string, or a list of chat messages) and its gold answer: ``reward_model.ground_truth`` as in
    verl's layout, else ``answer``. Numbers as answers become strings. The same problem may occur twice in one file.

    Raises:
        UserError: the file is missing, unreadable, empty or of another kind, or a row lacks a prompt or an answer.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{path}: no such problem file; correct the path")
    readers = {".jsonl": ("line", _jsonl_rows), ".parquet": ("row", _parquet_rows)}
    if file.suffix not in readers:
        raise UserError(f"{path}: unknown kind of problem file {file.suffix!r}; use .jsonl or .parquet")
    unit, read = readers[file.suffix]
    problems = tuple(_problem(record, number, f"{path}: {unit} {number}") for number, record in read(file))
    if not problems:
        raise UserError(f"{path}: the problem set is empty; give it at least one problem")
    content = json.dumps([[problem.prompt, problem.answer] for problem in problems], sort_keys=True)
    return ProblemSet(str(path), problems, hashlib.sha256(content.encode()).hexdigest())


def check_disjoint(train: ProblemSet, validation: ProblemSet) -> None:
    """Refuse a problem that stands in both sets: its validation score would measure memory.

    Two problems are the same if their messages are, apart from white space around them; answers do not matter.

    Raises:
        UserError: names file and row of the first shared problem in both sets.
    """
    rows = {_identity(problem): problem.row for problem in reversed(train.problems)}
    for problem in validation.problems:
        train_row = rows.get(_identity(problem))
        if train_row is not None:
            raise UserError(
                f"{validation.path}: row {problem.row} is the same problem as row {train_row} of {train.path}; "
                "remove it from one of the two sets"
            )


def render_prompt(problem: Problem, template: str, system_prompt: str | None, tokenizer: Any) -> list[int]:
    """Token ids of a problem's prompt, ready to be continued by the model.

    ``template`` wraps the last user message: its ``{prompt}`` is replaced as plain text, so LaTeX braces are safe. The
    system prompt goes first unless the messages have one. A tokenizer with a chat template formats the messages and
    opens the assistant's turn; with any other the contents are concatenated. Exactly the special tokens the tokenizer
    asks for are added: never a second BOS.
    """
    messages = [dict(message) for message in problem.messages]
    last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
    messages[last_user]["content"] = template.replace("{prompt}", messages[last_user]["content"])
    if system_prompt is not None and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system_prompt})
    if getattr(tokenizer, "chat_template", None):
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return [int(token) for token in encoded]
    text = "".join(message["content"] for message in messages)
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=not has_bos)]


def batch_indices(seed: int, step: int, problems_per_batch: int, set_size: int) -> np.ndarray:
    """The problems of an update step: int64 indices into the set, shape (problems_per_batch,).

    All problems are passed in a fresh order each epoch, the order drawn from (seed, epoch) alone; step ``step`` (from 1)
    takes positions [(step - 1) * B_p, step * B_p) of the endless sequence of epochs. So cells of one seed see the same
    order whatever their B_p, and nothing needs to be saved to resume. A batch over an epoch's edge, or larger than the
    set, can hold a problem twice.
    """
    if step < 1 or problems_per_batch < 1 or set_size < 1:
        raise ValueError(
            f"step {step}, problems_per_batch {problems_per_batch} and set_size {set_size} start at 1"
        )
    start, stop = (step - 1) * problems_per_batch, step * problems_per_batch
    first_epoch, last_epoch = start // set_size, (stop - 1) // set_size
    orders = [_epoch_order(seed, epoch, set_size) for epoch in range(first_epoch, last_epoch + 1)]
    offset = first_epoch * set_size
    return np.concatenate(orders)[start - offset : stop - offset]


def _epoch_order(seed: int, epoch: int, set_size: int) -> np.ndarray:
    # Sorting raw Philox draws: NumPy guarantees this stream for ever, which it does not for Generator.permutation.
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(set_size)
    return np.argsort(keys, kind="stable").astype(np.int64)


def _identity(problem: Problem) -> tuple[tuple[str, str], ...]:
    return tuple((message["role"], message["content"].strip()) for message in problem.messages)


def _jsonl_rows(file: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except ValueError as error:  # covers invalid JSON and invalid UTF-8
            raise UserError(
                f"{file}: line {number}: not a JSON object ({error}); correct the line"
            ) from error


def _parquet_rows(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        records = pyarrow.parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{file}: not a readable Parquet file ({reason}); write it again") from error
    yield from enumerate(records, start=1)


def _problem(record: Any, row: int, where: str) -> Problem:
    if not isinstance(record, Mapping):
        raise UserError(f"{where}: not a JSON object; write one object with prompt and answer per line")
    return Problem(prompt=_prompt(record, where), answer=_answer(record, where), row=row)


def _prompt(record: Mapping[str, Any], where: str) -> str | tuple[Message, ...]:
    if "prompt" not in record:
        raise _missing_column("prompt", record, where)
    value = record["prompt"]
    if isinstance(value, str):
        if not value.strip():
            raise UserError(f"{where}: prompt is empty; give it a text")
        return value
    if not isinstance(value, list):
        raise UserError(
            f"{where}: prompt is {type(value).__name__}; give a string or a list of chat messages"
        )
    messages = []
    for message in value:
        role, content = (
            (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        )
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(
                f"{where}: prompt holds a chat message without role or content; give it both as strings"
            )
        messages.append({"role": role, "content": content})
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise UserError(f"{where}: prompt has no user message with a text; give it one")
    return tuple(messages)


def _answer(record: Mapping[str, Any], where: str) -> str:
    reward_model = record.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        column, value = "reward_model.ground_truth", reward_model["ground_truth"]
    elif "answer" in record:
        column, value = "answer", record["answer"]
    else:
        raise _missing_column("answer (or reward_model.ground_truth)", record, where)
    if isinstance(value, str):
        answer = value.strip()
    elif value is None or (isinstance(value, float) and math.isnan(value)):
        answer = ""
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        answer = str(value)
    else:
        raise UserError(f"{where}: {column} is {type(value).__name__}; give a string or a number")
    if not answer:
        raise UserError(f"{where}: {column} is empty; give the gold answer")
    return answer


def _missing_column(column: str, record: Mapping[str, Any], where: str) -> UserError:
    present = ", ".join(str(name) for name in record) or "none"
    return UserError(f"{where}: no column {column}; columns present: {present}; rename or add it")
