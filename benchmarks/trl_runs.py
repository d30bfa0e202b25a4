"""TRL from outside: its environment, and runs of ``trl_side.py`` in it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grids.errors import UserError
from grids.expansion import expand
from grids.spec import GridSpec
from orchestrator.pools.pools import KEPT_MEMORY

SIDE = Path(__file__).with_name("trl_side.py")
REQUIREMENTS = (
    Path(__file__).parents[1] / "constraints.txt",
    Path(__file__).with_name("trl_requirements.txt"),
)
INSTALL_SECONDS = 1800.0
VLLM_IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""As our samplers run it."""


@dataclass(frozen=True)
class Variant:
    """A way of running TRL."""

    generation: str
    """``generate`` (padded batches) or ``continuous`` (paged attention, continuous batching), both of transformers, or ``vllm``."""
    threads: int
    micro_batches: int = 1
    """Parts that a batch is learnt in; 1 is the whole batch at once."""
    processes: int = 1
    """Cells at once, each in a process of its own."""

    def __str__(self) -> str:
        parts = "whole batch" if self.micro_batches == 1 else f"{self.micro_batches} micro-batches"
        text = f"{self.generation}, {self.threads} thread{'s' * (self.threads > 1)}, {parts}"
        return text if self.processes == 1 else f"{self.processes} processes: {text}"


@dataclass(frozen=True)
class TrlRate:
    """What the cells took TRL."""

    seconds: float
    """Of all training steps, one after the other in each process."""
    rollouts: int
    start_up_seconds: float
    """From the process' start to the first timed step: imports, loading, and steps on a throw-away model."""
    train_reward: float
    response_tokens: float
    zero_variance: float
    """Share of groups whose rewards are all equal."""
    version: str

    @property
    def rollouts_per_second(self) -> float:
        return self.rollouts / self.seconds


class TrlFailed(Exception):
    """A variant does not run here; the message is its last line."""


def environment_python(folder: Path) -> Path:
    """The interpreter of TRL's environment in ``folder``, which is made where it does not hold the pinned packages.

    Raises:
        UserError: it cannot be made.
    """
    python, installed = folder / "bin" / "python", folder / "installed.txt"
    wanted = "".join(file.read_text() for file in REQUIREMENTS)
    if installed.exists() and installed.read_text() == wanted:
        return python
    print(f"making TRL's environment in {folder} (some minutes, once)", file=sys.stderr, flush=True)
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "-q", "--no-compile", "--no-deps"]
        + [word for file in REQUIREMENTS for word in ("-r", str(file))],
    ):
        made = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        if made.returncode != 0:
            raise UserError(
                f"--environment: {folder} cannot be made: {_last_line(made.stderr)}; "
                "see the Makefile for what pip must find"
            )
    installed.write_text(wanted)
    return python


def settings_of(spec: GridSpec) -> dict[str, Any]:
    """What TRL is to do for a grid's cells, which are all of one batch size."""
    cells = expand(spec)
    return {
        "model": spec.model.path,
        "train": spec.problems.train,
        "problems_per_batch": cells[0].problems_per_batch,
        "rollouts_per_problem": cells[0].rollouts_per_problem,
        "steps": cells[0].update_steps,
        "seeds": [cell.seed for cell in cells],
        "learning_rate": cells[0].learning_rate,
        "warmup_steps": spec.optimiser.warmup_steps,
        "weight_decay": spec.optimiser.weight_decay,
        "max_gradient_norm": spec.optimiser.max_gradient_norm,
        "kl_coefficient": spec.recipe.kl_coefficient,
        "tis_cap": spec.recipe.tis_cap,
        "temperature": spec.sampling.temperature,
        "max_tokens": spec.sampling.max_tokens,
        "prompt_template": spec.sampling.prompt_template,
    }


def run_trl(
    python: Path, folder: Path, settings: Mapping[str, Any], variant: Variant, timeout: float
) -> TrlRate:
    """Run the cells of ``settings``, shared out among the variant's processes.

    Args:
        python: of TRL's environment.
        folder: for the processes' files.
        settings: see ``settings_of``.
        variant: how.
        timeout: in seconds.

    Raises:
        TrlFailed: a process failed or took too long.
    """
    count = variant.processes
    parts = [settings["seeds"][number::count] for number in range(count)]
    with ThreadPoolExecutor(count) as pool:
        running = [
            pool.submit(
                _run_process, python, folder / str(number), {**settings, "seeds": seeds}, variant, timeout
            )
            for number, seeds in enumerate(parts)
        ]
    return together([future.result() for future in running])


def together(rates: Sequence[TrlRate]) -> TrlRate:
    """Processes that ran at once as one: their rates add up, the means are theirs weighted by rollouts."""
    rollouts = sum(rate.rollouts for rate in rates)

    def mean(value: Callable[[TrlRate], float]) -> float:
        return sum(value(rate) * rate.rollouts for rate in rates) / rollouts

    return TrlRate(
        seconds=rollouts / sum(rate.rollouts_per_second for rate in rates),
        rollouts=rollouts,
        start_up_seconds=max(rate.start_up_seconds for rate in rates),
        train_reward=mean(lambda rate: rate.train_reward),
        response_tokens=mean(lambda rate: rate.response_tokens),
        zero_variance=mean(lambda rate: rate.zero_variance),
        version=rates[0].version,
    )


def _run_process(
    python: Path, folder: Path, settings: Mapping[str, Any], variant: Variant, timeout: float
) -> TrlRate:
    folder.mkdir(parents=True, exist_ok=True)
    settings_path, result_path = folder / "settings.json", folder / "result.json"
    settings_path.write_text(json.dumps({**settings, **asdict(variant), "started_at": time.time()}))
    # Compiled files are kept, or every start would compile all that it imports.
    left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"OMP_NUM_THREADS": str(variant.threads), "HF_HUB_OFFLINE": "1"} | VLLM_IN_PROCESS
    environment |= KEPT_MEMORY  # as our engines and learners have it
    try:
        ended = subprocess.run(
            # Without -P the modules beside the script, `site` among them, would hide those of the same name.
            [str(python), "-P", str(SIDE), str(settings_path), str(result_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise TrlFailed(f"not done after {timeout:.0f} s") from None
    (folder / "output.txt").write_text(ended.stdout + ended.stderr)
    if ended.returncode != 0:
        raise TrlFailed(_last_line(ended.stderr))
    return TrlRate(**json.loads(result_path.read_text()))


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]
