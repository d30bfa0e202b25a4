"""The record of the pools: what is read of it, how busy they were, which stretch is drawn, and what is said."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis.diagnostics.diagnosis import diagnose
from analysis.diagnostics.pools import PoolsAtWork, pools_at_work
from analysis.figures import FIGURES, svg_bytes
from analysis.findings import analyse
from analysis.options import FitOptions
from analysis.reading.phases import read_phases
from analysis.reading.raw_rows import Complaints
from analysis.reading.settings import merge
from analysis.report.blocks import Picture, Prose
from analysis.report.pools import pools_blocks
from tests.analysis.conftest import cell_rows, tables_of

START = 1_790_000_000.0


def line(
    member: str, kind: str, begin: float, busy: float, waited: float = 0.0, **other: Any
) -> dict[str, Any]:
    """A line of the record as docs/scheduling.md describes it."""
    fields = {"member": member, "kind": kind, "cell": "bp8-n4-s0", "step": 1, "started_at": START + begin}
    fields |= {"busy_seconds": busy, "waited_seconds": waited, "sequences": 32, "tokens": 160}
    return fields | {"accelerators": 1, "failed": False} | other


def write(run: Path, name: str, lines: list[dict[str, Any]]) -> Path:
    path = run / "phases" / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(fields) + "\n" for fields in lines))
    return path


def record(*starts: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(
        [fields | {"start": f"e{number}"} for number, lines in enumerate(starts) for fields in lines]
    )


def at_work(*starts: list[dict[str, Any]]) -> PoolsAtWork:
    found = pools_at_work(record(*starts))
    assert found is not None
    return found


def drawn(*starts: list[dict[str, Any]]) -> Figure:
    (kind,) = (kind for kind in FIGURES if kind.key == "pools")
    tables = replace(tables_of(cell_rows(4, (0.3, 0.5, 3000.0, 2.0))), phases=record(*starts))
    analysis = analyse(tables, FitOptions(replicates=0))
    figure = kind.draw(analysis, diagnose(analysis))
    assert figure is not None
    return figure


def bars(figure: Figure) -> dict[str, list[tuple[float, float, float]]]:
    """By kind: the middle of the row, begin and width of each bar."""
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for collection in figure.axes[0].collections:
        for path in collection.get_paths():
            box = path.get_extents()
            found[str(collection.get_label())].append(((box.y0 + box.y1) / 2, box.x0, box.width))
    return dict(found)


TWO_STARTS = (
    # 10 s: sampler 0 for 6 s, sampler 1 for 1 s, learner 0 for 3 s.
    [
        line("sampler 0", "sampling", 0.0, 6.0, 0.5),
        line("sampler 1", "evaluation", 1.0, 1.0, 2.5),
        line("learner 0", "learning", 7.0, 3.0),
    ],
    # An hour later, 4 s: sampler 0 for 2 s, learner 0 for 4 s.
    [line("sampler 0", "sampling", 3600.0, 2.0, 3.0), line("learner 0", "learning", 3600.0, 4.0, 1.0)],
)


def test_a_pool_s_busy_share_is_of_the_time_of_its_members_while_the_run_was_started() -> None:
    samplers, learners = at_work(*TWO_STARTS).uses
    assert (samplers.pool, learners.pool) == ("sampler", "learner")
    assert samplers.busy_share == pytest.approx((6 + 1 + 2) / (2 * 10 + 1 * 4))
    assert learners.busy_share == pytest.approx((3 + 4) / (10 + 4))
    assert (samplers.mean_wait, learners.mean_wait) == pytest.approx((2.0, 0.5))


def test_the_words_tell_shares_waits_and_how_long_the_record_is() -> None:
    picture, prose = pools_blocks(at_work(*TWO_STARTS))
    assert picture == Picture("pools")
    assert prose == Prose(
        (
            "Busy over the whole record (14.0 seconds in 2 starts of the run): samplers 38%, learners 50%. "
            "A call waited 1.40 s in its queue on average (samplers 2.00 s, learners 0.50 s).",
        )
    )


def test_the_stretch_is_forty_phases_of_the_busiest_member_in_the_middle() -> None:
    learner = [line("learner 0", "learning", 10.0 * step, 9.0) for step in range(100)]
    sampler = [line("sampler 0", "sampling", 5.0 * step, 1.0) for step in range(200)]
    stretch = at_work([*sampler, *learner]).stretch
    assert stretch.window == pytest.approx((300.0, 699.0))  # phases 30 to 69
    own = stretch.bars[stretch.bars["member"] == "learner 0"]
    assert own["begin"].tolist() == pytest.approx([10.0 * step for step in range(30, 70)])
    assert (stretch.bars["member"] == "sampler 0").sum() == 80  # those that begin at 300, 305, ... 695


def test_a_phase_that_only_reaches_into_the_window_is_in_the_stretch() -> None:
    busiest = [line("sampler 0", "sampling", 100.0 + step, 1.0) for step in range(50)]
    ended, reaching = line("learner 0", "learning", 95.0, 10.0), line("learner 1", "learning", 95.0, 10.5)
    begun, later = line("learner 0", "learning", 144.5, 10.0), line("learner 1", "learning", 145.0, 1.0)
    stretch = at_work([ended, reaching, *busiest, begun, later]).stretch
    assert stretch.window == pytest.approx((105.0 - 95.0, 145.0 - 95.0))
    others = stretch.bars[stretch.bars["member"] != "sampler 0"]
    assert others["member"].tolist() == ["learner 1", "learner 0"]
    assert others["begin"].tolist() == pytest.approx([0.0, 144.5 - 95.0])


def test_the_start_that_kept_the_pools_busiest_is_shown() -> None:
    assert at_work(*TWO_STARTS).stretch.window == pytest.approx((0.0, 6.0))
    assert at_work(*reversed(TWO_STARTS)).stretch.window == pytest.approx((0.0, 6.0))


def test_of_many_members_the_busiest_of_each_pool_have_a_row_and_the_others_are_counted() -> None:
    samplers = [line(f"sampler {number}", "sampling", 0.0, 10.0 + number) for number in range(30)]
    learners = [line(f"learner {number}", "learning", 0.0, 20.0 - number) for number in range(3)]
    found = at_work([*samplers, *learners, line("grader 0", "grading", 0.0, 0.5)])
    assert found.stretch.members == (
        *(f"sampler {number}" for number in range(29, 21, -1)),
        *("learner 0", "learner 1", "learner 2"),
        "grader 0",
    )
    (_, prose) = pools_blocks(found)
    assert isinstance(prose, Prose)
    assert prose.sentences[1:] == ("Drawn are the busiest 8 of 30 samplers.",)


def test_each_phase_is_a_bar_in_its_member_s_row_and_waits_are_not_drawn() -> None:
    figure = drawn(
        [
            line("grader 0", "grading", 60.0, 0.01),
            line("learner 0", "learning", 70.0, 30.0, waited=9.0),
            line("sampler 0", "sampling", 0.0, 60.0),
            line("sampler 0", "evaluation", 60.0, 40.0, waited=60.0),
        ]
    )
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["sampler 0", "learner 0", "grader 0"]
    assert axes.get_xlim() == pytest.approx((0.0, 100.0))
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first row is the upper one
    gap = 0.002 * 100.0
    found = bars(figure)
    assert found.keys() == {"sampling", "evaluation", "learning", "grading"}
    assert found["sampling"] == [pytest.approx((0.0, 0.0, 60.0 - gap))]
    assert found["evaluation"] == [pytest.approx((0.0, 60.0, 40.0 - gap))]
    assert found["learning"] == [pytest.approx((1.0, 70.0, 30.0 - gap))]
    assert found["grading"] == [pytest.approx((2.0, 60.0, gap))]  # too short to be seen otherwise


def test_failed_phases_and_kinds_of_later_releases_have_a_look_and_a_word_of_their_own() -> None:
    figure = drawn(
        [
            line("sampler 0", "sampling", 0.0, 5.0),
            line("sampler 0", "sampling", 5.0, 5.0, failed=True),
            line("sampler 0", "daydreaming", 10.0, 5.0),
        ]
    )
    assert {kind: [begin for _, begin, _ in spans] for kind, spans in bars(figure).items()} == {
        "sampling": [0.0],
        "failed": [pytest.approx(5.0)],
        "other": [pytest.approx(10.0)],
    }
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["sampling", "other", "failed"]
    looks = {(patch.get_facecolor(), patch.get_hatch()) for patch in legend.get_patches()}
    assert len(looks) == 3


@pytest.mark.parametrize(
    ("seconds", "label", "width"),
    [
        (2.0, "seconds; 0 is 20 seconds after the first phase", 80.0),
        (60.0, "minutes; 0 is 10 minutes after the first phase", 40.0),
        (3600.0, "hours; 0 is 10 hours after the first phase", 40.0),
    ],
)
def test_the_axis_counts_a_unit_that_fits_the_stretch(seconds: float, label: str, width: float) -> None:
    figure = drawn([line("learner 0", "learning", seconds * step, seconds) for step in range(60)])
    axes = figure.axes[0]
    assert axes.get_xlabel() == label
    assert axes.get_xlim() == pytest.approx((0.0, width))
    assert min(begin for _, begin, _ in bars(figure)["learning"]) == pytest.approx(0.0)


def test_very_many_phases_stay_a_small_file() -> None:
    learner = [line("learner 0", "learning", 100.0 * step, 100.0) for step in range(40)]
    grader = [line("grader 0", "grading", 0.2 * step, 0.1) for step in range(20_000)]
    assert len(svg_bytes(drawn([*learner, *grader]))) < 200_000


def test_a_line_that_cannot_be_used_costs_that_line_only(tmp_path: Path) -> None:
    good = line("sampler 0", "sampling", 1.0, 2.0, 0.25)
    path = write(tmp_path, "e000001-000001", [good])
    bad: list[Any] = [
        *([], 3, None, {}),
        good | {"member": 7},
        good | {"member": " "},
        good | {"busy_seconds": "long"},
        good | {"busy_seconds": -1.0},
        good | {"started_at": float("inf")},
        {name: value for name, value in good.items() if name != "kind"},
    ]
    text = json.dumps(good)
    path.write_bytes(
        path.read_bytes()
        + b"".join(json.dumps(value).encode() + b"\n" for value in bad)
        + b"\xff\xfe\n\n"
        + text[: len(text) // 2].encode()
    )
    write(tmp_path, "e000002-000001", [line("learner 0", "learning", 9.0, 1.0, failed=True, later="field")])
    complaints: Complaints = defaultdict(list)
    phases = read_phases(tmp_path, complaints)
    assert phases is not None
    assert phases.to_dict("records") == [
        {"start": "e000001", "member": "sampler 0", "kind": "sampling", "cell": "bp8-n4-s0"}
        | {"started_at": START + 1.0, "busy_seconds": 2.0, "waited_seconds": 0.25, "failed": False},
        {"start": "e000002", "member": "learner 0", "kind": "learning", "cell": "bp8-n4-s0"}
        | {"started_at": START + 9.0, "busy_seconds": 1.0, "waited_seconds": 0.0, "failed": True},
    ]
    assert not complaints


def test_a_segment_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path, "e000001-000002", [line("sampler 0", "sampling", 1.0, 2.0)])
    (tmp_path / "phases" / "e000001-000001.jsonl").mkdir()
    complaints: Complaints = defaultdict(list)
    phases = read_phases(tmp_path, complaints)
    assert phases is not None
    assert len(phases) == 1
    assert complaints == {
        "grid": ["phases/e000001-000001.jsonl cannot be read (Is a directory); it is ignored"]
    }


def test_without_a_phase_that_took_time_there_is_nothing_to_show(tmp_path: Path) -> None:
    complaints: Complaints = defaultdict(list)
    assert read_phases(tmp_path, complaints) is None
    write(tmp_path, "e000001-000001", [])
    assert read_phases(tmp_path, complaints) is None
    assert pools_at_work(None) is None
    assert pools_at_work(record([line("sampler 0", "sampling", 0.0, 0.0)])) is None
    assert pools_blocks(None) == ()


def test_a_start_without_length_counts_for_nothing() -> None:
    (samplers, grader) = at_work(
        [line("sampler 0", "sampling", 0.0, 4.0), line("sampler 0", "sampling", 6.0, 2.0)],
        [line("grader 0", "start-up", 100.0, 0.0)],
    ).uses
    assert (samplers.busy_share, grader.busy_share) == pytest.approx((6 / 8, 0.0))


def test_of_several_sources_the_first_with_a_record_is_shown() -> None:
    parts = [
        replace(tables_of(cell_rows(n, (0.3, 0.5, 3000.0, 2.0))), phases=phases)
        for n, phases in ((4, None), (8, record(TWO_STARTS[1])), (16, record(TWO_STARTS[0])))
    ]
    phases = merge(parts).phases
    assert phases is not None
    assert phases["busy_seconds"].tolist() == [2.0, 4.0]
