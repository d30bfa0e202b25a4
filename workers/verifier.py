"""Rewards: is an answer equal to its gold? Graded by math-verify in processes that can be killed, or by exact match.

SymPy may run for ever on what a model writes, inside C code that no Python-level timeout interrupts. So every answer is
graded in a worker process under a timer whose expiry makes the kernel end that process, whatever it is doing and whether
or not its parent still lives. The timer counts the worker's CPU time, so that a verdict depends on the answer and not on
how busy the machine is; a much longer wall-clock limit catches a worker that no longer computes. A worker that dies costs
its own answer only.
"""

import hashlib
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from pebble import ProcessExpired, ProcessPool

logger = logging.getLogger(__name__)

CHUNK_SIZE = 32
"""Answers sent to a worker at once: enough to hide the cost of a message, few enough to regrade one by one."""
WALL_FACTOR = 10.0
"""Wall-clock time allowed beyond the answers' own CPU limits, in time limits."""
LONE_TRIES = 2
"""How often an answer is graded on its own before it scores 0 for a death of its process that need not be its own doing."""
STALL_SECONDS = 60.0
"""Longest wait beyond the wall-clock limit (worker start included) before the pool itself counts as broken."""

_PLAIN_INTEGER = re.compile(r"[0-9]{1,18}|-?(?:0|[1-9][0-9]{0,17})")
_MATH_DELIMITERS = re.compile(r"\\boxed\b|\$.+\$|\\\(.+\\\)|\\\[.+\\\]", re.DOTALL)


@dataclass(frozen=True)
class Grades:
    """Rewards of one call: float32 of shape (answers,), each 0 or 1; ``failures`` of these are 0 by a crash or a hang."""

    rewards: np.ndarray
    failures: int


def grade_exact(text: str, gold: str) -> bool:
    """Whether the answer is the gold, apart from white space around them."""
    return text.strip() == gold.strip()


def grade_math(text: str, gold: str) -> bool:
    """Whether math-verify finds in ``text`` an answer equal to ``gold``. May hang: call it in a worker only."""
    import math_verify

    parsed = math_verify.parse(text, parsing_timeout=None)
    return bool(math_verify.verify(_parsed_gold(gold), parsed, timeout_seconds=None))


def gold_is_sound(gold: str) -> bool:
    """Whether ``gold`` is mathematics to math-verify and equal to itself. May hang: call it in a worker only."""
    if all(isinstance(form, str) for form in _parsed_gold(gold)):
        return False
    return grade_math(_delimited(gold), gold)


def plain_integer_verdict(text: str, gold: str) -> bool | None:
    """The verdict on two plain integers of up to 18 digits, None for anything else.

    It is exactly math-verify's: of a text that is one bare integer it extracts that integer and no other candidate, of
    the boxed gold the same, drops leading zeros, and compares two SymPy integers by value. Left to math-verify are
    negative numbers with leading zeros (it takes ``-07`` for unequal to ``-7``), other signs, separators and decimals.
    """
    text, gold = text.strip(), gold.strip()
    if _PLAIN_INTEGER.fullmatch(text) and _PLAIN_INTEGER.fullmatch(gold):
        return int(text) == int(gold)
    return None


