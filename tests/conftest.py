"""Settings that every test process and its children share."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch or vLLM is imported by any test: results are replayable only with one thread an engine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Models and tokenizers come from local folders only; a look-up on the network is a bug, and fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Neither vLLM nor Ray nor MLflow reports its use from a test.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


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
