"""What an error means for its cell."""

from ray.exceptions import ActorDiedError, RayTaskError

from orchestrator.failures import decide
from orchestrator.store import State
from workers.learner import Diverged


def of_worker(cause: Exception) -> RayTaskError:
    return RayTaskError("update", "traceback", cause)


def test_divergence_in_a_worker_is_a_result_and_not_a_failure() -> None:
    decision = decide(of_worker(Diverged("loss nan")))
    assert (decision.state, decision.stops_run) == (State.DIVERGED, False)
    assert "loss nan" in decision.reason


def test_a_lost_actor_pauses_the_cell_and_stops_the_run() -> None:
    decision = decide(ActorDiedError())
    assert (decision.state, decision.stops_run) == (State.PAUSED, True)


def test_anything_else_fails_its_cell_alone_with_the_first_line_as_reason() -> None:
    decision = decide(of_worker(ValueError("bad row 7\nlong details")))
    assert (decision.state, decision.stops_run) == (State.FAILED, False)
    assert decision.reason == "ValueError: bad row 7"
