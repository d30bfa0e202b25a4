"""Answers graded per second, by what has to be done for them.

    python -m benchmarks.verifier_speed --answers 2048 --repetitions 3

One grading process. ``integers`` need no SymPy, ``literal`` answers are their gold, ``expressions`` are mathematics written in
another way than their gold, each pair once, and ``repeated`` are such expressions where the 16 answers to a problem agree.
"""

import argparse
import json
import statistics
import time
from typing import Any

from benchmarks import command
from grids.errors import UserError
from workers.verifier import Verifier

GROUP = 16


def pairs_of(kind: str, answers: int, offset: int) -> list[tuple[str, str]]:
    """(text, gold) of a batch; another ``offset`` gives other pairs, so that no cache knows them. Every second one is wrong."""
    numbers = range(offset, offset + answers)
    match kind:
        case "integers":
            return [(f" {number} ", str(number + number % 2)) for number in numbers]
        case "literal":
            return [(rf"{number}\sqrt{{3}}", rf"{number}\sqrt{{3}}") for number in numbers]
        case "expressions":
            return [
                (rf"so it is $\frac{{{2 * number + number % 2}}}{{4}}$", rf"\frac{{{number}}}{{2}}")
                for number in numbers
            ]
    unseen = offset + 1_000_000_000
    return [pair for pair in pairs_of("expressions", answers // GROUP, unseen) for _ in range(GROUP)]


def measure(answers: int, repetitions: int) -> dict[str, Any]:
    """Answers per second of each kind, each repetition."""
    if answers % GROUP:
        raise UserError(f"--answers: {answers} is no multiple of {GROUP}, a group's answers")
    verifier = Verifier("math", workers=1)
    rates: dict[str, list[float]] = {}
    try:
        verifier.grade(["$x$"], ["y"])  # starts the process
        for kind in ("integers", "literal", "expressions", "repeated"):
            rates[kind] = []
            for repetition in range(repetitions):
                pairs = pairs_of(kind, answers, (1 + 10 * repetition) * answers)
                started = time.monotonic()
                grades = verifier.grade(*map(list, zip(*pairs, strict=True)))
                rates[kind].append(answers / (time.monotonic() - started))
                right = answers if kind == "literal" else answers // 2
                if grades.rewards.sum() != right or grades.failures:
                    raise RuntimeError(f"{kind}: {grades.rewards.sum():.0f} right answers, expected {right}")
    finally:
        verifier.close()
    return {"answers": answers, "rates": rates}


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--answers", type=command.count, default=2048)
    parser.add_argument("--repetitions", type=command.count, default=3)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    figures = measure(arguments.answers, arguments.repetitions)
    if arguments.format == "json":
        print(json.dumps(figures, indent=1))
    else:
        for kind, rates in figures["rates"].items():
            print(f"{kind:<12} {statistics.median(rates):>10,.0f} answers/s (median of {len(rates)})")
    return 0


if __name__ == "__main__":
    command.run(main)
