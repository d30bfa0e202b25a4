"""Fits on all cores."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


def in_threads(function: Callable[[T], U], items: Iterable[T]) -> list[U]:
    """Map on all cores, results in order: the array operations of a fit release the interpreter."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, items))
