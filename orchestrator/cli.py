"""The command line. Each command imports what it needs when it runs, so that ``plan`` and ``status`` start at once."""

import os
import sys
import traceback
from contextlib import redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grids.errors import UserError
from orchestrator.cli_operators import FormatOption, JobAddress
from orchestrator.cli_operators import register as register_operators
from orchestrator.exit_codes import ExitCode
from orchestrator.tables import Format, make_console, print_rows

if TYPE_CHECKING:
    from grids.spec import GridSpec
    from orchestrator.store.phase_log import PhaseRecord

app = typer.Typer(
    name="isocompute",
    help="Iso-compute grids for LLM reinforcement learning: which split of a sampling budget learns most.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
GridPath = Annotated[Path, typer.Argument(metavar="GRID.yaml", help="The grid's YAML file.")]
RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir", help="The run's folder, on storage that all nodes share. Default: runs/NAME here."
    ),
]
Sources = Annotated[
    list[str],
    typer.Argument(metavar="RUN...", help="Run folders, CSV or Parquet tables, or one mlflow:EXPERIMENT."),
]
MetricOption = Annotated[
    str | None, typer.Option(help="For example best_at_4. Default: the avg_at_k of the grid.")
]
ReplicatesOption = Annotated[
    int, typer.Option(min=0, max=100_000, help="Bootstrap replicates; 0: no intervals.")
]
ConfidenceOption = Annotated[float, typer.Option(min=0.5, max=0.999, help="Level of the intervals.")]
BootstrapSeed = Annotated[int, typer.Option(min=0, help="Of the bootstrap.")]
MlflowUri = Annotated[
    str | None,
    typer.Option(help="Server of mlflow:EXPERIMENT. Default: MLFLOW_TRACKING_URI, then this machine's."),
]

LONG_SIMULATION = 10_000
"""Update steps from which a prediction takes so long that people are told."""


class ComputeUnit(StrEnum):
    """What a budget is counted in."""

    ROLLOUTS = "rollouts"
    TOKENS = "tokens"
    ACCELERATOR_SECONDS = "accelerator_seconds"


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False) -> None:
    """Options of all commands."""
    if debug:
        os.environ["ISOCOMPUTE_DEBUG"] = "1"


@app.command()
def plan(
    grid: GridPath,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Predict time and accelerator-hours from the phases of this earlier run."
        ),
    ] = None,
    canary: Annotated[
        bool,
        typer.Option(
            "--canary",
            help="Predict them from two steps of the smallest and the largest cell, trained now on the connected cluster.",
        ),
    ] = False,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Show a grid's cells, its totals, what it will take, what is missing here and, where RAY_ADDRESS is set, whether it fits."""
    from grids.loading import load_grid
    from orchestrator.operating import planning

    spec = load_grid(grid)
    if canary:
        like = _train_canary(spec, like)
    records = _records_of(like) if like else []
    rows = planning.plan_rows(spec)
    print_rows(rows, format_)
    warnings = planning.warnings(spec)
    if os.environ.get("RAY_ADDRESS") and not canary:  # for which the grid has been found to fit
        from orchestrator.pools import cluster
        from orchestrator.pools.resources import resource_faults

        try:
            cluster.connect()
            warnings += resource_faults(spec, cluster.connected_nodes())
        except UserError as error:
            warnings.append(str(error))
    lines = [planning.summary(spec), planning.disk_line(spec)]
    if like is None:
        lines.append(planning.NO_MEASURE)
    else:
        from orchestrator.operating.predicting import prediction_line

        steps = sum(row["M"] for row in rows)
        if steps >= LONG_SIMULATION:
            print(f"simulating {steps:,} update steps", file=sys.stderr, flush=True)
        lines.append(prediction_line(spec, like, records))
    lines += [f"warning: {text}" for text in warnings]
    print("\n".join(lines), file=sys.stdout if format_ is Format.TABLE else sys.stderr)


