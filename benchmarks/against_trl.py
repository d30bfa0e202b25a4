"""Rollouts per second of a real grid against TRL's ``GRPOTrainer``, and against the ceiling that the two phases alone set.

    python -m benchmarks.against_trl --n 16 --problems 32 --set signal

Both sides train the same cells (seeds) of the quickstart's model with the same loss, learning rate and reward (exact match) on
the same two cores: TRL one cell after the other in one warm process (or in several at once: ``--trl-processes``), in the fastest
of the variants that are tried first; ours as one Ray job with engines and a learner group of one thread each, from the first
cell's start to the last one's end, final evaluations, commits and MLflow included. Start-up is told apart. The ceiling is cores /
core-seconds of a rollout, from a grid of one cell on one engine, whose phases never overlap. The sides
take turns, and medians are shown.

TRL's vLLM runs in its process (its server takes weights by NCCL only) and in bfloat16, which vLLM makes of float32 models and TRL
has no option for; its importance weights are capped as ours. TRL's other two paths need none: they sample from the model itself.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import command
from benchmarks.grid_rate import LOGICAL_CPUS, measure_grid, quickstart_with
from benchmarks.site import QUICKSTART, Site
from benchmarks.trl_report import CORES, Repetition, Result, to_json, to_text
from benchmarks.trl_runs import TrlFailed, TrlRate, Variant, environment_python, run_trl, settings_of
from grids.errors import UserError
from grids.spec import GridSpec

GENERATIONS = ("generate", "continuous", "vllm")
"""TRL's ways of sampling that run on CPU; see ``Variant``."""
TRIED_STEPS = 6
"""Timed steps of each variant that is tried."""
TRIED_SECONDS = 120.0
"""Longest try, several times what the fastest variants take; one that takes longer is none of them."""
RUN_SECONDS = 1800.0
"""Longest run of a side."""
SETS = {
    "easy": ("easy_train.jsonl", 0.0, 1.0),
    "hard": ("hard_train.jsonl", 0.0, 1.0),
    "signal": ("easy_train.jsonl", 7 / 16, 9 / 16),
}
"""File of the quickstart, and the lowest and highest share of right answers that the base model gave a problem when it was graded:
around one half (``signal``) hardly a group is all right or all wrong."""


def write_problems(name: str, folder: Path) -> Path:
    """The problem set of that name of ``SETS``, in a file."""
    file, lowest, highest = SETS[name]
    lines = (QUICKSTART / file).read_text().splitlines()
    path = folder / f"{name}.jsonl"
    path.write_text(
        "".join(f"{line}\n" for line in lines if lowest <= json.loads(line)["avg_at_16"] <= highest)
    )
    return path


def grid(options: argparse.Namespace, name: str, train: Path, validation: Path, cells: int) -> GridSpec:
    """So many cells of the quickstart's grid, evaluated once, at their end."""
    compute = options.steps * options.n * options.problems
    return quickstart_with(
        {
            "name": name,
            "problems": {"train": str(train), "validation": str(validation)},
            "grid": {
                "problems_per_batch": [options.problems],
                "rollouts_per_problem": [options.n],
                "seeds": list(range(cells)),
                "compute_rollouts": compute,
            },
            "recipe": {"type": "hard", "kl_coefficient": options.kl},
            "verifier": {"type": "exact"},
            "evaluation": {
                "samples_per_problem": 1,
                "first_mark": compute,
                "kept_rollouts": 0,
                "train_probe": {"problems": 0},
            },
            "pools": {
                "samplers": {"count": options.samplers, "max_sequences": 512},
                "learners": {"slots": options.slots},
            },
        }
    )


