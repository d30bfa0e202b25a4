"""What a cell samples, as pure functions of (cell, step), and in which parts."""

from collections.abc import Sequence
from dataclasses import dataclass

from grids.expansion import Cell
from grids.spec import GridSpec
from orchestrator.control.data import GridData, PromptSet
from orchestrator.scheduling.spreading import parts_of_batch, slices_of_part, split
from workers.grading import evenly_spaced
from workers.problems import batch_indices
from workers.rollouts import rollout_seed
from workers.sampler import SamplingRequest


@dataclass(frozen=True)
class Batch:
    """Problems to sample, with their gold answers and where they stand (``<path>, row <row>``)."""

    request: SamplingRequest
    golds: list[str]
    sources: list[str]

    def part(self, positions: Sequence[int]) -> "Batch":
        """Some positions, with the same seeds."""
        request = self.request
        return Batch(
            SamplingRequest(
                [request.prompts[i] for i in positions],
                [request.seeds[i] for i in positions],
                request.rollouts_per_problem,
            ),
            [self.golds[i] for i in positions],
            [self.sources[i] for i in positions],
        )

    def spread(self, engines: int, full_engine: int) -> list["Batch"]:
        """The batch in parts of nearly equal size: one for each of so many engines, as long as every part fills its engine.

        Args:
            engines: that are free.
            full_engine: sequences that an engine works on at once.
        """
        return self._split(
            parts_of_batch(len(self.golds), self.request.rollouts_per_problem, engines, full_engine)
        )

    def slices(self) -> list["Batch"]:
        """The batch in what is graded together."""
        return self._split(slices_of_part(len(self.golds), self.request.rollouts_per_problem))

    def _split(self, pieces: int) -> list["Batch"]:
        return [self.part(positions) for positions in split(len(self.golds), pieces)]


def training_batch(cell: Cell, step: int, data: GridData) -> Batch:
    """What update ``step`` (from 1) of a cell trains on: a pure function of (cell, step)."""
    indices = batch_indices(cell.seed, step, cell.problems_per_batch, len(data.train)).tolist()
    seeds = [rollout_seed(cell.id, step, position) for position in range(len(indices))]
    return _batch(data.train, indices, seeds, cell.rollouts_per_problem)


def validation_batch(spec: GridSpec, data: GridData) -> Batch:
    """All validation problems, the same for all cells and steps, so that cells are compared on common random numbers."""
    indices = range(len(data.validation))
    seeds = [rollout_seed("evaluation", position) for position in indices]
    return _batch(data.validation, indices, seeds, spec.evaluation.samples_per_problem)


def probe_batch(spec: GridSpec, data: GridData) -> Batch:
    """The train probe: evenly spaced training problems, the same for all cells and steps."""
    probe = spec.evaluation.train_probe
    indices = evenly_spaced(probe.problems, len(data.train))
    seeds = [rollout_seed("train-probe", position) for position in range(len(indices))]
    return _batch(data.train, indices, seeds, probe.samples_per_problem)


def _batch(problems: PromptSet, indices: Sequence[int], seeds: list[int], samples: int) -> Batch:
    return Batch(
        SamplingRequest([problems.prompts[i] for i in indices], seeds, samples),
        [problems.golds[i] for i in indices],
        [f"{problems.path}, row {problems.rows[i]}" for i in indices],
    )
