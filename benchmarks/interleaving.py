"""The same grid with one cell in flight and with several, on one engine and one learner group: how much of the waiting goes.

    python -m benchmarks.interleaving --slots 3 --repetitions 3

Real Ray, vLLM, FSDP and MLflow; runs of both kinds take turns. Wall-clock runs from the start of the first attempt to the end of
the last; starting the pools is left out. The sums of both phases are taken from the run with one cell in flight, where each phase
runs alone. Ends with exit code 1 when a result differs by a bit, or when any rollout was stale.

The cores of a machine share caches, memory and often more. What two processes that have nothing to do with each other lose side
by side is measured too: it lengthens both sums, whatever the schedule is.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.comparison import folder_differences
from benchmarks.site import GridOptions, Site, cells_of, history
from orchestrator.store.attempts import RECORD

OPTIONS = GridOptions(
    problems_per_batch=[128],
    rollouts_per_problem=[4],
    seeds=[0, 1, 2, 3, 4, 5],
    recipe="easy",
    compute_rollouts=128 * 4 * 48,
    first_mark=128 * 4 * 48,
    max_sequences=512,
    commit_steps=1000,
    stall_seconds=120.0,
)
"""Six cells of 48 steps of 512 rollouts, evaluated at their ends. With KL and entropy, and few answers to share a prompt, both
phases take similar time here. The first batches and the last update overlap with nothing, about 2 s whatever the length: a
fortieth of the grid with 48 steps, a fifteenth with 16."""


BUSY = """
import time, torch
torch.set_num_threads(1)
left, right = torch.randn(4096, 96), torch.randn(96, 288)
for _ in range(200): left @ right
started = time.perf_counter()
for _ in range(2000): left @ right
print(time.perf_counter() - started)
"""
"""Products of matrices of the shipped model's sizes, for some seconds."""


@dataclass(frozen=True)
class Timing:
    """One run of the grid."""

    wall: float
    """Seconds."""
    sampling: float
    """Seconds that the engine was at work, training and evaluation."""
    learning: float
    """Seconds that the learner was at work."""


def timing(run_dir: Path) -> Timing:
    """What a finished run took."""
    attempts = [json.loads(path.read_text()) for path in run_dir.glob(f"cells/*/attempts/*/{RECORD}")]
    sampling = learning = 0.0
    for cell in cells_of(run_dir):
        before = 0
        for row in history(run_dir, cell):
            steps = row["step"] - before
            sampling += steps * row["seconds_sampling"] + row["seconds_evaluating"]
            learning += steps * row["seconds_learning"]
            before = row["step"]
    wall = max(record["ended_at"] for record in attempts) - min(record["started_at"] for record in attempts)
    return Timing(wall, sampling, learning)


def stale_rows(run_dir: Path) -> list[str]:
    """Rows in whose interval a batch had been sampled from older weights than the learner's."""
    return [
        f"{run_dir.name}: {cell} trained on stale rollouts before step {row['step']}"
        for cell in cells_of(run_dir)
        for row in history(run_dir, cell)
        if row["staleness"] != 0
    ]


def stretch_side_by_side(processes: int = 2) -> float:
    """How many times as long a process takes beside others like it, a core for each, as alone."""

    def seconds(count: int) -> float:
        command = [sys.executable, "-c", BUSY]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        return statistics.fmean(float(process.communicate()[0]) for process in running)

    return seconds(processes) / seconds(1)


def measure(folder: Path, slots: int, repetitions: int) -> dict[str, Any]:
    """All figures; runs with one cell in flight and with ``slots`` take turns."""
    stretches: list[float] = []
    alone: list[Timing] = []
    together: list[Timing] = []
    faults: list[str] = []
    reference: Path | None = None
    with Site(folder) as site:
        for repetition in range(repetitions):
            stretches.append(stretch_side_by_side())
            for in_flight, timings in ((1, alone), (slots, together)):
                name = f"flight{in_flight}-{repetition}"
                print(f"{name} of {repetitions} repetitions", file=sys.stderr, flush=True)
                grid = site.write_grid(name, replace(OPTIONS, slots=in_flight))
                code, output = site.run(grid).wait(1800)
                if code != 0:
                    raise RuntimeError(f"{name} ended with {code}:\n{output}")
                run_dir = site.run_dir(grid)
                timings.append(timing(run_dir))
                faults += stale_rows(run_dir)
                if reference is None:
                    reference = run_dir
                else:
                    faults += folder_differences(run_dir, reference)
    ratio = statistics.median(one.wall / many.wall for one, many in zip(alone, together, strict=True))
    bounds = [max(one.sampling, one.learning) for one in alone]
    over_bound = statistics.median(many.wall / bound for many, bound in zip(together, bounds, strict=True))
    return {
        "cells_in_flight": slots,
        "ratio": ratio,
        "wall_over_longer_sum": over_bound,
        "stretch_side_by_side": statistics.median(stretches),
        "alone": [asdict(one) for one in alone],
        "together": [asdict(many) for many in together],
        "faults": faults,
    }


def as_text(figures: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [f"{'cells in flight':<16} {'wall':>8} {'sampling':>9} {'learning':>9}   (seconds)"]
    for flights, runs in ((1, figures["alone"]), (figures["cells_in_flight"], figures["together"])):
        lines += [
            f"{flights:<16} {run['wall']:>8.1f} {run['sampling']:>9.1f} {run['learning']:>9.1f}"
            for run in runs
        ]
    lines += [
        f"{figures['cells_in_flight']} cells in flight are {figures['ratio']:.2f} times as fast as one (median)",
        f"wall-clock over max(sum of sampling, sum of learning), each alone: {figures['wall_over_longer_sum']:.2f} (median)",
        f"two processes that only multiply, side by side: {figures['stretch_side_by_side']:.2f} times as long as one (median)",
        f"differences and stale batches: {len(figures['faults'])}",
        *(f"  {fault}" for fault in figures["faults"]),
    ]
    return "\n".join(lines)


def main() -> int:
    """Print the figures; 1 when anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--slots", type=command.count, default=3, help="cells in flight")
    parser.add_argument("--repetitions", type=command.count, default=3)
    command.add_folder(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="iso-interleaving-", dir="/tmp"))
    try:
        figures = measure(folder, arguments.slots, arguments.repetitions)
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(figures, indent=1) if arguments.format == "json" else as_text(figures))
    return 1 if figures["faults"] else 0


if __name__ == "__main__":
    command.run(main)
