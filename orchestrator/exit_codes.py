"""What the commands end with."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What ``run``, ``resume``, ``submit`` and ``quickstart`` end with; the last two hold for every command."""

    ALL_FINISHED = 0
    """Every cell is finished, cancelled, or has diverged, which is a result."""
    CELLS_FAILED = 1
    """All other cells are done, but some failed: ``explain`` says why, ``resume --failed`` tries them again."""
    REFUSED = 2
    """Nothing was started: wrong input, or the cluster, MLflow or the run folder is not fit."""
    UNFINISHED = 3
    """Cells are paused (storage was full, say), or the run was broken off; the same command continues it."""
    INTERNAL_ERROR = 70
    """A fault of isocompute itself (``EX_SOFTWARE`` of sysexits)."""
    INTERRUPTED = 130
    """Told to stop; the same command continues."""
