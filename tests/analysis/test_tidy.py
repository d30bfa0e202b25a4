"""What is said of tidy tables that other tools wrote in their own way."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.reading.sources import read_table, tables_from_frame
from grids.errors import UserError


def frame_of(*seeds: Any, steps: int = 3) -> pd.DataFrame:
    """Rows of one allocation, scores differ between seeds."""
    return pd.DataFrame(
        [
            {
                "problems_per_batch": 4,
                "rollouts_per_problem": 2,
                "seed": seed,
                "compute_rollouts": 8 * step,
                "avg_at_4": 0.25 + 0.125 * index,
            }
            for index, seed in enumerate(seeds)
            for step in range(1, steps + 1)
        ]
    )


def refusal(frame: pd.DataFrame) -> str:
    with pytest.raises(UserError) as error:
        tables_from_frame(frame, "sweep")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_several_seeds_without_a_seed_column_are_told_to_the_table_with_the_mend():
    tables = tables_from_frame(frame_of(0, 1).drop(columns="seed"))
    assert tables.complaints["grid"] == ["several rows at the same compute and no column 'seed'; add it"]
    assert tables.history.empty


def test_the_missing_seed_is_told_to_the_setting_that_needs_it():
    both = pd.concat([frame_of(0).assign(model="a"), frame_of(0, 1).assign(model="b")]).drop(columns="seed")
    with pytest.raises(UserError, match="2 settings"):
        tables_from_frame(both)
    one, other = (tables_from_frame(both[both["model"] == model]) for model in "ab")
    assert one.complaints == {}
    assert "no column 'seed'" in other.complaints["grid"][0]


@pytest.mark.parametrize("name", ["cell", "seed"])
def test_rows_that_are_told_apart_need_no_seed_column_added(name):
    frame = frame_of(0, 1)
    told = (
        frame
        if name == "seed"
        else frame.assign(cell=frame["seed"].map("run {}".format)).drop(columns="seed")
    )
    tables = tables_from_frame(told)
    assert len(tables.history) == 6 and tables.complaints == {}


def test_equal_rows_and_base_rows_are_not_taken_for_other_seeds():
    frame = frame_of(0).drop(columns="seed")
    base = frame.head(1).assign(compute_rollouts=0)
    tables = tables_from_frame(pd.concat([frame, frame.head(1), base, base.assign(avg_at_4=0.125)]))
    assert len(tables.history) == 3 and "grid" not in tables.complaints


def test_seeds_that_are_names_are_refused_with_the_mend():
    words = refusal(frame_of("run-0", "run-1"))
    assert words == "sweep: column 'seed' holds text ('run-0'); number the seeds (0, 1, ...)"


def test_a_single_seed_that_is_no_number_costs_its_rows_only():
    tables = tables_from_frame(frame_of("0", "x"))
    assert tables.history["seed"].tolist() == [0, 0, 0]


NEEDS = "sweep: needs a score: avg_at_K, best_at_K or worst_at_K with the real K, such as avg_at_4"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("mood", ""),
        ("avg@4", "; is 'avg@4' avg_at_4? rename it"),
        ("mean@16", "; is 'mean@16' avg_at_16? rename it"),
        ("pass@8", "; is 'pass@8' best_at_8? rename it"),
        ("worst@4", "; is 'worst@4' worst_at_4? rename it"),
        ("pass@1", "; is 'pass@1' the mean over K answers a problem? rename it to avg_at_K"),
        ("accuracy", "; is 'accuracy' the mean over K answers a problem? rename it to avg_at_K"),
        ("Reward", "; is 'Reward' the mean over K answers a problem? rename it to avg_at_K"),
    ],
)
def test_a_table_without_a_score_is_told_what_to_rename(name, hint):
    assert refusal(frame_of(0).rename(columns={"avg_at_4": name})) == NEEDS + hint


@pytest.mark.parametrize(("separator", "words"), [(";", "semicolons"), ("\t", "tabs")])
def test_other_separators_are_named(tmp_path: Path, separator, words):
    frame_of(0).to_csv(tmp_path / "sweep.csv", index=False, sep=separator)
    with pytest.raises(UserError, match=f"sweep.csv: looks separated by {words}; write it with commas"):
        read_table(tmp_path / "sweep.csv")


def test_csv_under_the_name_of_parquet_is_to_be_renamed(tmp_path: Path):
    frame_of(0).to_csv(tmp_path / "sweep.parquet", index=False)
    with pytest.raises(UserError, match="looks like CSV; rename it to sweep"):
        read_table(tmp_path / "sweep.parquet")
    (tmp_path / "sweep.parquet").write_bytes(b"PAR1,\x00\x01")
    with pytest.raises(UserError, match="cannot be read as parquet"):
        read_table(tmp_path / "sweep.parquet")
