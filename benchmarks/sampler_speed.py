"""The sampler actor against bare ``LLM.generate``: the same engine, prompts, seeds and settings, in turns in one process.

    python -m benchmarks.sampler_speed --problems 64 --n 16 --repetitions 9

The actor's time is what a caller waits: the request's way there, sampling, rollouts as arrays with their texts, in the slices
that a grid's are graded in, and the way back.
Bare is ``LLM.generate`` of vLLM as it is shipped, timed inside the actor, with parameters made beforehand and its outputs thrown
away; the actor's engine shares prompts, draws seeds and so on in ways of its own.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import ray

from benchmarks import command
from grids.errors import UserError
from grids.spec import ModelSpec, SamplerPool, SamplingSpec
from orchestrator.pools.actors.sampler import SamplerActor
from orchestrator.pools.actors.watchable import WATCH_GROUP
from orchestrator.pools.pools import KEPT_MEMORY
from orchestrator.scheduling.spreading import slices_of_part, split
from workers.rollouts import Rollouts, rollout_seed
from workers.sampler import SamplingRequest

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "grids" / "quickstart"


class BareSampler(SamplerActor):
    """A sampler that can also do without itself."""

    def bare(self, request: SamplingRequest) -> tuple[int, float]:
        """(tokens, seconds) of ``LLM.generate`` alone."""
        # Imported in the engine's process, which sets what vLLM reads when it is imported.
        from benchmarks.bare_engine import as_shipped

        parameters = self.parameters(request)
        prompts: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in request.prompts]
        with as_shipped(self._llm):
            started = time.monotonic()
            outputs = self._llm.generate(prompts, parameters, use_tqdm=False)
            seconds = time.monotonic() - started
        return sum(len(response.token_ids) for output in outputs for response in output.outputs), seconds


def measure(problems: int, n: int, max_tokens: int, repetitions: int) -> dict[str, Any]:
    """Tokens per second of both, each repetition."""
    from transformers import AutoTokenizer

    model = ModelSpec(path=str(QUICKSTART / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model.path)
    lines = (QUICKSTART / "easy_train.jsonl").read_text().splitlines()
    if problems > len(lines):
        raise UserError(f"--problems: the set has {len(lines)}, {problems} were asked for")
    prompts = [tokenizer.encode(json.loads(line)["prompt"] + "=") for line in lines[:problems]]
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": KEPT_MEMORY | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
    )
    actor = ray.remote(concurrency_groups={WATCH_GROUP: 1})(BareSampler).remote(
        model,
        SamplingSpec(temperature=1.0, max_tokens=max_tokens),
        SamplerPool(max_sequences=problems * n),
        max(map(len, prompts)),
    )
    ray.get(actor.start.remote())
    ours: list[float] = []
    bare: list[float] = []
    for repetition in range(repetitions + 1):
        seeds = [rollout_seed("speed", repetition, position) for position in range(problems)]
        request = SamplingRequest(prompts, seeds, n)
        tokens, seconds = ray.get(actor.bare.remote(request))
        started = time.monotonic()
        slices = [len(groups) for groups in split(problems, slices_of_part(problems, n))]
        stream = actor.sample.options(num_returns="streaming").remote(request, None, slices)
        _, *parts = (ray.get(reference) for reference in stream)
        rollouts = Rollouts.join(parts[::2])
        waited = time.monotonic() - started
        if len(rollouts.tokens) != tokens:
            raise RuntimeError(f"{len(rollouts.tokens)} tokens of the actor, {tokens} of the engine alone")
        if repetition:  # the first one warms up
            bare.append(tokens / seconds)
            ours.append(tokens / waited)
    ray.shutdown()
    ratios = [mine / theirs for mine, theirs in zip(ours, bare, strict=True)]
    return {
        "sequences": problems * n,
        "actor_tokens_per_second": ours,
        "bare_tokens_per_second": bare,
        "ratio": statistics.median(ratios),
    }


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--problems", type=command.count, default=64)
    parser.add_argument("--n", type=command.count, default=16)
    parser.add_argument("--max-tokens", type=command.count, default=8)
    parser.add_argument("--repetitions", type=command.count, default=9)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    figures = measure(arguments.problems, arguments.n, arguments.max_tokens, arguments.repetitions)
    if arguments.format == "json":
        print(json.dumps(figures, indent=1))
    else:
        for name in ("actor", "bare"):
            rates = figures[f"{name}_tokens_per_second"]
            print(
                f"{name:<6} {statistics.median(rates):>8,.0f} tokens/s ({min(rates):,.0f} to {max(rates):,.0f})"
            )
        print(
            f"the actor's rate is {figures['ratio']:.2f} of the bare engine's (median of pairs; at least 0.9 is wanted)"
        )
    return 0


if __name__ == "__main__":
    command.run(main)
