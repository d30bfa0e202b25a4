"""A controller whose clock jumps when told: ``python -m benchmarks.jumping_clock GRID RUN_DIR OFFSET_FILE [--resume]``.

OFFSET_FILE holds seconds to add to both clocks of the run (nothing at first). Beside it, ``<OFFSET_FILE>.seen`` gets the offset as
soon as the run has looked at its clock. The machine's clock is never touched.
"""

import argparse
import sys
import time
from pathlib import Path

from orchestrator.clock import Clock
from orchestrator.control.running import resume_run, run_grid


class JumpingClock:
    """The machine's clocks plus what a file says."""

    def __init__(self, offset_file: Path) -> None:
        self._file, self._seen = offset_file, seen_file(offset_file)
        self._last = 0.0

    def monotonic(self) -> float:
        """Seconds, as ``time.monotonic``, moved by the offset."""
        return time.monotonic() + self._offset()

    def wall(self) -> float:
        """Unix seconds, moved by the offset."""
        return time.time() + self._offset()

    def _offset(self) -> float:
        try:
            offset = float(self._file.read_text())
        except (FileNotFoundError, ValueError):
            return self._last
        if offset != self._last:
            self._last = offset
            self._seen.write_text(str(offset))
        return offset


def seen_file(offset_file: Path) -> Path:
    """Where a run's clock says which offset it has shown."""
    return offset_file.with_name(offset_file.name + ".seen")


def main() -> int:
    """Run or resume; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("grid", type=Path)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("offset_file", type=Path)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    jumping = JumpingClock(arguments.offset_file)
    clock = Clock(monotonic=jumping.monotonic, wall=jumping.wall)
    if arguments.resume:
        return resume_run(arguments.run_dir, clock=clock)
    return run_grid(arguments.grid, arguments.run_dir, clock)


if __name__ == "__main__":
    sys.exit(main())
