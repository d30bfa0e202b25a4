"""Strikes real grids at random times with faults of every kind, resumes them, and compares their ends with an undisturbed run's.

    python -m benchmarks.fault_campaign --faults 50 --seed 0

CPU grids of the shipped model on real Ray (two nodes), vLLM, FSDP and MLflow. Ends with exit code 1 when anything differs by a bit.
The same seed gives the same plan: kinds in their order, delays and choices of victims.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks import command
from benchmarks.site import GridOptions, How, Site, cells_of, committed_step
from benchmarks.strikes import Kind
from benchmarks.under_fire import GRID_SECONDS, UnderFire, small_disk, steps_made

OPTIONS = GridOptions(compute_rollouts=4096)
"""Cells of 128 and 64 steps."""
DELAY_SECONDS = (0.0, 6.0)
"""Between the run's going on and the next strike."""
MEND_SECONDS = (1.0, 5.0)
"""Between a strike and the mending of its surroundings."""
UNHURRIED_SECONDS = 30.0
TRIES = 4
"""How often one planned strike looks for its victim or fails to come through before it is given up."""


@dataclass(frozen=True)
class Planned:
    """One strike of the plan."""

    kind: Kind
    delay: float
    mend_delay: float
    seed: int


@dataclass
class Outcome:
    """What came of the strikes of one kind."""

    struck: int = 0
    seconds: list[float] = field(default_factory=list)
    """From each strike until a cell had got further than it was."""


@dataclass
class Campaign:
    """Everything that is counted."""

    kinds: dict[Kind, Outcome] = field(default_factory=lambda: {kind: Outcome() for kind in Kind})
    grids: int = 0
    starts: int = 0
    steps_made: int = 0
    steps_needed: int = 0
    differences: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    disk: str = "tmpfs"

    @property
    def struck(self) -> int:
        """Faults that came through."""
        return sum(outcome.struck for outcome in self.kinds.values())


def make_plan(faults: int, seed: int) -> list[Planned]:
    """A plan of strikes, all kinds equally often, as far as their number divides."""
    source = random.Random(seed)
    kinds: list[Kind] = []
    while len(kinds) < faults:
        kinds += source.sample(list(Kind), len(Kind))
    return [
        Planned(kind, source.uniform(*DELAY_SECONDS), source.uniform(*MEND_SECONDS), source.getrandbits(32))
        for kind in kinds[:faults]
    ]


