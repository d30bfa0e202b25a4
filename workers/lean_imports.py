"""Imports of large libraries without what they would take along for nothing."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = ("scipy", "sklearn")
"""transformers imports them where they are installed, for losses of object detection and for assisted decoding; so does vLLM
through it. Every engine, learner and controller would start a second or more later."""


@contextmanager
def without_unused() -> Iterator[None]:
    """Within it these packages are not to be found; afterwards they can be imported as ever.

    transformers looks for each package once and remembers the answer, so what it imports later does without them too.
    """
    hidden = [name for name in UNUSED if name not in sys.modules]
    # An entry of None is Python's own way to say that a module cannot be imported.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
