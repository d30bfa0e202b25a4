"""``report.html``: one file that asks for nothing from elsewhere."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from analysis.findings import Analysis
from analysis.report.blocks import Picture, Section, Table
from analysis.report.words import UNIT_WORDS
from analysis.tables import metric_label

_SUBSCRIPT = re.compile(r"\b(B)_(p)\b|\b(log)(2|10)\b|\b([CRM])(0)\b|\b(C)(mid)\b")


@dataclass(frozen=True)
class Drawing:
    """A figure as the page shows it."""

    title: str
    caption: str
    svg: str | None
    """An inline element; None where the figure could not be drawn."""
    needs: str
    """What the figure needs, in words, for that case."""


def html_page(
    analysis: Analysis,
    topics: Mapping[str, Sequence[str]],
    sections: Sequence[Section],
    drawings: Mapping[str, Drawing],
) -> str:
    """The whole page. topics: the verdict's sentences. drawings: by the figure's key."""
    templates = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(
        loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["symbols"] = symbols
    environment.tests["table"] = lambda block: isinstance(block, Table)
    environment.tests["picture"] = lambda block: isinstance(block, Picture)
    cells = analysis.tables.history["cell"].nunique()
    return environment.get_template("report.html.j2").render(
        name=analysis.tables.name,
        metric=metric_label(analysis.metric),
        unit=UNIT_WORDS[analysis.options.compute],
        cells=cells,
        base=analysis.base_reward,
        topics=topics,
        missing=analysis.missing,
        sections=sections,
        drawings={
            key: (drawing, Markup(drawing.svg) if drawing.svg else None) for key, drawing in drawings.items()
        },
    )


def symbols(text: str) -> Markup:
    """A text, escaped, with the indices of the field's symbols (B_p, C0, log2) set as such."""

    def lowered(found: re.Match[str]) -> str:
        letter, index = (part for part in found.groups() if part)
        return f"{letter}<sub>{index}</sub>"

    return Markup(_SUBSCRIPT.sub(lowered, str(escape(text))))
