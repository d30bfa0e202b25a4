"""What keeps a resumed cell from being bit for bit the same."""

from grids.spec import LearnerPool, PoolsSpec, SamplerPool
from orchestrator.control.layout import layout_changes, layout_of

POOLS = PoolsSpec(samplers=SamplerPool(count=2), learners=LearnerPool(ranks=2, cpus=4))
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "ray": "2.60.0", "mlflow": "3.17.2"}


def test_numbers_of_engines_and_groups_change_nothing() -> None:
    other = PoolsSpec(samplers=SamplerPool(count=9), learners=LearnerPool(count=5, ranks=2, cpus=4))
    assert layout_changes(layout_of(POOLS, VERSIONS), layout_of(other, VERSIONS)) == []


def test_ranks_threads_and_versions_are_named_with_old_and_new_value() -> None:
    other = PoolsSpec(samplers=SamplerPool(count=2), learners=LearnerPool(ranks=1, cpus=8))
    newer = VERSIONS | {"torch": "2.14.0", "vllm": "0.33.0"}
    assert sorted(layout_changes(layout_of(POOLS, VERSIONS), layout_of(other, newer))) == [
        "learner_cpus 4 -> 8",
        "ranks 2 -> 1",
        "torch 2.13.0 -> 2.14.0",
        "vllm absent -> 0.33.0",
    ]


def test_what_only_keeps_results_is_no_part_of_it() -> None:
    newer = VERSIONS | {"mlflow": "4.0", "ray": "3.0"}
    assert layout_changes(layout_of(POOLS, VERSIONS), layout_of(POOLS, newer)) == []


def test_of_a_commit_without_a_layout_nothing_is_said() -> None:
    assert layout_changes(None, layout_of(POOLS, VERSIONS)) == []