def _records_of(like: Path) -> "list[PhaseRecord]":
    from orchestrator.operating.predicting import records_of

    try:
        return records_of(like)
    except UserError as error:
        raise UserError(f"--like: {error}") from error


def _train_canary(spec: "GridSpec", like: Path | None) -> Path:
    """Train the canary of a grid; its run folder."""
    from orchestrator.control.running import run_canary
    from orchestrator.store.run_store import SpecDiffers

    if like is not None:
        raise UserError("--canary: trains the run that --like would name; give one of them")
    if not os.environ.get("RAY_ADDRESS"):
        raise UserError(
            "--canary: trains on a cluster; set RAY_ADDRESS to the HOST:PORT of its head, or predict with --like RUN"
        )
    folder = default_run_dir(f"{spec.name}-canary").absolute()
    try:
        with redirect_stdout(sys.stderr):  # the plan alone goes to pipes
            code = run_canary(spec, folder)
    except SpecDiffers as error:
        raise UserError(
            f"--canary: {error.difference}; remove that folder, or predict from it with --like {folder}"
        ) from error
    if code is not ExitCode.ALL_FINISHED:
        raise typer.Exit(code)
    return folder


@app.command()
def run(grid: GridPath, run_dir: RunDir = None) -> None:
    """Run a grid, or continue it, on the connected Ray cluster. This is a Ray job's entry point."""
    from grids.loading import load_grid

    in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    if in_job and run_dir is None:
        raise UserError(
            "--run-dir: is needed inside a Ray job, whose working directory is thrown away; give an absolute path"
        )
    folder = run_dir or default_run_dir(load_grid(grid).name)
    from orchestrator.control.running import run_grid

    # In a job a relative folder is refused by the run store; elsewhere it means what it says.
    raise typer.Exit(run_grid(grid, folder if in_job else folder.absolute()))


@app.command()
def submit(
    grid: GridPath,
    run_dir: RunDir = None,
    address: JobAddress = None,
) -> None:
    """Submit a grid to a Ray cluster as a job, and follow it."""
    from grids.loading import load_grid
    from orchestrator.services.submission import submit_grid

    spec = load_grid(grid)
    folder = (run_dir or default_run_dir(spec.name)).absolute()
    raise typer.Exit(submit_grid(spec, folder, address))


register_operators(app)


@app.command()
def fit(
    sources: Sources,
    metric: MetricOption = None,
    compute: Annotated[ComputeUnit, typer.Option(help="What a budget is counted in.")] = ComputeUnit.ROLLOUTS,
    out: Annotated[
        Path | None, typer.Option(help="The report's folder. Default: RUN/report, or beside the table.")
    ] = None,
    replicates: ReplicatesOption = 1000,
    confidence: ConfidenceOption = 0.9,
    seed: BootstrapSeed = 0,
    record_bin: Annotated[
        float, typer.Option(min=0.0001, max=0.5, help="Width of a reward bin of record-breaking points.")
    ] = 0.01,
    record_smoothing: Annotated[
        float,
        typer.Option(
            min=0, max=0.99, help="Moving average before the bins; the paper's 0.8 needs dense evaluations."
        ),
    ] = 0.0,
    held_out: Annotated[
        float, typer.Option(min=0.01, max=0.99, help="Share of C_max that the held-out check fits on.")
    ] = 0.25,
    mlflow_uri: MlflowUri = None,
) -> None:
    """Fit run folders, tables or an experiment, finished or not: frontiers, law, intervals, figures, report.

    Ends with 1 when nothing could be fitted; the report then says why.
    """
    from analysis.options import FitOptions
    from analysis.report import write_report
    from orchestrator.results.printing import print_report
    from orchestrator.results.reading import read_studies, report_dirs

    options = FitOptions(
        metric=metric,
        compute=compute.value,
        replicates=replicates,
        confidence=confidence,
        seed=seed,
        record_bin=record_bin,
        record_smoothing=record_smoothing,
        held_out=held_out,
    )
    studies = read_studies(sources, mlflow_uri)
    console = make_console()
    fitted = False
    for tables, folder in zip(studies, report_dirs(sources, studies, out), strict=True):
        if len(studies) > 1:
            console.print(f"\n== {tables.name}", markup=False)
        report = write_report(tables, folder, options)
        print_report(report, console)
        fitted = fitted or len(report.analysis.curves) > 0
    raise typer.Exit(0 if fitted else 1)


