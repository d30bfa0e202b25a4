"""What a vLLM engine samples, gathered as it comes.

For every token vLLM's own ``OutputProcessor`` keeps what an API server tells its clients: ranked candidates, sums, text;
for short rollouts of a small model that is nearly a tenth of an engine's time. ``GatheredOutputs`` stands in its place in an
``LLMEngine`` and keeps tokens and log-probabilities alone. It has the methods that vLLM 0.32 calls.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessorOutput
from vllm.v1.engine.parallel_sampling import ParentRequest

ENDED = (FinishReason.STOP, FinishReason.LENGTH)
"""How a sample may end; any other end has lost tokens."""


@dataclass(slots=True)
class Sample:
    """One response."""

    group: str
    """The request that it was asked for in."""
    tokens: list[int] = field(default_factory=list)
    """Its end token included."""
    logprobs: list[np.ndarray] = field(default_factory=list)
    """Of its tokens, in pieces of [tokens, 1]."""
    truncated: bool = False
    """Whether it reached the token limit without an end token."""


class GatheredOutputs:
    """Responses of requests with ``logprobs=0`` that are ended by tokens alone, not by strings."""

    def __init__(self) -> None:
        """Nothing has been asked for yet."""
        self._unfinished: dict[str, Sample] = {}
        self._groups: dict[str, list[Sample]] = {}
        self._missing: dict[str, int] = {}
        """How many samples of a group have not ended."""

    def take(self, group: str) -> list[Sample]:
        """The samples of a request that ``process_outputs`` has given back; they are forgotten here."""
        return self._groups.pop(group)

    def add_request(
        self, request: EngineCoreRequest, prompt: str | None, parent: ParentRequest | None, index: int
    ) -> None:
        """Expect a sample, number ``index`` of its group."""
        group = request.request_id if parent is None else parent.request_id
        sample = self._unfinished[request.request_id] = Sample(group)
        self._groups.setdefault(group, []).append(sample)
        self._missing[group] = self._missing.get(group, 0) + 1

    def process_outputs(
        self, engine_core_outputs: Iterable[EngineCoreOutput], **_: Any
    ) -> OutputProcessorOutput:
        """Keep a step's tokens; ``request_outputs`` are the names of the groups that it has finished.

        Raises:
            RuntimeError: the engine has given up a sample.
        """
        finished: list[Any] = []
        for output in engine_core_outputs:
            sample = self._unfinished[output.request_id]
            sample.tokens += output.new_token_ids
            if output.new_logprobs is not None:
                sample.logprobs.append(output.new_logprobs.logprobs)
            if output.finish_reason is not None:
                del self._unfinished[output.request_id]
                if output.finish_reason not in ENDED:
                    raise RuntimeError(
                        f"the engine has ended a sample by {output.finish_reason.name.lower()}"
                    )
                sample.truncated = output.finish_reason == FinishReason.LENGTH
                self._missing[sample.group] -= 1
                if not self._missing[sample.group]:
                    del self._missing[sample.group]
                    finished.append(sample.group)
        return OutputProcessorOutput(request_outputs=finished, reqs_to_abort=[])

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        """Forget groups that were never finished; the names of their samples, which the engine is to forget as well."""
        groups = set(request_ids)
        samples = [name for name, sample in self._unfinished.items() if sample.group in groups]
        for name in samples:
            del self._unfinished[name]
        for group in groups:
            self._groups.pop(group, None)
            self._missing.pop(group, None)
        return samples

    def has_unfinished_requests(self) -> bool:
        """Whether any sample has not ended."""
        return bool(self._unfinished)

    def get_num_unfinished_requests(self) -> int:
        """Samples that have not ended."""
        return len(self._unfinished)

    def update_scheduler_stats(self, _: Any) -> None:
        """Statistics are not kept."""
