"""Faults of every kind strike a real grid, which ends with the bits of one that was never disturbed."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.comparison import folder_differences, leftovers, tracking_differences
from benchmarks.site import GridOptions, Site
from benchmarks.strikes import Kind
from benchmarks.under_fire import UnderFire, small_disk

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

AS_A_JOB = (
    [Kind.ENGINE, Kind.MLFLOW],
    [Kind.LEARNER, Kind.VERIFIER],
    [Kind.STOPPED_ENGINE],
    [Kind.RAYLET],
    [Kind.CONTROLLER, Kind.CUT_HISTORY, Kind.CUT_TEMPORARY],
)
"""Strikes that are made together need one new start of what they struck, not one each."""
STARTED_DIRECTLY = ([Kind.SIGTERM], [Kind.CLOCK], [Kind.DISK_FULL])
"""Here a clock can be handed in, and the time to drain is not cut short by Ray."""


@pytest.fixture(scope="module")
def struck(site: Site, undisturbed: Path) -> Iterator[tuple[UnderFire, dict[Kind, float | None]]]:
    """The undisturbed run's grid under one fault of each kind, run to its end; the seconds until it went on from each."""
    grid = site.write_grid("struck", GridOptions(slots=1, commit_steps=1, grace_seconds=30))
    source = random.Random(0)
    with small_disk(site.run_dir(grid)) as mounted:
        fire = UnderFire(site, grid, "job", disk=mounted, seed=0, in_flight=1, say=print)
        seconds: dict[Kind, float | None] = {}
        try:
            for kinds in (*AS_A_JOB, *STARTED_DIRECTLY):
                if kinds is AS_A_JOB[-1]:
                    fire.how = "direct"  # from the start that follows
                assert fire.wait_for_progress(fire.committed()), "the grid was over before all had struck"
                seconds |= dict.fromkeys(kinds, fire.suffer(kinds, source))
            fire.wait_for_end()
        finally:
            fire.stop()
        yield fire, seconds


def test_every_kind_of_fault_strikes(struck: tuple[UnderFire, dict[Kind, float | None]]) -> None:
    _, seconds = struck
    assert set(seconds) == set(Kind)
    assert [kind for kind, spent in seconds.items() if spent is None] == []


def test_a_struck_grid_ends_with_the_bits_of_an_undisturbed_one(
    site: Site, undisturbed: Path, struck: tuple[UnderFire, dict[Kind, float | None]]
) -> None:
    fire, _ = struck
    assert fire.faults == []
    assert folder_differences(fire.run_dir, site.run_dir(undisturbed)) == []


def test_a_controller_that_is_told_to_stop_commits_what_it_has(
    struck: tuple[UnderFire, dict[Kind, float | None]],
) -> None:
    fire, _ = struck
    (end,) = [end for end in fire.ends if end.exit_code == 130]
    running = [cell for cell, state in end.states.items() if state not in ("finished", "pending")]
    assert running
    for cell in running:
        assert (end.states[cell], end.committed[cell]) == ("paused", end.made[cell])


def test_mlflow_has_each_point_of_a_struck_grid_once(
    site: Site, struck: tuple[UnderFire, dict[Kind, float | None]]
) -> None:
    fire, _ = struck
    assert tracking_differences(site.mlflow_uri, "struck", fire.run_dir) == []


def test_a_struck_grid_leaves_nothing_behind(
    site: Site, struck: tuple[UnderFire, dict[Kind, float | None]]
) -> None:
    fire, _ = struck
    assert leftovers(site, fire.run_dir) == []


def test_a_stuck_engine_leaves_its_stacks_or_a_word_about_it(
    struck: tuple[UnderFire, dict[Kind, float | None]],
) -> None:
    fire, _ = struck
    logs = "".join(path.read_text() for path in fire.run_dir.glob("cells/*/attempts/*/log.txt"))
    assert "stalled" in logs
    assert any("sampler 0" in path.read_text() for path in fire.run_dir.glob("cells/*/attempts/*/stacks.txt"))