class Verifier:
    """Grades answers against golds; verdicts are cached by (text, gold) and the least recently used are dropped.

    ``math`` takes an answer that is the gold literally for right without asking math-verify, which would misread bare
    LaTeX such as ``2\\sqrt{3}``. Calls from several threads wait for one another.

    Args:
        kind: ``math`` for math-verify in worker processes, ``exact`` for string equality in this process.
        workers: number of worker processes.
        time_limit_seconds: CPU time allowed for one answer; above it the answer scores 0.
        cache_size: number of verdicts kept (about 200 bytes each).

    Attributes:
        graded: how many pairs have been sent to the workers so far; cached, repeated and plain-integer ones are not.
        beats: signs of progress so far: calls, graded chunks, and each second of waiting for a worker that is within
            its own limits. Another thread may read it at any time.
    """

    def __init__(
        self,
        kind: Literal["math", "exact"],
        workers: int = 1,
        time_limit_seconds: float = 5.0,
        cache_size: int = 200_000,
    ) -> None:
        self.kind = kind
        self.graded = 0
        self.beats = 0
        self._workers = workers
        self._limit = time_limit_seconds
        self._cache_size = cache_size
        self._cache: OrderedDict[bytes, bool | None] = OrderedDict()
        self._pool: ProcessPool | None = None
        self._lock = threading.Lock()

    def grade(self, texts: Sequence[str], golds: Sequence[str]) -> Grades:
        """Grade ``texts[i]`` against ``golds[i]``.

        Raises:
            ValueError: the two differ in length.
            RuntimeError: worker processes do not start here.
        """
        pairs = list(zip(texts, golds, strict=True))
        with self._lock:
            verdicts = (
                [grade_exact(*pair) for pair in pairs] if self.kind == "exact" else self._grade_math(pairs)
            )
        self.beats += 1
        rewards = np.array([verdict is True for verdict in verdicts], dtype=np.float32)
        return Grades(rewards, failures=sum(verdict is None for verdict in verdicts))

    def check_golds(self, golds: Sequence[str]) -> list[int]:
        """Indices of golds that are unfit to grade against: empty, or (``math``) unreadable or unequal to themselves."""
        unsound = {gold for gold in golds if not gold.strip()}
        if self.kind == "math":
            doubtful = [g for g in dict.fromkeys(golds) if g.strip() and plain_integer_verdict(g, g) is None]
            with self._lock:
                verdicts = self._in_workers(gold_is_sound, [(gold,) for gold in doubtful])
            unsound |= {gold for gold, sound in zip(doubtful, verdicts, strict=True) if not sound}
        return [index for index, gold in enumerate(golds) if gold in unsound]

    def start(self) -> None:
        """Start the worker processes, whose imports take seconds; they start with the first answers that need them otherwise.

        Raises:
            RuntimeError: they do not start here, or cannot grade.
        """
        if self.kind == "exact":
            return
        with self._lock:
            verdicts = self._in_workers(grade_math, [("1", "1")])
        if verdicts != [True]:
            raise RuntimeError("verifier: a worker process does not find 1 equal to 1")

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _grade_math(self, pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
        verdicts: dict[tuple[str, str], bool | None] = {}
        unknown: dict[tuple[str, str], bytes] = {}
        for pair in dict.fromkeys(pairs):
            quick = True if grade_exact(*pair) else plain_integer_verdict(*pair)
            if quick is not None:
                verdicts[pair] = quick
                continue
            key = _cache_key(*pair)
            if key in self._cache:
                self._cache.move_to_end(key)
                verdicts[pair] = self._cache[key]
            else:
                unknown[pair] = key
        self.graded += len(unknown)
        for (pair, key), verdict in zip(
            unknown.items(), self._in_workers(grade_math, list(unknown)), strict=True
        ):
            verdicts[pair] = self._cache[key] = verdict
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return [verdicts[pair] for pair in pairs]

    def _in_workers(
        self, function: Callable[..., bool], items: Sequence[tuple[str, ...]]
    ) -> list[bool | None]:
        """``function(*item)`` for each item; None where that crashed, or ran into a limit, on its own."""
        chunks = [items[start : start + CHUNK_SIZE] for start in range(0, len(items), CHUNK_SIZE)]
        results: list[bool | None] = []
        suspects: list[int] = []
        for chunk, outcome in zip(chunks, self._run(function, chunks), strict=True):
            if isinstance(outcome, _Loss):
                if len(chunk) > 1 or outcome is _Loss.UNCLEAR:
                    suspects.extend(range(len(results), len(results) + len(chunk)))
                results.extend([None] * len(chunk))
            else:
                results.extend(outcome)
        # Which item of a lost chunk is to blame shows when each runs alone.
        for _ in range(LONE_TRIES):
            alone = self._run(function, [[items[index]] for index in suspects])
            for index, outcome in zip(suspects, alone, strict=True):
                results[index] = None if isinstance(outcome, _Loss) else outcome[0]
            suspects = [i for i, outcome in zip(suspects, alone, strict=True) if outcome is _Loss.UNCLEAR]
        return results

    def _run(
        self, function: Callable[..., bool], chunks: Sequence[Sequence[tuple[str, ...]]]
    ) -> list["list[bool] | _Loss"]:
        """The results of each chunk, or how it was lost."""
        outcomes: dict[int, list[bool] | _Loss] = {}
        for _ in range(2):  # a pool that broke by itself (say, an idle worker was killed) is rebuilt once
            waiting = [index for index in range(len(chunks)) if index not in outcomes]
            if not waiting:
                break
            try:
                pool = self._running_pool()
                futures = {
                    index: pool.schedule(
                        _apply_each,
                        args=(function, chunks[index], self._limit),
                        timeout=self._wall_limit(len(chunks[index])),
                    )
                    for index in waiting
                }
                for index, future in futures.items():
                    outcomes[index] = self._outcome(future, pool)
                    self.beats += 1
            except BrokenProcessPool as error:
                logger.warning("verifier: the worker pool broke (%s) and is started again", error)
                self.close()
        if len(outcomes) < len(chunks):
            raise RuntimeError("verifier: worker processes do not start; see the messages above")
        return [outcomes[index] for index in range(len(chunks))]

    def _running_pool(self) -> ProcessPool:
        if self._pool is not None and not self._pool.active:
            self.close()
        if self._pool is None:
            # spawn: forking a process that runs engine or Ray threads can deadlock.
            self._pool = ProcessPool(
                self._workers, initializer=_start_worker, context=multiprocessing.get_context("spawn")
            )
        return self._pool

    def _wall_limit(self, answers: int) -> float:
        return (answers + WALL_FACTOR) * self._limit

    def _outcome(self, future: Future, pool: ProcessPool) -> "list[bool] | _Loss":
        deadline = time.monotonic() + self._wall_limit(CHUNK_SIZE) + STALL_SECONDS
        while not future.done():
            try:
                future.exception(timeout=1.0)
            except TimeoutError:
                if not pool.active or time.monotonic() > deadline:
                    raise BrokenProcessPool("no worker answers") from None
                self.beats += 1
        error = future.exception()
        if isinstance(error, BrokenProcessPool):
            raise error
        if error is not None:
            level = logging.DEBUG if isinstance(error, ProcessExpired) else logging.WARNING
            logger.log(level, "verifier: a worker failed: %r", error)
            if isinstance(error, TimeoutError):
                return _Loss.UNCLEAR
            outside = isinstance(error, ProcessExpired) and error.exitcode != -signal.SIGPROF
            return _Loss.UNCLEAR if outside else _Loss.ITS_OWN
        return future.result()


class _Loss(Enum):
    """How a chunk was lost."""

    ITS_OWN = auto()
    """An answer raised, or used up its CPU time: the same would happen again."""
    UNCLEAR = auto()
    """Its process stood still or died otherwise, perhaps at the hand of someone else (a kill, a machine out of memory)."""


def _cache_key(text: str, gold: str) -> bytes:
    # A digest, as long responses would fill the memory.
    content = f"{len(gold)}:{gold}{text}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content, digest_size=16).digest()


def _delimited(gold: str) -> str:
    # Without delimiters math-verify reads the first number it finds: 2 for 2\sqrt{3}.
    return gold if _MATH_DELIMITERS.search(gold) else rf"\boxed{{{gold}}}"


@lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> list[Any]:
    import math_verify

    return math_verify.parse(_delimited(gold), parsing_timeout=None)


def _apply_each(function: Callable[..., bool], items: Sequence[tuple[str, ...]], limit: float) -> list[bool]:
    results = []
    try:
        for item in items:
            signal.setitimer(signal.ITIMER_PROF, limit)
            results.append(function(*item))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return results


def _start_worker() -> None:
    # Default actions end the process at once, where Python handlers would wait for C code to return.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # math-verify warns that its own timeouts, which need the main thread, are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    grade_math(
        r"\boxed{\frac{1}{2}}", "0.5"
    )  # imports and compiles here, so that no answer's time limit pays for it


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
