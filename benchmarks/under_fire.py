"""One grid under fire: started again whenever it ends early, struck, watched until it goes on, and compared at its end."""

import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.comparison import folder_differences, leftovers, tracking_differences
from benchmarks.site import How, Running, Site, cells_of, committed_step, controllers_of, state
from benchmarks.strikes import Kind, NothingToStrike, Strike, Target, strike

DISK_MEGABYTES = 96
"""Holds two cells with two checkpoints each, and the report."""
PROOF_SECONDS = 90.0
GOING_ON_SECONDS = 300.0
"""How long a run may take from a strike until a cell has got further than it was."""
GRID_SECONDS = 1800.0
FOR_OPERATORS = (0, 3, 130)
"""Ends of a controller that an operator answers by starting it again; 1 and a signal are looked at more closely."""


@dataclass(frozen=True)
class End:
    """How the run folder stood when a controller had ended."""

    exit_code: int
    states: dict[str, str]
    committed: dict[str, int]
    """By cell, the step that it would resume from."""
    made: dict[str, int]
    """By cell, the last step that its last attempt made."""


class UnderFire:
    """A grid, its present controller, and what was not as it should be.

    Args:
        site: where it runs.
        grid: its YAML file.
        how: whether controllers are Ray jobs or started directly, with a clock that can jump; may be changed for the next start.
        disk: whether its run folder lies on a small disk of its own, which can be filled.
        seed: of the choice between ``run`` and ``resume``.
        in_flight: steps that may be committed after a strike without the run going on: those that had been sampled before it.
        say: told of everything that happens.
    """

    def __init__(
        self,
        site: Site,
        grid: Path,
        how: How,
        *,
        disk: bool,
        seed: int,
        in_flight: int,
        say: Callable[[str], None],
    ) -> None:
        self.site, self.grid, self.how = site, grid, how
        self.run_dir = site.run_dir(grid)
        self.starts = 0
        self.faults: list[str] = []
        """Ends of controllers and cells that no strike accounts for."""
        self.ends: list[End] = []
        """Ends of controllers before the last one."""
        self._disk = self.run_dir if disk else None
        self._offset_file = site.folder / f"{grid.stem}.offset"
        self._random = random.Random(seed)
        self._in_flight = in_flight
        self._say = say
        self._killed = False
        self._mender = ThreadPoolExecutor(max_workers=1)
        self._mending: list[Future[None]] = []
        self.running = self._start()

    def _start(self) -> Running:
        self._wait_for_mending()
        self.starts += 1
        self._killed = False
        resume = (self.run_dir / "grid.yaml").exists() and self._random.random() < 0.5
        if self.how == "direct":
            return self.site.run_with_jumping_clock(self.grid, self._offset_file, resume=resume)
        if resume:
            address = self.site.services.ray_address
            return self.site.command("resume", str(self.run_dir), "--address", address)
        return self.site.submit(self.grid)

    def finished(self) -> bool:
        """Whether the run has come to its end; it is started again where it has ended before."""
        if not self.running.ended():
            return False
        code, output = self.running.process.returncode, self.running.output
        if code == 0 and "MLflow has missed" not in output:
            return True
        end = _end(code, self.run_dir)
        self.ends.append(end)
        last = output.strip().splitlines()[-1:] or [""]
        self._say(f"the controller has ended with {code} and is started again ({last[0]})")
        if (code not in FOR_OPERATORS and not self._killed) or "Traceback (most" in output:
            self.faults.append(f"a controller ended with {code}: {last[0]} ({self.running.log})")
        failed = [
            cell for cell in cells_of(self.run_dir) if state(self.run_dir, cell).get("state") == "failed"
        ]
        for cell in failed:
            self.faults.append(f"{cell} failed: {state(self.run_dir, cell)['reason']}")
        if failed:
            self.site.command("retry", str(self.run_dir), "--failed", "--reset-budget").wait(120)
        self.running = self._start()
        return False

    def committed(self) -> int:
        """Steps of all cells that would not be repeated."""
        return sum(committed_step(self.run_dir, cell) for cell in cells_of(self.run_dir))

    def wait_for_progress(self, beyond: int) -> bool:
        """Wait until more is committed; False when the run has finished instead."""
        deadline = time.monotonic() + GOING_ON_SECONDS
        while self.committed() <= beyond:
            if self.finished():
                return self.committed() > beyond
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.grid.stem} does not go on: {self.running.log}")
            time.sleep(0.05)
        return True

    def suffer(self, kinds: Sequence[Kind], source: random.Random, mend_delay: float = 0.0) -> float | None:
        """Take strikes, one right after the other; the seconds until the run went on, None when one did not come through."""
        before, struck_at = self.committed(), time.monotonic()
        made: list[Strike] = []
        for kind in kinds:
            killed = any(earlier in ENDS_CONTROLLER for earlier in kinds[: len(made)])
            target = Target(
                self.site, self.run_dir, self.running, self._disk, killed, self._offset_file, source
            )
            try:
                made.append(strike(kind, target))
            except (NothingToStrike, psutil.NoSuchProcess) as reason:
                self._say(f"{kind}: nothing to strike ({reason})")
                break
            self._killed = self._killed or kind in ENDS_CONTROLLER
        deadline = time.monotonic() + PROOF_SECONDS
        while not (came_through := all(one.struck() for one in made)) and time.monotonic() < deadline:
            time.sleep(0.05)
        # The run is to go on by itself meanwhile, as far as it can.
        self._mending += [self._mender.submit(_mend, one, mend_delay) for one in made]
        victims = "; ".join(f"{kind}: {one.victim}" for kind, one in zip(kinds, made, strict=False))
        if not came_through or len(made) < len(kinds):
            self._say(f"did not come through: {victims}")
            return None
        self.wait_for_progress(before + self._in_flight)
        seconds = time.monotonic() - struck_at
        self._say(f"{victims}; went on after {seconds:.1f} s")
        return seconds

    def _wait_for_mending(self) -> None:
        while self._mending:
            self._mending.pop().result()

    def wait_for_end(self) -> None:
        """Wait until every cell is finished and MLflow has it all."""
        deadline = time.monotonic() + GRID_SECONDS
        while not self.finished():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.grid.stem} does not end: {self.running.log}")
            time.sleep(0.1)
        self._wait_for_mending()

    def stop(self) -> None:
        """Kill what still runs; for a grid that is given up."""
        for process in controllers_of(self.run_dir):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if not self.running.ended():
            self.running.process.kill()
            self.running.process.wait()
        self._mender.shutdown()

    def end(self, reference: Path) -> list[str]:
        """Wait for the run's end; in words what is not as it should be, compared with an undisturbed run."""
        self.wait_for_end()
        found = [*self.faults, *folder_differences(self.run_dir, reference)]
        found += tracking_differences(self.site.mlflow_uri, self.grid.stem, self.run_dir)
        return found + [f"left behind: {left}" for left in leftovers(self.site, self.run_dir)]


