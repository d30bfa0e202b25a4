import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from workers.verifier import LONE_TRIES, Verifier, grade_math, plain_integer_verdict

REPOSITORY = Path(__file__).parents[2]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
TOWER = r"\boxed{9^{9^{9^{9}}}}"
LIMIT_SECONDS = 1.0


@pytest.fixture(scope="class")
def verifier() -> Iterator[Verifier]:
    verifier = Verifier("math", workers=1, time_limit_seconds=LIMIT_SECONDS)
    yield verifier
    verifier.close()


def rewards(verifier: Verifier, *pairs: tuple[str, str]) -> list[float]:
    grades = verifier.grade([text for text, _ in pairs], [gold for _, gold in pairs])
    assert grades.failures == 0
    return grades.rewards.tolist()


def worker_pids() -> set[int]:
    return {p.pid for p in multiprocessing.active_children() if p.name == "pebble_pool_worker" and p.pid}


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def hang_at_first(marker: str) -> bool:
    """True, but the first time it is asked for no answer at all."""
    path = Path(marker)
    if path.exists():
        return True
    path.write_text(str(os.getpid()))
    time.sleep(600)
    return False


def end_badly(tries: str, how: str) -> bool:
    with open(tries, "a") as file:
        file.write("tried\n")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    while how == "compute for ever":
        pass
    raise ArithmeticError(how)


def sleep(seconds: str) -> bool:
    time.sleep(float(seconds))
    return True


class TestVerdicts:
    @pytest.mark.parametrize(
        ("text", "gold", "reward"),
        [
            (r"\boxed{\frac{1}{2}}", "0.5", 1),
            ("The answer is 42.", "42", 1),
            ("The answer is 41.", "42", 0),
            (r"So it is $\boxed{2\sqrt{3}}$.", r"2\sqrt{3}", 1),
            (r"\boxed{\sqrt{12}}", r"2\sqrt{3}", 1),
            (r"\boxed{2}", r"2\sqrt{3}", 0),
            (r"2\sqrt{3}", r"2\sqrt{3}", 1),
            (r"\boxed{1,000}", "1000", 1),
            (r"\boxed{x+1}", "1+x", 1),
            (r"\boxed{7}", "$7$", 1),
            ("", "42", 0),
            ("I do not know.", "42", 0),
            ("4690", "4691", 0),
            ("007", "7", 1),
        ],
    )
    def test_mathematics(self, verifier: Verifier, text: str, gold: str, reward: float) -> None:
        assert rewards(verifier, (text, gold)) == [reward]

    def test_exact_match_ignores_only_white_space_around(self) -> None:
        verifier = Verifier("exact")
        pairs = [(" 42\n", "42"), ("42.0", "42"), ("4 2", "42"), ("", "42")]
        assert rewards(verifier, *pairs) == [1, 0, 0, 0]

    def test_rewards_are_float32_in_the_order_of_the_answers(self, verifier: Verifier) -> None:
        grades = verifier.grade([r"\boxed{1}", r"\boxed{2}", r"\boxed{1}"], ["1", "1", "1"])
        assert grades.rewards.dtype == np.float32
        assert grades.rewards.tolist() == [1, 0, 1]

    def test_answers_without_golds_are_refused(self, verifier: Verifier) -> None:
        with pytest.raises(ValueError, match="shorter"):
            verifier.grade(["1", "2"], ["1"])

    def test_a_plain_integer_gets_math_verifys_own_verdict(self) -> None:
        chance = random.Random(0)
        seen = set()
        for _ in range(150):
            gold = chance.choice([-1, 1]) * chance.randrange(10 ** chance.randrange(1, 18))
            text = chance.choice([gold, -gold, gold + 1, gold * 10, chance.randrange(100)])
            pair = [
                ("-" if x < 0 else "") + "0" * (chance.choice([0, 2]) if x > 0 else 0) + str(abs(x))
                for x in (text, gold)
            ]
            verdict = plain_integer_verdict(*pair)
            if verdict is not None:
                seen.add(verdict)
                assert verdict == grade_math(*pair), pair
        assert seen == {True, False}

    @pytest.mark.parametrize("text", ["-07", "+7", "7.0", "7 0", "1,000", "7%", "", "7=7", "٧", "9" * 19])
    def test_anything_but_a_plain_integer_is_left_to_math_verify(self, text: str) -> None:
        assert plain_integer_verdict(text, "7") is None

    def test_the_antlr_runtime_is_the_one_whose_verdicts_are_tested(self) -> None:
        assert version("antlr4-python3-runtime").startswith("4.13.")


