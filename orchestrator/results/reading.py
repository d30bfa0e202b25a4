"""What ``fit`` and ``prescribe`` read: run folders, tidy tables and MLflow experiments, named on the command line."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from analysis.reading.sources import read_sources
from analysis.tables import GridTables
from grids.errors import UserError

MLFLOW_PREFIX = "mlflow:"
DEFAULT_MLFLOW_URI = "http://127.0.0.1:5000"


def read_studies(sources: Sequence[str], mlflow_uri: str | None = None) -> list[GridTables]:
    """The tables of every setting in the sources: paths of run folders and tables, or one ``mlflow:EXPERIMENT``.

    mlflow_uri: the tracking server; default MLFLOW_TRACKING_URI, then this machine's.

    Raises:
        UserError: a source is not there or is no source, or MLflow and other sources are mixed.
    """
    experiments = [source for source in sources if source.startswith(MLFLOW_PREFIX)]
    if not experiments:
        return read_sources([Path(source) for source in sources])
    if len(sources) > 1:
        raise UserError(
            f"{experiments[0]}: an experiment is fitted by itself; give one experiment, or paths only"
        )
    from orchestrator.tracking.mlflow_source import read_experiment

    uri = mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_MLFLOW_URI
    return read_experiment(uri, experiments[0].removeprefix(MLFLOW_PREFIX))


def report_dirs(sources: Sequence[str], tables: Sequence[GridTables], out: Path | None) -> list[Path]:
    """Where the report of each setting goes: ``out``, or a place that follows from the sources.

    A single run folder has its report inside, a single table beside itself, everything else in the working directory;
    several settings have one folder each in there.
    """
    if out is None:
        first = Path(sources[0])
        if sources[0].startswith(MLFLOW_PREFIX):
            out = Path(f"{_file_name(sources[0].removeprefix(MLFLOW_PREFIX))}-report")
        elif len(sources) > 1:
            out = Path("report")
        elif first.is_dir():
            out = first / "report"
        else:
            out = first.with_name(f"{first.stem}-report")
    if len(tables) == 1:
        return [out]
    return [out / _file_name(setting.name) for setting in tables]


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "study"
