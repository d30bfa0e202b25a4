"""What an error that comes through Ray is about."""

from ray.exceptions import RayTaskError


def root_cause(error: BaseException) -> BaseException:
    """What a worker raised, without Ray's wrapping."""
    return error.cause if isinstance(error, RayTaskError) and error.cause is not None else error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for tables."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""
