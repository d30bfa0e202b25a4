"""The order of the report and what stands in each section."""

from collections.abc import Sequence
from typing import Any

from analysis.diagnostics.diagnosis import Diagnosis
from analysis.findings import Analysis
from analysis.report import cell_tables as cell
from analysis.report import result_tables as result
from analysis.report.blocks import Block, Picture, Prose, Section, Table
from analysis.report.pools import pools_blocks
from analysis.report.words import UNIT_WORDS, held_out_words, view_words
from analysis.tables import metric_label


def sections(analysis: Analysis, diagnosis: Diagnosis, cells: Sequence[dict[str, Any]]) -> list[Section]:
    """All sections, in order. cells: as ``cell_records`` gives them. A table without a row is left out, with words in
    its place where the reader would miss it."""
    law = analysis.frontier.law
    found = [
        Section("Frontier", "frontier", (Picture("frontier"), *_kept(result.budgets_table(analysis)))),
        Section(
            "Compute-optimal n and the law",
            "law",
            (
                Picture("n_star"),
                Prose((law.text,)),
                *_kept(
                    result.crossovers_table(analysis, diagnosis.epochs),
                    result.parameters_table(law, "Parameters of the law"),
                    result.forms_table(law),
                ),
            ),
        ),
        Section(
            "Questions of allocation",
            "questions",
            (
                Picture("joint_frontier"),
                *_kept(result.questions_table(analysis)),
                Picture("fixed_batch"),
                *_kept(result.steps_table(analysis)),
            ),
        ),
        Section(
            "The same, seen in other ways",
            "views",
            (
                *_said(view_words(analysis)),
                *_kept(
                    result.views_table(analysis),
                    *_if(analysis.curves, result.view_laws_table(analysis)),
                ),
            ),
        ),
        Section(
            "Would small budgets have told?",
            "held-out",
            (*_said(held_out_words(analysis)), *_kept(result.held_out_table(analysis))),
        ),
        Section(
            "What matters: n, B_p and the metric",
            "sensitivity",
            (
                Picture("sensitivity"),
                *_kept(cell.sensitivity_rows(diagnosis, analysis)),
                Picture("metric_bars"),
                *_kept(cell.best_n_rows(diagnosis, analysis)),
            ),
        ),
        Section(
            "Diagnostics of training",
            "diagnostics",
            (
                Picture("overfitting"),
                *_kept(cell.overfitting_rows(diagnosis)),
                Picture("histograms"),
                *_kept(cell.interference_rows(diagnosis)),
                Picture("training"),
                *_kept(cell.training_rows(diagnosis)),
                Picture("tokens"),
            ),
        ),
        Section("The pools at work", "pools", pools_blocks(diagnosis.pools)),
        Section(
            "Cells",
            "cells",
            _kept(cell.cells_table(cells, analysis), cell.allocations_table(analysis))
            or (Prose(("There are no cells yet.",)),),
        ),
        Section("How to read this", "reading", (_terms(analysis), _options(analysis))),
    ]
    return [section for section in found if section.blocks]


def _kept(*tables: Table) -> tuple[Block, ...]:
    return tuple(table for table in tables if table.rows)


def _if(condition: Any, table: Table) -> tuple[Table, ...]:
    return (table,) if condition else ()


def _said(sentences: Sequence[str]) -> tuple[Block, ...]:
    return (Prose(tuple(sentences)),) if sentences else ()


def _terms(analysis: Analysis) -> Table:
    metric = metric_label(analysis.metric)
    unit = UNIT_WORDS[analysis.options.compute]
    rows = [
        ("n", "rollouts sampled for each problem of a batch"),
        ("B_p, B", "problems in a batch; B = B_p n is the batch in rollouts"),
        ("M", "update steps; one for each batch"),
        ("C", f"compute of training so far, in {unit}; evaluation is not counted. In rollouts C = B_p n M"),
        ("cell, allocation", "one training run (B_p, n, seed); an allocation is a pair (B_p, n), its cells are its seeds"),
        (metric, "score on the validation problems, 0 to 1; avg@K is the mean over K answers a problem, best@K the share of "
         "problems with any answer right, worst@K with all right"),
        ("curve", "one rising sigmoid in log C for each allocation, fitted to all its evaluations"),
        ("frontier", "the highest curve at each C, inside observed C only: nothing is extrapolated"),
        ("n*(C)", "the n of the highest curve; (n) in brackets or hollow where no other n was observed"),
        ("not worse", "the values of n whose difference from n* has an interval that reaches 0"),
        ("law", "log2 n* = L / (1 + exp(-k (log10 C - log10 C0))) + b: from a floor 2^b to a plateau 2^(L + b)"),
        ("not identified", "the grid does not tell this number, whatever the fit says; the reason is given"),
        ("on a bound", "a parameter stopped at the limit of what the fit allows: its value is not an estimate"),
        ("interval", "central bootstrap interval; what it holds and lacks stands in the verdict"),
        ("points", "hundredths of a score"),
        ("doublings", "factors of two of n"),
    ]  # fmt: skip
    return Table("Terms", ("term", "meaning"), rows, text_columns=frozenset({"term", "meaning"}))


def _options(analysis: Analysis) -> Table:
    options = analysis.options
    rows = [
        ("metric", analysis.metric),
        ("compute unit", options.compute),
        ("bootstrap replicates", f"{options.replicates}"),
        ("confidence", f"{options.confidence:g}"),
        ("seed of the bootstrap", f"{options.seed}"),
        ("bin of record-breaking points", f"{options.record_bin:g}"),
        ("smoothing before the bins", f"{options.record_smoothing:g}"),
        ("held-out check fits on C up to", f"{options.held_out:g} of the largest C"),
    ]
    return Table(
        "Options of this fit", ("option", "value"), rows, text_columns=frozenset({"option", "value"})
    )
