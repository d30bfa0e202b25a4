"""What ``prescribe`` does: analyse in the budget's unit, print, and write a grid of one cell."""

import io
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import rich.console
from pydantic import ValidationError
from ruamel.yaml import YAML

from analysis.findings import analyse
from analysis.fitting.intervals import Interval
from analysis.options import FitOptions
from analysis.prescribing.budgets import budget_words, parse_budget
from analysis.prescribing.candidates import Candidate
from analysis.prescribing.prescription import RUNNERS_UP, Prescription, prescribe
from analysis.tables import GridTables, metric_label
from grids.errors import UserError
from grids.loading import dump_grid
from grids.spec import EvaluationSpec, GridSpec
from orchestrator.store.files import write_atomically
from orchestrator.tables import Format, make_console, print_rows

_MARK = "# Prescribed by isocompute"
"""First words of a file that ``prescribe`` wrote, and may therefore write again."""

_REQUIRED = ", ".join(
    name for name, field in GridSpec.model_fields.items() if field.is_required() and name != "grid"
)
_SECTION_ONLY = (
    f"the grid section only, because the tables hold no grid; add {_REQUIRED} before it can be submitted"
)

_MOST_NAMED = 3


def prescribe_settings(
    settings: Sequence[GridTables],
    budget: str,
    options: FitOptions,
    max_batch: int | None = None,
    format_: Format = Format.TABLE,
    yaml_path: Path | None = None,
) -> None:
    """Print a prescription for each setting, and write that of a single one as a grid.

    budget: as ``prescribing.budgets.parse_budget`` reads it; its unit replaces that of the options. Remarks go to stderr
    where the table is for a pipe. Raises UserError for a budget, metric or batch that cannot be, and for a yaml_path with several
    settings or on a file that this command did not write.
    """
    amount = parse_budget(budget)
    if yaml_path is not None:
        _refuse_to_write(yaml_path, settings)
    options = replace(options, compute=amount.unit)
    prescriptions = [prescribe(analyse(tables, options), amount.amount, max_batch) for tables in settings]
    texts = [prescription_yaml(p, t.spec) for p, t in zip(prescriptions, settings, strict=True) if yaml_path]
    print_prescriptions(prescriptions, format_)
    if yaml_path is not None:
        try:
            write_atomically(yaml_path, texts[0].encode())
        except OSError as error:
            raise UserError(
                f"--yaml: {yaml_path} cannot be written ({error.strerror}); choose another place"
            ) from error
        only = f": {_SECTION_ONLY}" if settings[0].spec is None else ""
        print(f"wrote {yaml_path}{only}", file=sys.stdout if format_ is Format.TABLE else sys.stderr)


def print_prescriptions(prescriptions: Sequence[Prescription], format_: Format) -> None:
    """A paragraph and a table for people, nested JSON objects, or one CSV line for each allocation."""
    if format_ is Format.JSON:
        print_rows([prescription_record(prescription) for prescription in prescriptions], format_)
    elif format_ is Format.CSV:
        print_rows([row for prescription in prescriptions for row in _flat_rows(prescription)], format_)
    if format_ is Format.TABLE:
        console = make_console()
        for prescription in prescriptions:
            _print_for_people(prescription, console)
        return
    for prescription in prescriptions:
        warning = [f"warning: {prescription.warning}"] if prescription.warning else []
        for remark in [*warning, *prescription.remarks]:
            print(f"{prescription.setting}: {remark}", file=sys.stderr)


def prescription_record(prescription: Prescription) -> dict[str, Any]:
    """A prescription as JSON values; the names are those of ``Prescription`` and ``Candidate``."""
    record = asdict(prescription)
    record["best"] = _candidate_record(prescription.best)
    record["runners_up"] = [_candidate_record(candidate) for candidate in prescription.runners_up]
    record["not_observed"] = [_candidate_record(candidate) for candidate in prescription.not_observed]
    return record | {"extrapolates": prescription.extrapolates}


