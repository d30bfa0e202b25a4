"""The quickstart: services on this machine, one real grid as a Ray job, and where to look at it."""

import os
import signal
import sys
from importlib.resources import files
from pathlib import Path

from grids.errors import UserError
from grids.spec import GridSpec
from orchestrator.exit_codes import ExitCode
from orchestrator.services.local import LocalServices
from orchestrator.services.submission import submit_grid

LOGICAL_CPUS = 4
"""CPUs that the local head declares: the sampler, two learners and the verifier share the machine's two cores, since they
alternate by nature. The operating system divides the time."""


def shipped_grid() -> Path:
    """The grid that is run when none is named."""
    return Path(str(files("grids") / "quickstart.yaml"))


def run_quickstart(spec: GridSpec, run_dir: Path, dashboard_port: int, mlflow_port: int) -> int:
    """Run or continue a small grid in ``run_dir``; the job's exit code.

    Services' state (token, MLflow's database, logs) lies beside the run folder in ``services/``.
    """
    run_dir = run_dir.absolute()
    services = LocalServices(
        run_dir.parent / "services", dashboard_port=dashboard_port, mlflow_port=mlflow_port, cpus=LOGICAL_CPUS
    )
    if dashboard_port == mlflow_port:
        raise UserError(f"--mlflow-port: {mlflow_port} is the dashboard's port too; choose another one")
    # Told to stop, it stops what it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print("starting a Ray head and an MLflow server on this machine", flush=True)
    with services:
        os.environ.update(services.environment())
        spec = spec.model_copy(
            update={"tracking": spec.tracking.model_copy(update={"mlflow_uri": services.mlflow_uri})}
        )
        try:
            code = submit_grid(spec, run_dir, services.ray_address, stop_with_follower=True)
        except KeyboardInterrupt:
            print("the quickstart stops its services; the same command continues it")
            return ExitCode.INTERRUPTED
    command = " ".join(services.mlflow_command())
    print(
        f"\nTo browse the metrics:\n  {command}\nthen open {services.mlflow_uri}", file=sys.stdout, flush=True
    )
    return code
