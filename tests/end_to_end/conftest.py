"""One set of services and one undisturbed run for all tests of whole grids."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.site import Site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two Ray nodes with two cores each, so that a grid has members on both, and MLflow."""
    with Site(tmp_path_factory.mktemp("site"), cpus=2, second_node_cpus=2) as site:
        yield site


@pytest.fixture(scope="session")
def undisturbed(site: Site) -> Path:
    """A grid that ran from start to end."""
    grid = site.write_grid("undisturbed")
    code, output = site.finish(grid)
    assert code == 0, output
    return grid