def prescription_yaml(prescription: Prescription, spec: dict[str, Any] | None) -> str:
    """A grid file of the prescribed cell, with a comment that says what it rests on.

    Without the spec of the grid that it comes from, only the ``grid`` section. Raises UserError when the cell is beyond the bounds
    of a grid.
    """
    best = prescription.best
    axes = {
        "problems_per_batch": [best.allocation.problems_per_batch],
        "rollouts_per_problem": [best.allocation.rollouts_per_problem],
        "max_batch_rollouts": best.allocation.batch_rollouts,
        "compute_rollouts": best.compute_rollouts,
    }
    comment = [f"{_MARK} from {prescription.setting}.", *_summary(prescription), *prescription.remarks]
    if spec is None:
        comment.append(
            f"This is {_SECTION_ONLY}. Learning rate at this batch: {_text(best.learning_rate, '{:.4g}')}"
        )
        document: dict[str, Any] = {"grid": axes}
    else:
        document = dump_grid(_one_cell(spec, axes, best.compute_rollouts))
    lines = [line for text in comment for line in textwrap.wrap(text, 110, subsequent_indent="  ")]
    head = "\n".join(line if line.startswith("#") else f"# {line}" for line in lines)
    body = io.StringIO()
    writer = YAML(
        typ="safe", pure=True
    )  # the library that reads grids, so that every value comes back as it is
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    writer.dump(document, body)
    return f"{head}\n{body.getvalue()}"


def _one_cell(spec: dict[str, Any], axes: dict[str, Any], compute: int) -> GridSpec:
    try:
        whole = GridSpec.model_validate(spec)
        first_mark = _first_mark(whole.evaluation, axes["max_batch_rollouts"], compute)
        grid = {**spec["grid"], **axes, "seeds": whole.grid.seeds[:1], "canary": False}
        evaluation = {**spec["evaluation"], "first_mark": first_mark}
        name = f"{whole.name[:88]}-prescribed"
        return GridSpec.model_validate({**spec, "name": name, "grid": grid, "evaluation": evaluation})
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in fault["loc"])
        raise UserError(
            f"--yaml: the prescribed cell makes no grid: {field}: {fault['msg']}; choose another budget"
        ) from error


