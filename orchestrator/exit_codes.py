"""What the commands end with."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What ``run``, ``submit`` and ``quickstart`` end with; the last two hold for every command."""

    ALL_FINISHED = 0
    """Every cell is finished, or has diverged, which is a result."""
    CELLS_FAILED = 1
    """A cell failed, or the run was broken off; the same command continues it."""
    REFUSED = 2
    """Nothing was started: wrong input, or the cluster, MLflow or the run folder is not fit."""
    INTERNAL_ERROR = 70
    """A fault of isocompute itself (``EX_SOFTWARE`` of sysexits)."""
    INTERRUPTED = 130
    """Told to stop; the same command continues."""