class Say:
    """Progress lines with the seconds since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"{time.monotonic() - self._started:7.1f} s  {text}", file=sys.stderr, flush=True)


def run_campaign(folder: Path, faults: int, seed: int, options: GridOptions, say: Say) -> Campaign:
    """Strike until ``faults`` faults have come through."""
    in_flight = options.learners * options.slots * options.commit_steps
    campaign = Campaign()
    queue = make_plan(faults, seed)
    tries: dict[Planned, int] = {}
    with Site(folder, cpus=2, second_node_cpus=2) as site:
        say(f"undisturbed run; everything lies in {folder}")
        undisturbed = site.write_grid("undisturbed", options)
        code, output = site.finish(undisturbed, GRID_SECONDS)
        if code != 0:
            raise RuntimeError(f"the undisturbed run ended with {code}:\n{output}")
        reference = site.run_dir(undisturbed)
        needed = sum(committed_step(reference, cell) for cell in cells_of(reference))
        if steps_made(reference) != needed:
            raise RuntimeError("the attempts' logs do not tell each step")
        while queue:
            name = f"fire{campaign.grids}"
            how: How = "direct" if campaign.grids % 2 else "job"
            with small_disk(folder / "runs" / name) as mounted:
                campaign.disk = "tmpfs" if mounted else "RLIMIT_FSIZE of the learner"
                say(f"{name} as a {how}; {len(queue)} strikes left")
                # Ray kills a stopped job after 3 s; only without it a cell has the time that any commit may need.
                grace = UNHURRIED_SECONDS if how == "direct" else options.grace_seconds
                path = site.write_grid(name, replace(options, grace_seconds=grace))
                grid = UnderFire(
                    site, path, how, disk=mounted, seed=seed + campaign.grids, in_flight=in_flight, say=say
                )
                _strike_out(grid, queue, tries, campaign)
                found = grid.end(reference)
                say(f"{name} has finished with {len(found)} differences; {campaign.struck} faults so far")
                campaign.differences += [f"{name}: {difference}" for difference in found]
                campaign.starts += grid.starts
                campaign.steps_made += steps_made(grid.run_dir)
                campaign.steps_needed += needed
                campaign.grids += 1
    return campaign


def _strike_out(grid: UnderFire, queue: list[Planned], tries: dict[Planned, int], campaign: Campaign) -> None:
    """Take strikes from the queue as long as the grid runs."""
    committed = 0
    while grid.wait_for_progress(committed):
        fitting = [planned for planned in queue if grid.how == "direct" or planned.kind is not Kind.CLOCK]
        if not fitting:
            return
        planned = fitting[0]
        time.sleep(planned.delay)
        if grid.finished():
            return
        queue.remove(planned)
        tries[planned] = tries.get(planned, 0) + 1
        seconds = grid.suffer([planned.kind], random.Random(planned.seed), planned.mend_delay)
        if seconds is not None:
            campaign.kinds[planned.kind].struck += 1
            campaign.kinds[planned.kind].seconds.append(seconds)
        elif tries[planned] < TRIES:
            queue.append(planned)
        else:
            campaign.given_up.append(f"{planned.kind}: no strike came through in {TRIES} tries")
        committed = grid.committed()


def as_json(campaign: Campaign) -> str:
    """The figures of a campaign."""
    kinds = {
        str(kind): {
            "struck": outcome.struck,
            "mean_seconds": statistics.fmean(outcome.seconds) if outcome.seconds else None,
        }
        for kind, outcome in campaign.kinds.items()
    }
    figures = {
        "faults": campaign.struck,
        "kinds": kinds,
        "grids": campaign.grids,
        "starts": campaign.starts,
        "steps_repeated": campaign.steps_made - campaign.steps_needed,
        "steps": campaign.steps_made,
        "full_disk": campaign.disk,
        "not_struck": campaign.given_up,
        "differences": campaign.differences,
    }
    return json.dumps(figures, indent=1)


def as_text(campaign: Campaign) -> str:
    """The same for people."""
    lines = [f"{'fault':<50} struck   went on after (mean)"]
    for kind, outcome in campaign.kinds.items():
        mean = f"{statistics.fmean(outcome.seconds):6.1f} s" if outcome.seconds else "     -"
        lines.append(f"{kind:<50} {outcome.struck:>6}   {mean}")
    repeated = campaign.steps_made - campaign.steps_needed
    share = repeated / max(1, campaign.steps_made)
    lines += [
        f"{'all':<50} {campaign.struck:>6}   (disk filled: {campaign.disk})",
        f"grids: {campaign.grids}, starts of their controllers: {campaign.starts}",
        f"work repeated: {repeated} of {campaign.steps_made} steps ({share:.1%})",
        *campaign.given_up,
        f"differences found: {len(campaign.differences)}",
        *(f"  {difference}" for difference in campaign.differences),
    ]
    return "\n".join(lines)


def main() -> int:
    """Print the figures; 1 when anything differs or too few faults came through."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--faults", type=command.count, default=50, help="faults that must come through")
    parser.add_argument("--seed", type=command.natural, default=0, help="of the plan")
    parser.add_argument(
        "--ranks",
        type=int,
        choices=(1, 2),
        default=1,
        help="two learner groups of one rank, or one group of two, whose collectives are struck too",
    )
    parser.add_argument(
        "--stall-seconds",
        type=command.seconds,
        default=10.0,
        help="the grids' failures.stall_seconds; more on a busy machine",
    )
    command.add_folder(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="iso-campaign-", dir="/tmp"))
    options = replace(
        OPTIONS,
        ranks=arguments.ranks,
        learners=2 // arguments.ranks,
        slots=arguments.ranks,
        stall_seconds=arguments.stall_seconds,
    )
    campaign = run_campaign(folder, arguments.faults, arguments.seed, options, Say())
    print(as_json(campaign) if arguments.format == "json" else as_text(campaign))
    if campaign.differences or campaign.struck < arguments.faults:
        return 1
    if arguments.folder is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    command.run(main)