class TestGolds:
    def test_empty_unreadable_and_broken_golds_are_found(self, verifier: Verifier) -> None:
        golds = [
            "42",
            "",
            r"2\sqrt{3}",
            r"\frac{",
            "  ",
            r"\boxed{\frac{1}{2}}",
            r"\frac{",
            r"\text{(C)}",
            "$5$",
        ]
        assert verifier.check_golds(golds) == [1, 3, 4, 6]

    def test_a_gold_that_hangs_is_unfit(self, verifier: Verifier) -> None:
        assert verifier.check_golds(["1/2", "(1, 9^{9^{9^{9}}})", "1/3"]) == [1]

    def test_for_exact_match_only_empty_golds_are_unfit(self) -> None:
        assert Verifier("exact").check_golds([r"\frac{", "", "x"]) == [1]

    @pytest.mark.parametrize("name", ["aime24_test", "gsm8k_test"])
    def test_golds_of_real_sets_equal_themselves(self, verifier: Verifier, name: str) -> None:
        file = SHARED_DATA / f"{name}.jsonl"
        if not file.is_file():
            pytest.skip(f"{file} is not there")
        rows = [json.loads(line) for line in file.read_text().splitlines()[:200]]
        golds = [str(row["answer"]).split("#### ")[-1] for row in rows]
        assert all(re.search(r"\d", gold) for gold in golds)
        assert verifier.check_golds(golds) == []
        boxed = verifier.grade([rf"So it is \boxed{{{gold}}}." for gold in golds], golds)
        assert boxed.rewards.mean() == 1


class TestHostileAnswers:
    @pytest.mark.parametrize(
        "text", [TOWER, "9**9**9**9", r"\boxed{((((9!)!)!)!)!}", r"\boxed{\binom{10^{9}}{5 \cdot 10^{8}}}"]
    )
    def test_an_answer_that_hangs_scores_zero_in_time_and_is_counted(
        self, verifier: Verifier, text: str
    ) -> None:
        rewards(verifier, (r"\boxed{1/2}", "1/2"))  # the worker is up
        began = time.monotonic()
        grades = verifier.grade([text], ["5"])
        assert time.monotonic() - began < 30  # the limit is CPU time, and the machine may be busy
        assert (grades.rewards.tolist(), grades.failures) == ([0], 1)
        assert rewards(verifier, (r"\boxed{\frac{2}{4}}", "1/2")) == [1]

    def test_a_hang_costs_no_other_answer_of_its_batch(self, verifier: Verifier) -> None:
        texts = [rf"\boxed{{\frac{{{2 * i}}}{{14}}}}" for i in range(1, 41)]
        golds = [rf"\frac{{{i}}}{{7}}" for i in range(1, 41)]
        texts[3], texts[20], golds[30] = r"\boxed{8^{9^{9^{9}}}}", r"\boxed{8^{8^{9^{9}}}}", r"\frac{1}{3}"
        grades = verifier.grade(texts, golds)
        assert [i for i, reward in enumerate(grades.rewards) if reward == 0] == [3, 20, 30]
        assert grades.failures == 2

    def test_a_hang_is_counted_again_from_the_cache_but_not_graded_again(self, verifier: Verifier) -> None:
        pair = ([r"\boxed{7^{9^{9^{9}}}}"] * 3, ["5"] * 3)
        first, graded = verifier.grade(*pair), verifier.graded
        second = verifier.grade(*pair)
        assert (first.failures, second.failures) == (3, 3)
        assert verifier.graded == graded


