"""A storage that takes no more is told from other failures, on every rank and through Ray."""

import errno
import os
import pickle
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from grids.spec import EasyRecipe, ModelSpec, OptimiserSpec
from tests.tiny_models import make_model
from workers.checkpoints import CheckpointFailed, StorageFull
from workers.learner import LearnerRank
from workers.learning import LearnerSettings

LARGEST_FILE_BYTES = 50_000


def test_the_error_keeps_its_number_and_its_words_when_it_travels() -> None:
    error = StorageFull(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/a/step_3")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is StorageFull
    assert back.errno == errno.ENOSPC
    assert str(back) == "[Errno 28] No space left on device: '/runs/a/step_3'"


class LimitedLearner(LearnerRank):
    """A rank whose process may be allowed small files only."""

    def limit_files(self, size: int) -> None:
        """Later writes beyond ``size`` bytes fail with EFBIG (Python ignores the signal that comes with it)."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.fixture(scope="module")
def ranks(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """A group of two ranks that has taken up a cell; a full disk meets one alone in the whole-grid tests."""
    settings = LearnerSettings(
        model=ModelSpec(path=str(make_model(tmp_path_factory.mktemp("model")))),
        recipe=EasyRecipe(type="easy"),
        optimiser=OptimiserSpec(learning_rate=1e-3),
        temperature=0.8,
        micro_batch_tokens=1024,
        threads=1,
        on_gpu=False,
    )
    actor = ray.remote(LimitedLearner).options(num_cpus=0)
    ranks = [actor.remote(settings, rank, 2) for rank in range(2)]
    host, port = ray.get(ranks[0].open_store.remote())
    ray.get([rank.join.remote(host, port) for rank in ranks])
    ray.get([rank.begin_cell.remote(0, "start", None) for rank in ranks])
    yield ranks
    for rank in ranks:
        ray.kill(rank)


def errors_of(ranks: list[Any], method: str, *arguments: object) -> list[BaseException]:
    """What each rank raises."""
    errors = []
    for call in [getattr(rank, method).remote(*arguments) for rank in ranks]:
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            ray.get(call)
        errors.append(caught.value.cause)
    return errors


def require_full(errors: list[BaseException], number: int, folder: Path) -> None:
    for error in errors:
        assert type(error) is StorageFull
        assert error.errno == number
        assert str(folder) in str(error) and os.strerror(number) in str(error)


@pytest.mark.engine
def test_a_failure_of_one_rank_is_known_to_all_and_the_group_goes_on(
    ranks: list[Any], tmp_path: Path
) -> None:
    ray.get(ranks[-1].limit_files.remote(LARGEST_FILE_BYTES))
    require_full(errors_of(ranks, "save", 0, tmp_path), errno.EFBIG, tmp_path)
    ray.get(ranks[-1].limit_files.remote(resource.RLIM_INFINITY))
    whole = tmp_path / "whole"
    whole.mkdir()
    ray.get([rank.save.remote(0, whole) for rank in ranks])
    assert sum(path.stat().st_size for path in whole.iterdir()) > 2 * LARGEST_FILE_BYTES


@pytest.mark.engine
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_is_told_as_such(ranks: list[Any], tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mount is not permitted: {mounted.stderr.decode()}")
    try:
        require_full(errors_of(ranks, "save", 0, tmp_path), errno.ENOSPC, tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.engine
def test_other_failures_say_what_happened_and_leave_the_actors_alive(
    ranks: list[Any], tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    for error in errors_of(ranks, "begin_cell", 0, "start", missing):
        assert type(error) is CheckpointFailed
        assert str(missing) in str(error) and "rank 0" in str(error)
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    for error in errors_of(ranks, "save", 0, blocked):
        assert type(error) is CheckpointFailed
        assert str(blocked) in str(error)
