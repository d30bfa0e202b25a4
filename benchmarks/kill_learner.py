"""Kills a learner rank over and over: a grid finishes as long as each attempt makes progress, and fails with its budget otherwise.

    python -m benchmarks.kill_learner --every 30

First undisturbed, then with a SIGKILL of a learner every so many seconds and commits every few steps, then a grid whose commits
lie further apart than the kills.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import command
from benchmarks.comparison import folder_differences
from benchmarks.site import GridOptions, Running, Site, cells_of, members_of, state
from orchestrator.store.attempts import RECORD

OPTIONS = GridOptions(rollouts_per_problem=[4], compute_rollouts=16_384, own_failures=3)
"""One cell of 512 steps, some minutes of work, that may fail three times between two commits."""
BUDGET_WORDS = "failures.own_failures"


@dataclass(frozen=True)
class Result:
    """What became of one grid."""

    exit_code: int
    seconds: float
    kills: int
    attempts: int
    states: dict[str, str]
    reasons: list[str]


def run_killed(site: Site, grid: Path, every: float) -> Result:
    """Run a grid and kill a learner rank every ``every`` seconds from its first attempt to its end; never when that is 0."""
    run_dir = site.run_dir(grid)
    running, started = site.submit(grid), time.monotonic()
    source = random.Random(0)
    kills = 0
    last: float | None = None
    while not running.ended():
        time.sleep(0.05)
        if last is None and attempts(run_dir):
            last = time.monotonic()
        if every and last is not None and time.monotonic() - last >= every:
            learners = [process for role, process in members_of(run_dir) if role.startswith("learner")]
            if learners:
                source.choice(learners).kill()
                kills += 1
                last = time.monotonic()
    return _result(running, run_dir, time.monotonic() - started, kills)


def attempts(run_dir: Path) -> int:
    """Attempts at all cells so far."""
    return len(list(run_dir.glob(f"cells/*/attempts/*/{RECORD}")))


def _result(running: Running, run_dir: Path, seconds: float, kills: int) -> Result:
    states = {cell: state(run_dir, cell) for cell in cells_of(run_dir)}
    return Result(
        exit_code=running.process.returncode,
        seconds=seconds,
        kills=kills,
        attempts=attempts(run_dir),
        states={cell: found["state"] for cell, found in states.items()},
        reasons=[found["reason"] for found in states.values() if found["reason"]],
    )


def main() -> int:
    """Print the figures; 1 when a grid did not end as it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--every", type=command.seconds, default=30.0, help="seconds between two kills")
    command.add_folder(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="iso-kills-", dir="/tmp"))
    faults = []
    with Site(folder) as site:
        undisturbed_grid, killed_grid = (
            site.write_grid("undisturbed", OPTIONS),
            site.write_grid("killed", OPTIONS),
        )
        undisturbed = run_killed(site, undisturbed_grid, 0)
        killed = run_killed(site, killed_grid, arguments.every)
        if killed.exit_code != 0 or undisturbed.exit_code != 0:
            faults.append(f"exit codes {undisturbed.exit_code} and {killed.exit_code}, expected 0 and 0")
        else:
            faults += folder_differences(site.run_dir(killed_grid), site.run_dir(undisturbed_grid))
        hopeless_grid = site.write_grid("hopeless", replace(OPTIONS, commit_steps=10_000))
        hopeless = run_killed(site, hopeless_grid, arguments.every)
        if hopeless.exit_code != 1 or not all(BUDGET_WORDS in reason for reason in hopeless.reasons):
            faults.append(f"without progress: exit code {hopeless.exit_code}, {hopeless.reasons}")
    results = {"undisturbed": undisturbed, "killed": killed, "without progress": hopeless}
    if arguments.format == "json":
        print(
            json.dumps(
                {name: asdict(result) for name, result in results.items()} | {"faults": faults}, indent=1
            )
        )
    else:
        print(as_text(results, arguments.every, faults))
    if faults:
        return 1
    if arguments.folder is None:
        shutil.rmtree(folder)
    return 0


def as_text(results: dict[str, Result], every: float, faults: list[str]) -> str:
    """The figures for people."""
    lines = [f"a learner rank killed every {every:g} s", f"{'':<18} exit  seconds  kills  attempts  states"]
    for name, result in results.items():
        states = ", ".join(sorted(set(result.states.values())))
        lines.append(
            f"{name:<18} {result.exit_code:>4}  {result.seconds:>7.1f}  {result.kills:>5}  {result.attempts:>8}  {states}"
        )
    ratio = results["killed"].seconds / results["undisturbed"].seconds
    lines.append(f"killed took {ratio:.2f} times as long as undisturbed")
    lines += [f"without progress: {reason}" for reason in results["without progress"].reasons]
    lines.append(f"differences found: {len(faults)}")
    return "\n".join([*lines, *(f"  {fault}" for fault in faults)])


if __name__ == "__main__":
    command.run(main)
