"""Whether the analysis' intervals hold the truth, over synthetic grids whose law is known.

``python -m benchmarks.recovery`` draws grids of the paper's Easy size with noise (39 allocations, three seeds, 41 marks, 300
problems with 4 answers), analyses each from start to end, and counts how often the 90 % intervals hold the truth. The
truth is what the same analysis returns without noise on dense marks. The law that generated the grid differs from it, since n*
takes powers of two only: that difference is shown apart. A replicate whose law is not identified has no interval, and counts as
a miss. Nothing is drawn again.

Then three truths for which no law, or no plateau, can be known: how often each was called what it is.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from analysis.fitting.curves import fit_allocations
from analysis.fitting.landscape import compute_grid, landscape
from analysis.fitting.observations import base_point, observe
from analysis.fitting.questions import Frontier, Question, answer, questions
from analysis.fitting.resampling import plan_resampling
from analysis.options import FitOptions
from analysis.synthetic import BEYOND_THE_EDGE, FLAT, ONE_N, SyntheticGrid, synthetic_grid, true_grid
from analysis.tables import COMPUTE_COLUMNS, GridTables
from benchmarks import command

METRIC = "avg_at_4"
LAW = "the paper's law"
SPECIAL = {
    "flat: no n is better": FLAT,
    "n* still rises at the edge": BEYOND_THE_EDGE,
    "one n only": ONE_N,
}
QUESTIONS = (Question("nothing"), Question("problems_per_batch", 32))
BUDGETS = tuple(2**power for power in (16, 18, 19, 20, 21, 22, 23))
"""Where n*(C) is checked, in rollouts."""
TARGETS = {"L + b": (0.85, 0.95), "log10 C0": (0.85, 0.95)}
"""Coverage that 90 % intervals should have; that of n*(C), whose intervals end on powers of two, at least 85 %."""
NOT_IDENTIFIED = "law not identified"
NO_PLATEAU = "law, plateau not identified"
IDENTIFIED = "law with its plateau"


def read(frontier: Frontier) -> list[dict[str, Any]]:
    """The quantities of one frontier: ``quantity``, ``estimate``, ``low``, ``high``; NaN for what it does not have."""
    law, missing = frontier.law, (np.nan, np.nan)
    found: list[tuple[str, float, tuple[float, float]]] = [
        (
            "L + b",
            law.fit.rise + law.fit.log2_floor if law.fit else np.nan,
            law.intervals.get("log2_plateau", missing),
        ),
        ("log10 C0", law.fit.midpoint if law.fit else np.nan, law.intervals.get("midpoint", missing)),
    ]
    for budget in BUDGETS:
        point = min(frontier.points, key=lambda point: abs(np.log(point.compute / budget)))
        low, high = np.log2(point.rollouts_per_problem_interval or missing)
        found.append((n_star_name(budget), float(np.log2(point.rollouts_per_problem)), (low, high)))
    return [
        {"quantity": name, "estimate": estimate, "low": float(low), "high": float(high)}
        for name, estimate, (low, high) in found
    ]


def n_star_name(budget: int) -> str:
    return f"log2 n* at {budget:,}"


def verdict(frontier: Frontier) -> str:
    """What the analysis called a frontier."""
    if not frontier.law.identified:
        return NOT_IDENTIFIED
    return IDENTIFIED if frontier.law.plateau_identified else NO_PLATEAU


def replicate(
    design: SyntheticGrid, bootstrap: int, numbered: tuple[int, np.random.SeedSequence]
) -> list[dict[str, Any]]:
    """Draw and analyse one grid: a record for each question that it can ask."""
    number, seed = numbered
    tables = synthetic_grid(design, np.random.default_rng(seed))
    return [
        {
            "question": frontier.question.title,
            "verdict": verdict(frontier),
            "remarks": [*frontier.law.reasons, *frontier.law.notes],
            "quantities": read(frontier),
        }
        for frontier in frontiers(tables, FitOptions(replicates=bootstrap, seed=number))
    ]


def frontiers(tables: GridTables, options: FitOptions) -> list[Frontier]:
    """The frontiers of ``QUESTIONS`` that a grid can answer, in the steps of ``analysis.findings.analyse``; what does not
    feed them is left out, since hundreds of grids are analysed."""
    groups, _ = observe(tables.history, METRIC, COMPUTE_COLUMNS[options.compute], options.replicates > 0)
    base = base_point(tables.base, METRIC)
    resampling = plan_resampling(groups, options.replicates, options.seed)
    curves = fit_allocations(groups, base, options, resampling)
    asked = [question for question in questions(curves, in_rollouts=True) if question in QUESTIONS]
    return answer(asked, landscape(curves, compute_grid(curves)), groups, options.confidence)


def run(
    design: SyntheticGrid, name: str, count: int, bootstrap: int, seed: int, processes: int
) -> list[dict[str, Any]]:
    """All records of ``count`` grids. The same seed gives the same records with any number of processes."""
    children = enumerate(np.random.SeedSequence(seed).spawn(count))
    records: list[dict[str, Any]] = []
    with ProcessPoolExecutor(processes) as pool:
        results = pool.map(partial(replicate, design, bootstrap), children)
        for done, found in enumerate(results, start=1):
            records += found
            if done % 20 == 0 or done == count:
                print(f"{name}: {done} of {count} grids", file=sys.stderr, flush=True)
    return records


def coverage(design: SyntheticGrid, records: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """One row for each question and quantity, see the columns' names; every record counts."""
    truths = {
        frontier.question.title: {row["quantity"]: row["estimate"] for row in read(frontier)}
        for frontier in frontiers(true_grid(design), FitOptions(replicates=0))
    }
    rows = pd.DataFrame(
        [{"question": record["question"], **row} for record in records for row in record["quantities"]]
    )
    rows["truth"] = [truths[q][name] for q, name in zip(rows["question"], rows["quantity"], strict=True)]
    rows["covered"] = (rows["low"] <= rows["truth"]) & (rows["truth"] <= rows["high"])
    rows["no_interval"] = rows["low"].isna() | rows["high"].isna()
    rows["width"] = rows["high"] - rows["low"]
    rows["error"] = rows["estimate"] - rows["truth"]
    generating = _generating(design)
    table = []
    for (question, name), part in rows.groupby(["question", "quantity"], sort=False):
        share = float(part["covered"].mean())
        low, high = TARGETS.get(name, (0.85, 1.0))
        table.append(
            {
                "question": question,
                "quantity": name,
                "law": generating[name],
                "truth": truths[question][name],
                "discretisation": truths[question][name] - generating[name],
                "coverage": share,
                "standard_error": float(np.sqrt(share * (1.0 - share) / len(part))),
                "in_target": bool(low <= share <= high),
                "grids": len(part),
                "no_interval": int(part["no_interval"].sum()),
                "median_width": float(part["width"].median()),
                "mean_error": float(part["error"].mean()),
                "sd_of_estimates": float(part["estimate"].std()),
            }
        )
    return pd.DataFrame(table)


