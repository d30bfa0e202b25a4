"""The problems of a grid as the samplers need them, and what identifies the inputs of a run."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grids.errors import UserError
from grids.loading import dump_grid
from grids.spec import GridSpec
from workers.lean_imports import without_unused
from workers.problems import ProblemSet, check_disjoint, load_problems, render_prompt
from workers.sampler import stop_token_ids

_SMALL_FILE_BYTES = 64 * 2**20
_BLOCK_BYTES = 2**20
_BLOCKS_HASHED = 64


@dataclass(frozen=True)
class PromptSet:
    """Problems rendered to tokens."""

    path: str
    rows: list[int]
    """Where each problem stands in its file, from 1."""
    prompts: list[list[int]]
    golds: list[str]

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class GridData:
    """Training and validation problems of a grid."""

    train: PromptSet
    validation: PromptSet
    identity: dict[str, Any]
    """What decides a run's results: the spec with contents in place of paths, without what may change between submissions."""

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt) for prompt in self.train.prompts + self.validation.prompts)


def load_data(spec: GridSpec) -> GridData:
    """Read problems and tokenizer.

    Raises:
        UserError: a file is missing or faulty, the sets share a problem, a stop token is none of the model's, or prompt and
            response exceed the model's context.
    """
    train = _problems("problems.train", spec.problems.train)
    validation = _problems("problems.validation", spec.problems.validation)
    check_disjoint(train, validation)
    tokenizer, context = load_tokenizer(spec.model.path)
    stop_token_ids(tokenizer, spec.sampling.stop_tokens)
    data = GridData(
        train=_render(train, spec, tokenizer),
        validation=_render(validation, spec, tokenizer),
        identity=run_identity(
            spec,
            train.fingerprint,
            validation.fingerprint,
            model_fingerprint(spec.model.path),
            weights_fingerprint(spec.model.path),
        ),
    )
    needed = data.longest_prompt + spec.sampling.max_tokens
    if context is not None and needed > context:
        raise UserError(
            f"sampling.max_tokens: the longest prompt ({data.longest_prompt} tokens) and {spec.sampling.max_tokens} more exceed "
            f"the model's context of {context}; lower it, or remove long problems"
        )
    return data


def _problems(field: str, path: str) -> ProblemSet:
    try:
        return load_problems(path)
    except UserError as error:
        raise UserError(f"{field}: {error}") from error


def load_tokenizer(model_path: str) -> tuple[Any, int | None]:
    """The model's tokenizer and the length of its context, where the configuration says so."""
    if model_path.startswith("/") and not (Path(model_path) / "config.json").is_file():
        raise UserError(
            f"model.path: {model_path} is no model folder (no config.json in it); give a folder or a hub name"
        )
    with without_unused():
        from transformers import AutoConfig, AutoTokenizer
        from transformers.utils import logging

    # It warns of prompts beyond the context, which are refused here in one line of our own.
    logging.set_verbosity_error()

    try:
        config = AutoConfig.from_pretrained(model_path)
        tokenizer = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise UserError(f"model.path: {model_path} cannot be loaded: {first_line}") from error
    return tokenizer, getattr(config, "max_position_embeddings", None)


def _render(problems: ProblemSet, spec: GridSpec, tokenizer: Any) -> PromptSet:
    sampling = spec.sampling
    return PromptSet(
        path=problems.path,
        rows=[problem.row for problem in problems.problems],
        prompts=[
            render_prompt(problem, sampling.prompt_template, sampling.system_prompt, tokenizer)
            for problem in problems.problems
        ],
        golds=[problem.answer for problem in problems.problems],
    )


def run_identity(
    spec: GridSpec, train: str, validation: str, model: str, weights: str | None = None
) -> dict[str, Any]:
    """The part of a spec that a run folder is bound to; fingerprints of contents stand in for paths.

    Pools, tracking, commits, the failure policy and the words of ``assumptions`` may change between submissions
    of one run; the budget may grow (the run store sees to that).
    """
    identity = dump_grid(spec)
    for changeable in ("pools", "tracking", "commits", "failures", "assumptions"):
        del identity[changeable]
    del identity["grid"]["compute_rollouts"]
    if not spec.grid.canary:
        del identity["grid"]["canary"]  # which folders of earlier versions do not have
    identity["problems"] = {"train": train, "validation": validation}
    identity["model"] = {"content": model, "dtype": spec.model.dtype}
    if weights is not None:
        identity["model"]["weights"] = weights
    return identity


def model_fingerprint(model_path: str) -> str:
    """Of a folder: a hash of its files' names and sizes, and of small files' contents. Of a hub model: its name."""
    folder = Path(model_path)
    if not folder.is_dir():
        return model_path
    digest = hashlib.sha256()
    for file in _files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        if size <= _SMALL_FILE_BYTES:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def weights_fingerprint(model_path: str) -> str | None:
    """A hash of the contents of a folder's large files (above 64 MiB), None when it has none.

    Of each, 64 blocks of 1 MiB count, spread evenly from its first byte to its last: reading all of a model of
    hundreds of GB would hold up every start. A change that leaves all these blocks alone is not seen.
    """
    folder = Path(model_path)
    large = [file for file in _files(folder) if file.stat().st_size > _SMALL_FILE_BYTES]
    digest = hashlib.sha256()
    for path in large:
        last = path.stat().st_size - _BLOCK_BYTES
        with path.open("rb") as file:
            for block in range(_BLOCKS_HASHED):
                file.seek(last * block // (_BLOCKS_HASHED - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest() if large else None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
