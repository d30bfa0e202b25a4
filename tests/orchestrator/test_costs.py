"""The cost model: laws that made the records are found again; few records, or none, give something sensible."""

import random

import pytest

from orchestrator.scheduling.costs import CostModel
from orchestrator.store.phase_log import PhaseKind, PhaseRecord

SAMPLING, LEARNING, EVALUATION = PhaseKind.SAMPLING, PhaseKind.LEARNING, PhaseKind.EVALUATION


def record(
    seconds: float,
    sequences: int,
    tokens: int = 0,
    kind: PhaseKind = SAMPLING,
    *,
    member: str = "sampler 0",
    cell: str = "c",
    step: int = 1,
    waited: float = 0.0,
    failed: bool = False,
) -> PhaseRecord:
    return PhaseRecord(member, kind, cell, step, 0.0, seconds, waited, sequences, tokens, 1, failed)


def warm() -> CostModel:
    """A model whose member has made its first calls, which took for ever."""
    return CostModel(record(500.0, 1, 1, kind) for kind in PhaseKind)


def test_a_law_is_found_again_from_noisy_records() -> None:
    draws = random.Random(0)
    model = warm()
    for _ in range(300):
        sequences = 2 ** draws.randint(3, 10)
        tokens = sequences * draws.randint(5, 60)
        law = 0.4 + 0.002 * sequences + 0.0003 * tokens
        model.observe(record(law * draws.uniform(0.9, 1.1), sequences, tokens))
    # 0.4 + 0.002 * 256 + 0.0003 * 256 * 30 = 3.216; 0.4 + 0.016 + 0.0003 * 80 = 0.44
    assert model.seconds(SAMPLING, 256, 256 * 30) == pytest.approx(3.216, rel=0.05)
    assert model.seconds(SAMPLING, 8, 80) == pytest.approx(0.44, rel=0.15)


@pytest.mark.parametrize(
    "law", [(0.5, 0.0, 0.0), (0.0, 0.01, 0.0), (0.0, 0.0, 0.001), (0.2, 0.01, 0.0), (0.2, 0.0, 0.001)]
)
def test_a_law_on_the_bound_is_found_too(law: tuple[float, float, float]) -> None:
    model = warm()
    for sequences in (8, 32, 128, 512):
        for length in (3, 10, 40):
            tokens = sequences * length
            model.observe(record(law[0] + law[1] * sequences + law[2] * tokens, sequences, tokens))
    expected = law[0] + law[1] * 64 + law[2] * 64 * 20
    assert model.seconds(SAMPLING, 64, 64 * 20) == pytest.approx(expected, rel=0.02)


def test_a_prediction_is_never_negative() -> None:
    # A free line through these is negative below 150 sequences.
    model = warm()
    for sequences, seconds in ((200, 1.0), (300, 3.0), (400, 5.0)):
        model.observe(record(seconds, sequences))
    assert 0 <= model.seconds(SAMPLING, 10) < 1


def test_records_of_one_size_are_scaled_with_the_sequences() -> None:
    model = warm()
    for _ in range(5):
        model.observe(record(2.0, 32, 320))
    assert [model.seconds(SAMPLING, sequences) for sequences in (8, 32, 64)] == pytest.approx([0.5, 2, 4])


def test_a_first_call_counts_only_where_there_is_no_other() -> None:
    model = CostModel([record(60.0, 10)])
    assert model.seconds(SAMPLING, 10) == pytest.approx(60, rel=0.01)
    model.observe(record(1.0, 10))
    assert model.seconds(SAMPLING, 10) == pytest.approx(1, rel=0.01)
    # Another member's first call, and the first one of a member that was lost and started again.
    model.observe(record(60.0, 10, member="sampler 1"))
    model.observe(record(9.0, 10, failed=True))
    model.observe(record(60.0, 10))
    assert model.seconds(SAMPLING, 10) == pytest.approx(1, rel=0.01)


def test_before_any_record_sequences_cost_and_phases_too_but_evaluations_nothing() -> None:
    model = CostModel()
    assert model.seconds(SAMPLING, 12) == model.seconds(LEARNING, 12) > 12
    # As many rollouts in more steps take longer.
    assert 4 * model.seconds(SAMPLING, 8) > model.seconds(SAMPLING, 32)
    assert model.evaluation_seconds(EVALUATION) == 0
    assert model.stretch == 1


def test_a_kind_that_was_never_seen_costs_what_sampling_does() -> None:
    model = CostModel([record(2.0, 10), record(2.0, 10)])
    assert model.seconds(LEARNING, 20) == pytest.approx(model.seconds(SAMPLING, 20))


def test_kinds_are_told_apart() -> None:
    model = warm()
    for _ in range(3):
        model.observe(record(1.0, 10))
        model.observe(record(3.0, 10, kind=LEARNING))
    assert model.seconds(SAMPLING, 10) == pytest.approx(1, rel=0.01)
    assert model.seconds(LEARNING, 10) == pytest.approx(3, rel=0.01)


def test_an_evaluation_costs_what_all_its_calls_do() -> None:
    # Validation, 40 sequences in 4 s, and train probe, 10 in 1 s; of three cells, the first of which warms up.
    model = CostModel()
    for cell in ("base", "a", "b"):
        model.observe(record(4.0, 40, kind=EVALUATION, cell=cell))
        model.observe(record(1.0, 10, kind=EVALUATION, cell=cell))
    assert model.evaluation_seconds(EVALUATION) == pytest.approx(5.0, rel=0.02)


def test_waits_stretch_the_phases_of_training() -> None:
    # 8 s of work, 4 s of waiting; an evaluation's wait is not training's.
    records = [
        record(3.0, 10, waited=1.0),
        record(5.0, 10, kind=LEARNING, waited=3.0),
        record(1.0, 10, kind=EVALUATION, waited=100.0),
    ]
    assert CostModel(records).stretch == pytest.approx(1.5)