@app.command()
def prescribe(
    sources: Sources,
    budget: Annotated[str, typer.Option(help="For example 5M-rollouts, 2B-tokens or 300-gpu-hours.")],
    metric: MetricOption = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="Largest batch B = B_p * n, in rollouts.")
    ] = None,
    yaml: Annotated[
        Path | None, typer.Option("--yaml", help="Also write the prescribed cell as a grid, ready to submit.")
    ] = None,
    replicates: ReplicatesOption = 1000,
    confidence: ConfidenceOption = 0.9,
    seed: BootstrapSeed = 0,
    mlflow_uri: MlflowUri = None,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Say how to split a budget into n, B_p and M, with intervals and the runners-up.

    Up to 4 times the largest observed compute, with a warning beyond it; from the first evaluations on.
    """
    from analysis.options import FitOptions
    from orchestrator.results.prescribing import prescribe_settings
    from orchestrator.results.reading import read_studies

    options = FitOptions(metric=metric, replicates=replicates, confidence=confidence, seed=seed)
    prescribe_settings(read_studies(sources, mlflow_uri), budget, options, max_batch, format_, yaml)


@app.command()
def doctor(
    grid: Annotated[
        Path | None, typer.Argument(metavar="[GRID.yaml]", help="Also check what this grid needs.")
    ] = None,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Check this machine: versions, engine, Ray, token, MLflow, disk."""
    from orchestrator.operating.doctor import check

    rows = check(grid)
    print_rows(rows, format_)
    raise typer.Exit(0 if all(row["ok"] for row in rows) else 1)


@app.command()
def quickstart(
    grid: Annotated[
        Path | None,
        typer.Argument(metavar="[GRID.yaml]", help="Another small grid. Default: the shipped one."),
    ] = None,
    run_dir: RunDir = None,
    dashboard_port: Annotated[
        int, typer.Option(min=1, max=65_535, help="Port of Ray's dashboard and job API.")
    ] = 8265,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65_535, help="Port of the MLflow server.")] = 5000,
) -> None:
    """Run a small real grid on this machine: local Ray head, MLflow server, job, report."""
    from grids.loading import load_grid
    from orchestrator.services.quickstart import run_quickstart, shipped_grid

    spec = load_grid(grid or shipped_grid())
    raise typer.Exit(run_quickstart(spec, run_dir or default_run_dir(spec.name), dashboard_port, mlflow_port))


@app.command("build-quickstart")
def build_quickstart(
    out: Annotated[Path, typer.Argument(help="An empty or missing folder.")],
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
) -> None:
    """Build the quickstart's base model and problem sets: supervised learning, then grading by avg@16."""
    from workers.quickstart import build

    build(out, seed)


def default_run_dir(name: str) -> Path:
    """``runs/<name>`` here, as an absolute path."""
    return Path.cwd() / "runs" / name


def main() -> None:
    """Run the command line; a user's error is one line and exit code 2."""
    try:
        app()
    except Exception as error:
        if os.environ.get("ISOCOMPUTE_DEBUG"):
            traceback.print_exc()
        elif isinstance(error, UserError):
            print(f"isocompute: {error}", file=sys.stderr)
        else:
            from orchestrator.failures.ray_errors import first_line, root_cause

            cause = root_cause(error)
            print(
                f"isocompute: internal error: {type(cause).__name__}: {first_line(cause)} (--debug shows where)",
                file=sys.stderr,
            )
        sys.exit(ExitCode.REFUSED if isinstance(error, UserError) else ExitCode.INTERNAL_ERROR)
