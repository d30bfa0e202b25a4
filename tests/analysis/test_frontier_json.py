"""``frontier.json`` holds what docs/frontier_json.md says, and nothing else."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.diagnostics.diagnosis import diagnose
from analysis.findings import Analysis, analyse
from analysis.options import FitOptions
from analysis.reading.sources import read_run
from analysis.report.frontier_json import frontier_json, json_bytes
from analysis.report.words import verdict
from analysis.synthetic import SyntheticGrid, SyntheticLaw, synthetic_grid
from tests.analysis.small_run import set_state, write_small_run

PAGE = Path(__file__).parents[2] / "docs" / "frontier_json.md"
PLAIN: dict[str, Any] = {"text": str, "integer": int, "number": (int, float), "boolean": bool}


@cache
def documented() -> dict[str, dict[str, str]]:
    """By object the type of each key, as the page's tables state them."""
    objects: dict[str, dict[str, str]] = {}
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        keys = re.findall(r"^\| `(\w+)` \| ([\w ]+?) \|", part, flags=re.MULTILINE)
        assert len(keys) == len(dict(keys)) > 0
        objects[part.split("\n")[0]] = dict(keys)
    return objects


def check(value: Any, kind: str, path: str, seen: set[tuple[str, str]]) -> None:
    """The value is of the documented type; ``seen`` collects the keys of objects that hold something."""
    if kind.startswith("list of "):
        assert isinstance(value, list), f"{path} is {value!r}, not a {kind}"
        for item in value:
            check(item, kind.removeprefix("list of "), f"{path}[]", seen)
    elif kind.endswith(" or null"):
        if value is not None:
            check(value, kind.removesuffix(" or null"), path, seen)
    elif kind == "integers":
        check(value, "list of integer", path, seen)
    elif kind in PLAIN:
        right = isinstance(value, PLAIN[kind]) and (kind == "boolean" or not isinstance(value, bool))
        assert right, f"{path} is {value!r}, not a {kind}"
    else:
        keys = documented()[kind]
        assert set(value) == set(keys), f"{path}: {set(value) ^ set(keys)} in the file or on the page only"
        for key, of_key in keys.items():
            check(value[key], of_key, f"{path}.{key}", seen)
            if (
                value[key] is not None
                and value[key] != []
                and value[key] != [None] * len(_listed(value[key]))
            ):
                seen.add((kind, key))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def content_of(analysis: Analysis) -> dict[str, Any]:
    """As written to the file and read back by a strict reader."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    diagnosis = diagnose(analysis)
    sentences = [words for topic in verdict(analysis, diagnosis).values() for words in topic]
    content = frontier_json(analysis, diagnosis, sentences)
    read = json.loads(json_bytes(content), parse_constant=refuse)
    assert read == content
    return read


def change_rows(run: Path, cell: str, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    path = run / "cells" / cell / "history.jsonl"
    rows = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_holes(run: Path) -> None:
    """One failed cell, and one with too few points whose probe has another K."""

    def cut(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows[2]["avg_at_4"] = float("nan")
        for row in rows:
            row["train_probe_right"] = [0] * len(row["train_probe_right"])
            row |= {"train_probe_avg_at_4": 0.0}
            del row["train_probe_avg_at_8"]
        return rows[:3]

    set_state(run, "bp16-n4-s0", "failed", 7, "worker lost")
    change_rows(run, "bp16-n64-s0", cut)


def make_falling(run: Path) -> None:
    """One cell that loses all validation problems, and a training problem that the base model never solves."""

    def fall(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        none = [0] * len(rows[-1]["eval_right"])
        rows[-1] |= {"avg_at_4": 0.0, "best_at_4": 0.0, "worst_at_4": 0.0, "eval_right": none}
        return rows

    change_rows(run, "bp16-n16-s0", fall)
    base = json.loads((run / "base.json").read_text())
    base["train_probe_right"][0] = 0
    base["train_probe_avg_at_8"] = sum(base["train_probe_right"]) / 8 / len(base["train_probe_right"])
    (run / "base.json").write_text(json.dumps(base))


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Analysis]:
    """A law whose floor and plateau the grid shows, and runs with holes, training columns and a falling cell."""
    # From n = 16 to n = 256, inside a grid from 8 to 1024.
    law = SyntheticLaw(rise=4.0, steepness=6.0, log10_midpoint=5.9, log2_floor=4.0)
    values = tuple(2**i for i in range(3, 11))
    design = SyntheticGrid(law, (32, 64), values, seeds=(0, 1), validation_problems=100)
    tables = synthetic_grid(design, np.random.default_rng(0))
    runs = [write_small_run(tmp_path_factory.mktemp("runs") / name) for name in ("holes", "falling")]
    make_holes(runs[0])
    make_falling(runs[1])
    return {
        "law": analyse(tables, FitOptions(replicates=30)),
        "falling": analyse(read_run(runs[1]), FitOptions(replicates=30)),
        "holes": analyse(read_run(runs[0]), FitOptions(replicates=30)),
        "bare": analyse(read_run(runs[0]), FitOptions(replicates=0, compute="tokens")),
    }


@pytest.fixture(scope="module")
def contents(studies: dict[str, Analysis]) -> dict[str, dict[str, Any]]:
    """The file of each study."""
    return {name: content_of(analysis) for name, analysis in studies.items()}


def test_every_key_is_documented_with_its_type_and_every_documented_key_occurs(
    contents: dict[str, dict[str, Any]],
) -> None:
    seen: set[tuple[str, str]] = set()
    for name, content in contents.items():
        check(content, "File", name, seen)
    everything = {(kind, key) for kind, keys in documented().items() for key in keys}
    assert everything - seen == set()


def test_columns_have_one_length_and_hold_the_analysis(
    studies: dict[str, Analysis], contents: dict[str, dict[str, Any]]
) -> None:
    analysis, content = studies["law"], contents["law"]
    frontier = content["frontier"]
    assert {len(column) for column in frontier.values()} == {len(analysis.land.compute)}
    middle = analysis.frontier.points[60]
    assert frontier["reward"][60] == middle.reward
    assert (frontier["reward_low"][60], frontier["reward_high"][60]) == middle.reward_interval
    assert frontier["not_worse_n"][60] == list(middle.not_worse_n or ())
    assert [question["title"] for question in content["questions"]][:2] == ["B_p = 32", "B_p = 64"]
    fit = analysis.frontier.law.fit
    assert fit is not None
    assert content["law"]["parameters"]["plateau"] == fit.plateau
    assert content["law"]["parameters"]["x0"]["value"] == fit.midpoint
    assert 2 ** content["law"]["parameters"]["L_plus_b"]["low"] < fit.plateau


def test_the_isotonic_corners_redraw_the_isotonic_curve(
    studies: dict[str, Analysis], contents: dict[str, dict[str, Any]]
) -> None:
    for curve, written in zip(studies["law"].curves, contents["law"]["allocations"], strict=True):
        at = np.log10(written["isotonic"]["compute"])
        redrawn = np.interp(curve.isotonic.log10_compute, at, written["isotonic"]["reward"])
        np.testing.assert_allclose(redrawn, curve.isotonic.reward, atol=1e-12)


def test_what_is_not_identified_is_null(contents: dict[str, dict[str, Any]]) -> None:
    content = contents["bare"]
    assert content["law"]["parameters"] is None
    assert content["resampling"] == {"over": [], "missing": ["everything: no replicates were asked for"]}
    assert set(content["frontier"]["reward_low"]) == {None}
    cells = {cell["cell"]: cell for cell in content["cells"]}
    assert cells["bp16-n64-s0"]["fit"] is None
    assert cells["bp16-n64-s0"]["not_fitted"] == "2 usable points of avg_at_4; a curve needs at least 4"
    assert cells["bp16-n4-s0"]["state_reason"] == "worker lost"


def test_lists_of_numbers_stand_on_one_line_and_texts_stay_as_they_are() -> None:
    content = {"a": [1.5, None], "b": ["[\n 1,\n 2\n]", "é"], "c": [[1], []], "d": {}}
    written = json_bytes(content)
    assert json.loads(written) == content
    assert b'"a": [1.5, null]' in written
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_bytes({"a": float("nan")})
