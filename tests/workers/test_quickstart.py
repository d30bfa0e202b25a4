"""The quickstart's products: those that are shipped, and a smaller build made here the same way."""

import json
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grids.errors import UserError
from workers.arithmetic import distinct_additions
from workers.problems import check_disjoint, load_problems
from workers.quickstart import BuildScale, build, sha256_of

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "grids" / "quickstart"
SMALL = BuildScale(
    digits=(1, 2),
    target_skill=0.2,
    most_supervised_steps=600,
    supervised_batch=64,
    train_problems=20,
    validation_problems=10,
    graded_together=256,
    most_graded=2048,
)
SETS = [f"{band}_{part}" for band in ("easy", "hard") for part in ("train", "validation")]


@pytest.fixture(scope="module")
def small_build(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Products of a smaller build and its lines of progress. A process of its own: it starts an engine."""
    out = tmp_path_factory.mktemp("quickstart")
    program = (
        "from pathlib import Path; from workers.quickstart import BuildScale, build; "
        f"build(Path({str(out)!r}), seed=1, scale={SMALL!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out, done.stdout.splitlines()


def rows_of(folder: Path) -> dict[str, list[dict]]:
    return {name: [json.loads(line) for line in (folder / f"{name}.jsonl").open()] for name in SETS}


def answer_probability(folder: Path, additions: list[tuple[int, int]]) -> torch.Tensor:
    """Exact probability of the sum and the end token at temperature 1, by transformers' own forward; (additions,)."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    probabilities = []
    for first, second in additions:
        prompt = tokenizer.encode(f"{first}+{second}=")
        tokens = torch.tensor([prompt + tokenizer.encode(str(first + second)) + [tokenizer.eos_token_id]])
        with torch.no_grad():
            logprobs = model(tokens[:, :-1]).logits[0].log_softmax(-1)
        answer = logprobs.gather(1, tokens[0, 1:, None])[len(prompt) - 1 :, 0]
        probabilities.append(answer.sum().exp())
    return torch.stack(probabilities)


def check_products(folder: Path, train: int, validation: int) -> None:
    """Sizes, bands, right answers, no problem twice in whatever order of operands, and the manifest's checksums."""
    sets = rows_of(folder)
    assert {name: len(rows) for name, rows in sets.items()} == {
        "easy_train": train,
        "easy_validation": validation,
        "hard_train": train,
        "hard_validation": validation,
    }
    seen = set()
    for name, rows in sets.items():
        for row in rows:
            first, second = map(int, row["prompt"].split("+"))
            assert int(row["answer"]) == first + second
            assert row["prompt"] == f"{first}+{second}"
            lowest, highest = (0.3, 0.6) if name.startswith("easy") else (0.0625, 0.125)
            assert lowest <= row["avg_at_16"] <= highest
            assert (row["avg_at_16"] * 16).is_integer()
            seen.add(frozenset([(first, second), (second, first)]))
    assert len(seen) == 2 * (train + validation)
    for band in ("easy", "hard"):
        check_disjoint(
            load_problems(folder / f"{band}_train.jsonl"), load_problems(folder / f"{band}_validation.jsonl")
        )

    manifest = json.loads((folder / "manifest.json").read_text())
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert set(manifest["sha256"]) == files - {"manifest.json"}
    for file, checksum in manifest["sha256"].items():
        assert sha256_of(folder / file) == checksum, file


def test_the_shipped_products_are_whole_and_in_their_bands() -> None:
    check_products(SHIPPED, train=1800, validation=300)
    assert sum(file.stat().st_size for file in SHIPPED.rglob("*") if file.is_file()) < 4e6


def test_the_shipped_model_has_a_partial_skill_that_fits_the_grades() -> None:
    rows = rows_of(SHIPPED)
    for name, lowest, highest in [("easy_validation", 0.36, 0.5), ("hard_validation", 0.03, 0.2)]:
        additions = [(int(a), int(b)) for a, b in (row["prompt"].split("+") for row in rows[name])]
        assert lowest < answer_probability(SHIPPED, additions).mean() < highest


def test_the_manifest_of_the_shipped_products_tells_how_to_build_them_again() -> None:
    manifest = json.loads((SHIPPED / "manifest.json").read_text())
    assert manifest["seed"] == 0
    assert BuildScale(**manifest["scale"] | {"digits": tuple(manifest["scale"]["digits"])}) == BuildScale()


@pytest.mark.engine
def test_a_smaller_build_makes_whole_products(small_build: tuple[Path, list[str]]) -> None:
    folder, _ = small_build
    check_products(folder, train=20, validation=10)


@pytest.mark.engine
def test_grades_agree_with_the_exact_probability_of_a_right_answer(
    small_build: tuple[Path, list[str]],
) -> None:
    folder, _ = small_build
    measured = json.loads((folder / "manifest.json").read_text())["measured"]
    additions = list(
        islice(distinct_additions(random.Random("problems/1"), SMALL.digits), measured["graded"])
    )
    exact = answer_probability(folder, additions)
    # Four standard errors of the mean of 16 coins for each of the additions.
    error = (exact * (1 - exact) / 16).sum().sqrt() / len(additions)
    assert abs(exact.mean() - measured["mean_avg_at_16"]) < 4 * error
    assert 0.1 < exact.mean() < 0.6


@pytest.mark.engine
def test_a_build_reports_its_progress_in_lines(small_build: tuple[Path, list[str]]) -> None:
    _, lines = small_build
    assert any(line.startswith("supervised step 50: loss ") for line in lines)
    assert any(line.startswith("graded 256 additions: ") for line in lines)


@pytest.mark.engine
def test_a_folder_in_use_is_not_overwritten(small_build: tuple[Path, list[str]]) -> None:
    folder, _ = small_build
    before = (folder / "manifest.json").read_bytes()
    with pytest.raises(UserError, match="not empty"):
        build(folder, scale=SMALL)
    assert (folder / "manifest.json").read_bytes() == before


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        build(tmp_path / "out", scale=SMALL)