def _end(exit_code: int, run_dir: Path) -> End:
    cells = [cell for cell in cells_of(run_dir) if state(run_dir, cell)]
    steps = {cell: _steps_made(run_dir, cell) for cell in cells}
    return End(
        exit_code,
        states={cell: state(run_dir, cell)["state"] for cell in cells},
        committed={cell: committed_step(run_dir, cell) for cell in cells},
        made={cell: made[-1] for cell, made in steps.items() if made},
    )


def _mend(made: Strike, delay: float) -> None:
    time.sleep(delay)
    made.mend()


ENDS_CONTROLLER = (Kind.CONTROLLER, Kind.SIGTERM, Kind.CUT_HISTORY, Kind.CUT_TEMPORARY)


@contextmanager
def small_disk(folder: Path, megabytes: int = DISK_MEGABYTES) -> Iterator[bool]:
    """A file system of its own on a folder, where mounting is allowed; whether it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "isocompute-campaign", str(folder)]
    mounted = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def steps_made(run_dir: Path) -> int:
    """Updates that the attempts at all cells have made, as their logs tell."""
    return sum(len(_steps_made(run_dir, cell)) for cell in cells_of(run_dir))


def _steps_made(run_dir: Path, cell: str) -> list[int]:
    """The steps of all attempts at a cell, in the order in which they were made."""
    logs = sorted(run_dir.glob(f"cells/{cell}/attempts/*/log.txt"), key=lambda path: int(path.parent.name))
    return [
        int(line.rpartition(" ")[2])
        for log in logs
        for line in log.read_text().splitlines()
        if line.rpartition(" ")[0].endswith(" step")
    ]
