"""What a page is made of: sections of figures, tables and paragraphs, still without markup."""

from collections.abc import Sequence
from dataclasses import dataclass

COLLAPSED_ROWS = 40
"""Tables with more rows are folded until the reader opens them."""


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text_columns: frozenset[str] = frozenset()
    """Columns of words, set flush left; the others hold numbers."""

    @property
    def is_long(self) -> bool:
        """Whether it is folded."""
        return len(self.rows) > COLLAPSED_ROWS


@dataclass(frozen=True)
class Picture:
    """A figure of the registry, by its key."""

    key: str


@dataclass(frozen=True)
class Prose:
    """Paragraphs."""

    sentences: tuple[str, ...]


Block = Table | Picture | Prose


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    anchor: str
    blocks: tuple[Block, ...]