def _generating(design: SyntheticGrid) -> dict[str, float]:
    law = design.law
    assert law is not None
    values = {"L + b": law.rise + law.log2_floor, "log10 C0": law.log10_midpoint}
    return values | {n_star_name(budget): float(law.log2_n(budget)) for budget in BUDGETS}


def called(records: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """By question: how often each verdict, and the remarks from the most frequent on, with numbers left out."""
    for question in dict.fromkeys(record["question"] for record in records):
        part = [record for record in records if record["question"] == question]
        remarks = Counter(_without_numbers(remark) for record in part for remark in record["remarks"])
        yield {
            "question": question,
            "grids": len(part),
            "verdicts": dict(Counter(record["verdict"] for record in part).most_common()),
            "remarks": dict(remarks.most_common(4)),
        }


def _without_numbers(text: str) -> str:
    return re.sub(r"#(, #)*", "#", re.sub(r"\d+(\.\d+)?", "#", text))


def _text(table: pd.DataFrame, verdicts: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["90 % intervals against what the analysis returns without noise"]
    for question, part in table.groupby("question", sort=False):
        shown = part.drop(columns="question").rename(
            columns={"standard_error": "se", "in_target": "in target", "no_interval": "no interval"}
        )
        lines += [
            "",
            f"{question}",
            shown.to_string(index=False, float_format=lambda value: f"{value:.3f}"),
        ]
    lines += [
        "",
        "law: the generating law; discretisation: truth minus law; no interval: counted as misses; widths in the "
        "quantity's unit",
        "",
        "What each truth was called",
    ]
    for name, by_question in verdicts.items():
        for found in by_question:
            counts = ", ".join(f"{verdict} {count}" for verdict, count in found["verdicts"].items())
            lines.append(f"{name} ({found['question']}): {counts} of {found['grids']}")
            lines += [f"    {count:4d}  {remark}" for remark, count in found["remarks"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--replicates", type=command.count, default=200, help="grids with the paper's law")
    parser.add_argument(
        "--special", type=command.natural, default=40, help="grids of each of the three other truths"
    )
    parser.add_argument(
        "--bootstrap", type=command.count, default=300, help="bootstrap replicates of each analysis"
    )
    parser.add_argument("--processes", type=command.count, default=2)
    parser.add_argument("--seed", type=command.natural, default=0)
    parser.add_argument("--format", choices=["table", "json"], default="table")
    options = parser.parse_args()
    fixed = (options.bootstrap, options.seed, options.processes)
    records = run(SyntheticGrid(), LAW, options.replicates, *fixed)
    table = coverage(SyntheticGrid(), records)
    verdicts = {LAW: list(called(records))}
    for name, design in SPECIAL.items():
        if options.special:
            verdicts[name] = list(called(run(design, name, options.special, *fixed)))
    if options.format == "json":
        content = {"coverage": table.to_dict(orient="records"), "called": verdicts}
        print(json.dumps(content, indent=1, default=lambda value: value.item()))
    else:
        print(_text(table, verdicts))


if __name__ == "__main__":
    command.run(main)
