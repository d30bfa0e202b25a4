"""A second Ray node on this machine, which can be ended alone and started again, as an autoscaler would."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from orchestrator.services.local import LOOPBACK_ONLY

if TYPE_CHECKING:
    from benchmarks.site import Site

SECOND_NODE_ADDRESS = "127.0.0.2"
NODE_TRIES = 4

START_NODE = f"""
import os
from ray._private import services
from ray.scripts.scripts import main
services.resolve_ip_for_localhost = lambda host: host
os.environ |= {LOOPBACK_ONLY}
main()
"""
"""``ray start`` of a node that joins a head on loopback, whose address Ray would replace by the machine's outer one."""


class SecondNode:
    """A Ray node beside the head, as an autoscaler would add it. Its address is another one of loopback."""

    def __init__(self, site: "Site", cpus: int) -> None:
        self._site, self._cpus = site, cpus
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, in a session of its own, and wait until the head knows it.

        On a busy machine Ray's own limits (30 s) can be too short for a node, so it gets several tries.
        """
        for _ in range(NODE_TRIES):
            self.stop()
            log = self._site.folder / "second-node.log"
            self._spawn(log)
            while self._process is not None and self._process.poll() is None:
                if "Ray runtime started" in log.read_text(errors="replace"):
                    return
                time.sleep(0.1)
        raise RuntimeError(f"the second node did not come up: {log}")

    def _spawn(self, log: Path) -> None:
        command = [sys.executable, "-c", START_NODE, "start", "--block"]
        command += ["--address", self._site.head_address, "--node-ip-address", SECOND_NODE_ADDRESS]
        command += ["--num-cpus", str(self._cpus), "--object-store-memory", str(200 * 2**20)]
        command += ["--dashboard-agent-listen-port", "0", "--disable-usage-stats"]
        environment = self._site.environment("direct")
        for name in LOOPBACK_ONLY:
            del environment[name]  # ``ray start`` would refuse a second node
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=self._site.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def raylet(self) -> psutil.Process | None:
        """Its raylet, while it lives."""
        if self._process is None or self._process.poll() is not None:
            return None
        for child in psutil.Process(self._process.pid).children(recursive=True):
            if child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE:
                return child
        return None

    def processes(self) -> list[psutil.Process]:
        """All processes of the node."""
        if self._process is None or self._process.poll() is not None:
            return []
        return psutil.Process(self._process.pid).children(recursive=True)

    def stop(self) -> None:
        """End it and all of its processes."""
        if self._process is None:
            return
        if self._process.poll() is None:
            family = self.processes()
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            for process in psutil.wait_procs(family, timeout=5)[1]:
                process.kill()
        self._process = None
