"""Settings that every test process and its children share."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

# Before torch or vLLM is imported by any test: results are replayable only with one thread an engine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Models and tokenizers come from local folders only; a look-up on the network is a bug, and fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Neither vLLM nor Ray nor MLflow reports its use from a test.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

LONGEST_FIRST = (
    "end_to_end/",
    "test_tracking",
    "test_local",
    "test_pools",
    "test_quickstart",
    "test_learner",
    "test_sampler",
    "test_report",
)
"""Files that take longest: taken up first, so that no worker is left with one of them at the end."""


class WholeGridsTogether(LoadFileScheduling):
    """A file of tests is one unit of work; those of whole grids are one together, since they share their services."""

    def _split_scope(self, nodeid: str) -> str:
        return "end_to_end" if "end_to_end/" in nodeid else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> WholeGridsTogether:
    """The scheduler of ``make test``."""
    config.option.loadscopereorder = False  # keep the order below
    return WholeGridsTogether(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest files first."""

    def rank(item: pytest.Item) -> int:
        names = [number for number, name in enumerate(LONGEST_FIRST) if name in item.nodeid]
        return names[0] if names else len(LONGEST_FIRST)

    items.sort(key=rank)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A small Ray cluster of this test session, unreachable from elsewhere, that ends with it."""
    import ray

    # Socket paths are limited to 107 characters, so Ray's folder cannot lie in pytest's.
    folder = tempfile.mkdtemp(prefix="iso-", dir="/tmp")
    root = Path(__file__).parents[1]
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=folder,
        runtime_env={"env_vars": {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