def fastest_variant(
    run: Callable[[Variant], TrlRate],
    batch: int,
    processes: int,
    generations: Sequence[str] = GENERATIONS,
) -> tuple[Variant, dict[str, float | str]]:
    """The fastest way of running TRL, and what each gave: first paths and threads, then micro-batches with the best of those.

    Args:
        run: measures a variant.
        batch: B, in rollouts.
        processes: of every variant; they share the cores.
        generations: the paths that are tried.

    Raises:
        UserError: none runs.
    """
    rates: dict[Variant, float] = {}
    tries: dict[str, float | str] = {}

    def attempt(variant: Variant) -> None:
        print(f"trying TRL: {variant}", file=sys.stderr, flush=True)
        try:
            rates[variant] = run(variant).rollouts_per_second
            tries[str(variant)] = rates[variant]
        except TrlFailed as error:
            tries[str(variant)] = str(error)

    for generation in generations:
        for threads in range(1, CORES // processes + 1):
            attempt(Variant(generation, threads, processes=processes))
    if not rates:
        raise UserError(f"--environment: TRL does not run there: {next(iter(tries.values()))}; make it anew")
    best = max(rates, key=rates.__getitem__)
    for parts in (2, 4):
        if batch % parts == 0:
            attempt(replace(best, micro_batches=parts))
    return max(rates, key=rates.__getitem__), tries


def measure(options: argparse.Namespace, folder: Path) -> Result:
    """Try TRL's variants, then let both sides take turns.

    Raises:
        UserError: a side does not run.
    """
    python = environment_python(options.environment)
    train = write_problems(options.set, folder)
    validation = QUICKSTART / "easy_validation.jsonl"
    settings = settings_of(grid(options, "trl", train, validation, options.cells))
    try_one = partial(
        run_trl,
        python,
        folder / "tries",
        {**settings, "steps": TRIED_STEPS, "seeds": list(range(options.trl_processes))},
        timeout=TRIED_SECONDS,
    )
    chosen, tries = fastest_variant(
        try_one, options.n * options.problems, options.trl_processes, options.generation
    )
    repetitions = []
    for number in range(1, options.repetitions + 1):
        try:
            trl = run_trl(python, folder / f"trl-{number}", settings, chosen, RUN_SECONDS)
        except TrlFailed as error:
            raise UserError(
                f"--environment: TRL ({chosen}) failed: {error}; see {folder}/trl-{number}"
            ) from None
        # Its services live for this turn alone: TRL has the cores to itself.
        with Site(folder / f"site-{number}", cpus=LOGICAL_CPUS) as site:
            one_by_one = argparse.Namespace(**vars(options) | {"samplers": 1, "slots": 1})
            ours, alone = (
                measure_grid(site, grid(taken, name, train, site.validation, cells), RUN_SECONDS)
                for name, taken, cells in (
                    ("interleaved", options, options.cells),
                    ("alone", one_by_one, 1),
                )
            )
        repetitions.append(Repetition(trl, ours, alone))
        print(f"repetition {number}: {_rates(repetitions[-1])}", file=sys.stderr, flush=True)
    shown = {
        name: getattr(options, name)
        for name in ("set", "n", "problems", "cells", "steps", "samplers", "slots", "kl", "trl_processes")
    }
    return Result(shown, tries, str(chosen), repetitions)


def _rates(one: Repetition) -> str:
    return f"TRL {one.trl.rollouts_per_second:.0f}, ours {one.ours.rollouts_per_second:.0f} rollouts/s"


def main() -> None:
    """Measure and print."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.against_trl", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--n", type=command.count, default=16, help="rollouts of a problem")
    parser.add_argument("--problems", type=command.count, default=32, help="B_p, problems of a batch")
    parser.add_argument(
        "--set",
        choices=list(SETS),
        default="easy",
        help="problem set of the quickstart; signal: hardly a flat group",
    )
    parser.add_argument(
        "--cells",
        type=command.count,
        default=3,
        help="cells (seeds); best a multiple of --slots, or some train alone at the end",
    )
    parser.add_argument("--steps", type=command.count, default=48, help="update steps of each cell")
    parser.add_argument(
        "--samplers", type=command.count, default=2, help="engines on our side, of one thread each"
    )
    parser.add_argument("--slots", type=command.count, default=3, help="cells in flight on our side")
    parser.add_argument(
        "--kl",
        type=command.amount,
        default=0.0,
        help="KL coefficient on both sides; with 0 flat groups need no update",
    )
    parser.add_argument(
        "--trl-processes",
        type=command.count,
        default=1,
        choices=range(1, CORES + 1),
        help="cells that TRL trains at once, each in a process and with cores of its own",
    )
    parser.add_argument(
        "--generation",
        nargs="+",
        choices=GENERATIONS,
        default=GENERATIONS,
        help="TRL's generation paths to try; those that have been found slow need not be tried again",
    )
    parser.add_argument("--repetitions", type=command.count, default=3)
    parser.add_argument(
        "--environment",
        type=Path,
        default=cache / "isocompute" / "trl",
        help="TRL's virtual environment, made where missing",
    )
    parser.add_argument("--format", choices=["text", "json"], default="text")
    options = parser.parse_args()
    if options.cells < options.trl_processes:
        parser.error(
            f"--cells: {options.cells} leaves a process of TRL without a cell; give {options.trl_processes}"
        )
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < CORES:
        parser.error(f"this machine gives {len(cores)} core; the comparison needs {CORES}")
    os.sched_setaffinity(0, cores[:CORES])
    folder = Path(
        tempfile.mkdtemp(prefix="against-trl-")
    )  # kept when something fails: logs and runs lie there
    result = measure(options, folder)
    shutil.rmtree(folder)
    print(to_json(result) if options.format == "json" else to_text(result))


if __name__ == "__main__":
    command.run(main)
