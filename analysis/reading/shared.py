"""What is wrong with every cell alike, said once. Pure."""

import re
from collections.abc import Collection

from analysis.reading.raw_rows import Complaints

_NUMBER = re.compile(r"(?<!\w)-?\d[\d.]*(e[+-]?\d+)?")  # not the K of avg_at_K


def say_once(complaints: Complaints, cells: Collection[str], source: str, holder: str) -> None:
    """Move what all cells have in common to ``holder``, with one cell's words as the example.

    cells: those with rows; fewer than two have nothing in common. Sentences that differ in their numbers only are the same.
    """
    if len(cells) < 2:
        return
    first = min(cells)
    kinds = [{_kind(sentence) for sentence in complaints.get(cell, [])} for cell in cells]
    common = set.intersection(*kinds)
    if not common:
        return
    complaints[holder] += [
        f"every cell of {source}, such as {first}: {sentence}"
        for sentence in complaints[first]
        if _kind(sentence) in common
    ]
    for cell in cells:
        complaints[cell] = [sentence for sentence in complaints[cell] if _kind(sentence) not in common]


def _kind(sentence: str) -> str:
    return re.sub(r"\brows\b", "row", re.sub(r"#(, #)+( and more)?", "#", _NUMBER.sub("#", sentence)))