class TestWorkers:
    def test_workers_can_be_started_before_the_first_answer(self) -> None:
        verifier = Verifier("math", time_limit_seconds=LIMIT_SECONDS)
        verifier.start()
        (pid,) = worker_pids()
        assert verifier.graded == 0
        assert rewards(verifier, (r"\boxed{1/2}", "1/2")) == [1]
        assert worker_pids() == {pid}
        verifier.close()

    def test_a_worker_killed_in_the_middle_is_counted_and_replaced(self) -> None:
        # Its own limit is far enough away that the signal comes first.
        verifier = Verifier("math", time_limit_seconds=2.0)
        rewards(verifier, (r"\boxed{1/2}", "1/2"))
        (pid,) = worker_pids()
        timer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
        timer.start()
        grades = verifier.grade([TOWER], ["5"])
        assert (grades.rewards.tolist(), grades.failures) == ([0], 1)
        assert rewards(verifier, (r"\boxed{3/6}", "1/2")) == [1]
        assert pid not in worker_pids()
        verifier.close()
        assert wait_until(lambda: not worker_pids(), 5)

    def test_an_idle_worker_that_was_killed_is_replaced_and_costs_nothing(self) -> None:
        verifier = Verifier("math", time_limit_seconds=LIMIT_SECONDS)
        rewards(verifier, (r"\boxed{1/2}", "1/2"))
        (pid,) = worker_pids()
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
        assert rewards(verifier, (r"\boxed{3/6}", "1/2")) == [1]
        verifier.close()

    def test_a_worker_that_no_longer_computes_is_killed_by_the_wall_clock(self) -> None:
        verifier = Verifier("math", time_limit_seconds=0.5)
        rewards(verifier, (r"\boxed{1/2}", "1/2"))
        (pid,) = worker_pids()
        timer = threading.Timer(0.3, os.kill, (pid, signal.SIGSTOP))
        timer.start()
        grades = verifier.grade([TOWER], ["5"])
        assert (grades.rewards.tolist(), grades.failures) == ([0], 1)
        assert rewards(verifier, (r"\boxed{3/6}", "1/2")) == [1]
        verifier.close()

    def test_a_lone_answer_whose_worker_is_killed_from_outside_is_graded_again(self, tmp_path: Path) -> None:
        verifier = Verifier("math", time_limit_seconds=60)
        marker = tmp_path / "pid"

        def kill_when_it_grades() -> None:
            assert wait_until(lambda: marker.exists() and marker.read_text(), 60)
            os.kill(int(marker.read_text()), signal.SIGKILL)

        killer = threading.Thread(target=kill_when_it_grades)
        killer.start()
        assert verifier._in_workers(hang_at_first, [(str(marker),)]) == [True]
        killer.join()
        verifier.close()

    @pytest.mark.parametrize(
        ("own_doing", "times"), [("die", 1 + LONE_TRIES), ("compute for ever", 1), ("raise", 1)]
    )
    def test_how_often_an_answer_that_ends_its_worker_is_tried(
        self, tmp_path: Path, own_doing: str, times: int
    ) -> None:
        verifier = Verifier("math", time_limit_seconds=0.5)
        tries = tmp_path / "tries"
        assert verifier._in_workers(end_badly, [(str(tries), own_doing)]) == [None]
        assert tries.read_text().count("\n") == times
        verifier.close()

    def test_beats_rise_while_a_worker_is_waited_for_within_its_limits(self) -> None:
        verifier = Verifier("math", time_limit_seconds=60)
        verifier._in_workers(sleep, [("0",)])  # the worker is up
        before = verifier.beats
        verifier._in_workers(sleep, [("2.5",)])
        assert verifier.beats - before >= 3  # two whole seconds and the answer
        verifier.close()

    def test_grading_works_off_the_main_thread(self) -> None:
        verifier = Verifier("math", time_limit_seconds=LIMIT_SECONDS)
        grades = []
        thread = threading.Thread(
            target=lambda: grades.append(verifier.grade([r"\boxed{4/6}", TOWER], ["2/3", "2/3"]))
        )
        thread.start()
        thread.join()
        assert grades[0].rewards.tolist() == [1, 0]
        assert grades[0].failures == 1
        verifier.close()

    def test_several_workers_grade_one_batch(self) -> None:
        verifier = Verifier("math", workers=2, time_limit_seconds=LIMIT_SECONDS)
        golds = [rf"\frac{{{i}}}{{7}}" for i in range(100)]
        grades = verifier.grade([rf"\boxed{{{i}/7}}" if i % 3 else "none" for i in range(100)], golds)
        assert grades.rewards.tolist() == [float(i % 3 > 0) for i in range(100)]
        verifier.close()

    def test_exact_match_starts_no_process(self) -> None:
        before = worker_pids()
        assert rewards(Verifier("exact", workers=2), ("1", "1")) == [1]
        assert worker_pids() == before

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    @pytest.mark.parametrize(("doing", "limit_seconds"), [("idle", 3600), ("hanging", 1)])
    def test_workers_die_with_a_parent_that_is_killed(
        self, tmp_path: Path, doing: str, limit_seconds: int
    ) -> None:
        script = tmp_path / "parent.py"
        script.write_text(PARENT)
        parent = subprocess.Popen(
            [sys.executable, str(script), doing, str(limit_seconds)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(is_running(pid) for pid in pids)
        parent.kill()
        parent.wait()
        assert wait_until(lambda: not any(is_running(pid) for pid in pids), 20)


PARENT = rf"""
import multiprocessing, sys, threading, time
from workers.verifier import Verifier

if __name__ == "__main__":
    verifier = Verifier("math", workers=2, time_limit_seconds=float(sys.argv[2]))
    verifier.grade(["none"], ["1/2"])
    if sys.argv[1] == "hanging":
        threading.Thread(target=verifier.grade, args=([{TOWER!r}], ["5"]), daemon=True).start()
        time.sleep(0.2)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    time.sleep(600)
"""


class TestCache:
    def test_a_pair_is_graded_once_whether_repeated_in_a_call_or_later(self) -> None:
        verifier = Verifier("math")
        assert rewards(verifier, *[(r"\boxed{1/2}", "0.5")] * 5, (r"\boxed{1/2}", "0.6")) == [
            1,
            1,
            1,
            1,
            1,
            0,
        ]
        assert verifier.graded == 2
        assert rewards(verifier, (r"\boxed{1/2}", "0.6"), (r"\boxed{1/2}", "0.5")) == [0, 1]
        assert verifier.graded == 2
        verifier.close()

    def test_the_cache_drops_the_least_recently_used_pair(self) -> None:
        verifier = Verifier("math", cache_size=2)
        one, two, three = ((rf"\boxed{{{i}/7}}", "1/7") for i in (1, 2, 3))
        for pair in (one, two, one, three):  # three drops two
            rewards(verifier, pair)
        assert verifier.graded == 3
        assert rewards(verifier, one, three) == [1, 0]
        assert verifier.graded == 3
        assert rewards(verifier, two) == [0]
        assert verifier.graded == 4
        verifier.close()

    def test_plain_integers_need_no_worker(self) -> None:
        verifier = Verifier("math")
        assert rewards(verifier, ("4690", "4691"), ("4691\n", "4691")) == [0, 1]
        assert verifier.graded == 0
