"""What the documentation shows can be run as it stands."""

import re
import textwrap
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_of_the_python_api_runs_and_writes_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (DOCS / "analysis.md").read_text()
    block = re.search(r"## In Python\n\n((?:    .*\n|\n)+)", text)
    assert block
    monkeypatch.chdir(tmp_path)
    exec(compile(textwrap.dedent(block[1]), "docs/analysis.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "log2 n* = L" in printed  # the generator's law is identified
    assert "Allocation(rollouts_per_problem=" in printed
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
