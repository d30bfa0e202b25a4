"""Reading a grid's YAML strictly, with errors that name the file, the field and the mend."""

import difflib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError

from grids.errors import UserError
from grids.expansion import expand
from grids.spec import GridSpec

UNION_TAGS = ("powers", "values", "easy", "hard")
"""Parts of an error's location that name a form of a field, not a key of the file."""


def load_grid(path: Path) -> GridSpec:
    """Read a grid file; relative model and problem paths become absolute, starting at the file's folder.

    YAML 1.2 is read (``1e-6`` is a number, ``010`` is ten), and a key that stands twice is an error.

    Raises:
        UserError: the file is missing, is no YAML, or a field is unknown, missing or out of bounds.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the path of a grid YAML") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    return parse_grid(text, path)


def parse_grid(text: str, path: Path) -> GridSpec:
    """As ``load_grid``, from the text of the file at ``path``."""
    try:
        document = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {_yaml_message(error)}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: a grid is a mapping of fields; see grids/quickstart.yaml")
    try:
        spec = GridSpec.model_validate(document)
    except ValidationError as error:
        raise UserError(_message(path, error)) from None
    try:
        expand(spec)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if spec.grid.canary:
        raise UserError(f"{path}: grid.canary: is set by `plan --canary` alone; leave it out")
    return resolve_paths(spec, path.resolve().parent)


def resolve_paths(spec: GridSpec, folder: Path) -> GridSpec:
    """The same grid with absolute paths. A model that is no folder beside the file is taken for a hub name."""
    model_folder = _absolute(spec.model.path, folder)
    is_local = Path(model_folder).exists() or spec.model.path.startswith((".", "/", "~"))
    model_path = model_folder if is_local else spec.model.path
    return spec.model_copy(
        update={
            "model": spec.model.model_copy(update={"path": model_path}),
            "problems": spec.problems.model_copy(
                update={
                    "train": _absolute(spec.problems.train, folder),
                    "validation": _absolute(spec.problems.validation, folder),
                }
            ),
        }
    )


def _absolute(path: str, folder: Path) -> str:
    return str(folder / Path(path).expanduser())


def dump_grid(spec: GridSpec) -> dict[str, Any]:
    """Every field of a grid, defaults included, as plain data that ``parse_grid`` reads back."""
    return spec.model_dump(mode="json", by_alias=True)


def _yaml_message(error: YAMLError) -> str:
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    if isinstance(error, DuplicateKeyError):
        problem = (
            f"{problem.split(' with value')[0].replace('found duplicate', 'the')} stands twice; remove one"
        )
    mark = getattr(error, "problem_mark", None)
    return f"line {mark.line + 1}: {problem}" if mark else problem


def _message(path: Path, error: ValidationError) -> str:
    """One line for the first fault, and the number of further ones."""
    faults = error.errors(include_url=False)
    # An unknown key explains a missing one (a misspelling is both), so it is told first.
    faults.sort(key=lambda fault: fault["type"] != "extra_forbidden")
    first = faults[0]
    location = [str(part) for part in first["loc"] if part not in UNION_TAGS]
    field = ".".join(location)
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(location[-1], _known_keys(location[:-1]), n=1, cutoff=0.5)
        mend = (
            f"did you mean {close[0]}?" if close else f"known here: {', '.join(_known_keys(location[:-1]))}"
        )
        text = f"unknown key; {mend}"
    elif first["type"] == "missing":
        text = "is missing; add it"
    elif first["type"] == "union_tag_invalid":
        text = f"{first['ctx']['discriminator']} {first['ctx']['tag']!r} is unknown; use one of {first['ctx']['expected_tags']}"
    elif first["type"] == "union_tag_not_found":
        field, text = f"{field}.{first['ctx']['discriminator'].strip(chr(39))}", "is missing; add it"
    elif first["type"] == "too_short":
        text = "is empty; give at least one value"
    elif first["type"] in ("bool_parsing", "bool_type"):
        text = f"should be true or false, not {first['input']!r}"
    elif first["type"] == "list_type":
        text = f"should be a list such as [4, 16] or {{from: 4, to: 16}}, not {first['input']!r}"
    elif first["type"] == "string_pattern_mismatch":
        text = f"{first['input']!r} does not have the form {first['ctx']['pattern']}"
    elif first["type"] == "value_error":
        text = str(first["ctx"]["error"])
    else:
        text = f"{first['msg'][0].lower()}{first['msg'][1:]}, not {first['input']!r}"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{path}: {field}: {text}{more}"


def _known_keys(location: list[str]) -> list[str]:
    """Keys that the model at a location knows."""
    models: list[type[BaseModel]] = [GridSpec]
    for part in location:
        models = [
            nested
            for model in models
            for name, info in model.model_fields.items()
            if part in (name, info.alias)
            for nested in _models_in(info.annotation)
        ]
    return sorted({info.alias or name for model in models for name, info in model.model_fields.items()})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in _models_in(argument)]