def _first_mark(evaluation: EvaluationSpec, batch: int, compute: int) -> int:
    """A first mark, at most doubled, from which a mark falls on the cell's last step: its final score is what was prescribed.

    first * 2^h lies in (compute - 2^h, compute], and so in the last step where 2^h <= batch.
    """
    halvings = max((compute // evaluation.first_mark).bit_length() - 1, 0)
    return compute >> min(halvings, batch.bit_length() - 1)


def _refuse_to_write(path: Path, settings: Sequence[GridTables]) -> None:
    if len(settings) > 1:
        names = "; ".join(tables.name for tables in settings[:_MOST_NAMED])
        more = f"; and {len(settings) - _MOST_NAMED} more" if len(settings) > _MOST_NAMED else ""
        raise UserError(
            f"--yaml: writes the grid of one setting, and the sources hold {len(settings)} ({names}{more}); "
            f"give the sources of one setting, or a table with its rows only"
        )
    if not path.parent.is_dir():
        raise UserError(f"--yaml: {path.parent} is no folder; make it, or choose another place")
    if path.is_dir():
        raise UserError(f"--yaml: {path} is a folder; give a file's name")
    if path.exists() and not path.read_bytes().startswith(_MARK.encode()):
        raise UserError(
            f"--yaml: {path} exists and was not written by prescribe; choose another name or remove it"
        )


def _summary(prescription: Prescription) -> list[str]:
    """The prescription in sentences."""
    best, level = prescription.best, f"{prescription.confidence:.0%} interval"
    metric = metric_label(prescription.metric)
    n = f"n = {best.allocation.rollouts_per_problem}"
    if prescription.n_interval:
        n += f" ({level} {_range(prescription.n_interval, '{:.0f}')}; this n is best in {prescription.n_share:.0%} of replicates)"
    lines = [f"warning: {prescription.warning}"] if prescription.warning else []
    lines += [
        f"Budget: {budget_words(prescription.budget, prescription.unit)}.",
        f"{n}, B_p = {best.allocation.problems_per_batch}, M = {best.update_steps:,}, learning rate "
        f"{_text(best.learning_rate, '{:.4g}')}: C = {best.compute_rollouts:,} rollouts.",
        f"Expected {metric}: {best.reward:.3f}"
        + (f" ({level} {_range(best.reward_interval, '{:.3f}')})" if best.reward_interval else "")
        + (", extrapolated." if prescription.extrapolates else "."),
    ]
    if prescription.not_worse_n and len(prescription.not_worse_n) > 1:
        close = ", ".join(str(n) for n in prescription.not_worse_n)
        lines.append(f"Values of n that cannot be told from the best: {close}.")
    if prescription.law_n is None:
        lines.append("The law is not identified.")
    else:
        spread = prescription.law_n_interval
        within = f" ({level} {_range(spread, '{:.0f}')})" if spread else ""
        lines.append(f"The law: n = {prescription.law_n:.0f}{within}.")
    return lines


def _print_for_people(prescription: Prescription, console: rich.console.Console) -> None:
    console.print(f"\n{prescription.setting}", markup=False)
    for line in _summary(prescription):
        console.print(line, markup=False)
    metric = metric_label(prescription.metric)
    shown = [prescription.best, *prescription.runners_up, *prescription.not_observed[:RUNNERS_UP]]
    rows = [
        {
            "n": c.allocation.rollouts_per_problem,
            "B_p": c.allocation.problems_per_batch,
            "M": c.update_steps,
            "LR": c.learning_rate,
            metric: _with_interval(c.reward, c.reward_interval, "{:.3f}"),
            "difference": ""
            if c is prescription.best
            else _with_interval(c.difference, c.difference_interval, "{:+.3f}"),
            "allocation best in": _text(c.best_share, "{:.0%}", missing="-"),
            "told apart": c.told_from_best,
            "observed": c.observed,
        }
        for c in shown
    ]
    console.print()
    print_rows(rows, Format.TABLE, console)
    hidden = prescription.competitors + len(prescription.not_observed) - len(shown)
    if hidden:
        console.print(f"and {hidden} more", markup=False)
    console.print()
    for remark in prescription.remarks:
        console.print(f"remark: {remark}", markup=False)


def _flat_rows(prescription: Prescription) -> list[dict[str, Any]]:
    shared = {
        "setting": prescription.setting,
        "metric": prescription.metric,
        "budget": prescription.budget,
        "unit": prescription.unit,
    }
    everyone = [prescription.best, *prescription.runners_up, *prescription.not_observed]
    return [
        shared
        | {"rank": rank}
        | {
            name: value
            for key, item in _candidate_record(candidate).items()
            for name, value in _split(key, item)
        }
        for rank, candidate in enumerate(everyone, start=1)
    ]


def _split(key: str, value: Any) -> list[tuple[str, Any]]:
    """A pair, or a missing interval, as two columns."""
    if key.endswith("_interval") or isinstance(value, tuple):
        low, high = value or (None, None)
        return [(f"{key}_low", low), (f"{key}_high", high)]
    return [(key, value)]


def _candidate_record(candidate: Candidate) -> dict[str, Any]:
    record = asdict(candidate)
    allocation = record.pop("allocation")
    derived = {
        "compute_rollouts": candidate.compute_rollouts,
        "told_from_best": candidate.told_from_best,
    }
    return allocation | record | derived


def _range(interval: Interval | None, form: str) -> str:
    return "" if interval is None else f"{form.format(interval[0])} to {form.format(interval[1])}"


def _with_interval(value: float, interval: Interval | None, form: str) -> str:
    return form.format(value) + (f" ({_range(interval, form)})" if interval else "")


def _text(value: float | None, form: str, missing: str = "not known") -> str:
    return missing if value is None else form.format(value)
