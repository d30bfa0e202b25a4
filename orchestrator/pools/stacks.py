"""Where a process stands: the Python stacks of its threads and what the kernel says of it."""

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import ray
from ray.exceptions import RayError

from orchestrator.pools.members import Member, is_here, living_node, on_node

DUMP_SECONDS = 10.0
"""How long py-spy may take; it takes a tenth of a second where it may look at all."""
REMOTE_SECONDS = 30.0
"""How long a dump on another node may take, with the start of a process there."""


def dump(pid: int) -> str:
    """The stacks of a process of this machine and of its children, also of a stopped one, and their state in the kernel.

    Never raises: what could not be had is said in words.
    """
    return f"{_kernel_view(pid)}\n\n{_python_stacks(pid)}\n"


async def dump_member(member: Member) -> str:
    """``dump`` on the node of ``member``. Never raises, and takes at most ``REMOTE_SECONDS``."""
    title = f"--- {member.role}: process {member.pid} on {member.host}\n"
    if is_here(member):
        return title + await asyncio.to_thread(dump, member.pid)
    node_id = living_node(member)
    if node_id is None:
        return f"{title}no node of {member.host} is left to look at it from\n"
    reference = on_node(dump, node_id).remote(member.pid)
    try:
        return title + await asyncio.wait_for(reference, REMOTE_SECONDS)
    except (TimeoutError, RayError) as error:
        ray.cancel(reference, force=True)
        return f"{title}its node did not answer: {type(error).__name__} {error}\n"


def _kernel_view(pid: int) -> str:
    """State and place in the kernel of each thread."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda path: int(path.name)):
        try:
            fields = dict(
                line.split(":", 1) for line in (task / "status").read_text().splitlines() if ":" in line
            )
            place = (task / "wchan").read_text()
        except OSError:
            continue  # a thread that has ended, or one that this user may not look at
        lines.append(
            f"thread {task.name} ({fields['Name'].strip()}): {fields['State'].strip()}"
            + ("" if place in ("", "0") else f", in {place}")
        )
    return "\n".join(lines) or f"process {pid} does not run here"


def _python_stacks(pid: int) -> str:
    # Beside the interpreter first: a virtual environment need not be on the path of a Ray worker.
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if program is None:
        return "no Python stacks: py-spy is not installed"
    # Without stopping the process: py-spy would wait for ever for one that is stopped already.
    command = [program, "dump", "--pid", str(pid), "--nonblocking", "--subprocesses"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no Python stacks: py-spy did not answer within {DUMP_SECONDS:g} s"
    if done.returncode != 0:
        return f"no Python stacks: {done.stderr.strip()}"
    return done.stdout.strip()
