"""Where the processes of a run are placed: on this machine, or by a scheduler on the machines of a cluster.

An `Engine` prepares the places; its `Children` start processes there, tell their state, end them and have their logs.
`deploy/clusters/` has one file for each scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from slipstream.deploy.run.processes import Children, Program, run_programs
from slipstream.deploy.servers import devices
from slipstream.deploy.servers.device_plan import DevicePlan
from slipstream.deploy.servers.vllm_server import on_cpu, with_cpu_settings
from slipstream.protocol.config import RunConfig


class Engine(Protocol):
    """Places the processes of one run."""

    def children(self, grace_s: float) -> Children:
        """Return what starts and ends processes. `grace_s`: seconds from SIGTERM to SIGKILL."""
        ...

    async def settle(
        self, config: RunConfig, say: Callable[[str], None], episode_tokens: int | None = None
    ) -> RunConfig:
        """Get the places, and return the run file that all processes read, with the addresses that follow from them.

        Args:
            episode_tokens: Tokens of the longest episode; None where only the context bounds it.

        Raises:
            ConfigError: There are no such places; nothing was placed.
        """
        ...

    def queue_url(self, config: RunConfig) -> str:
        """Return the URL by which this machine reaches the queue."""
        ...

    def programs(self, config: RunConfig, run_file: Path, resume: bool) -> list[Program]:
        """Return the processes of the settled run file, in the order in which they are started."""
        ...


class ThisMachine:
    """Places all processes on this machine, and divides its GPUs and cores."""

    def __init__(self) -> None:
        self._planned: DevicePlan | None = None

    def children(self, grace_s: float) -> Children:
        return Children(grace_s)

    async def settle(
        self, config: RunConfig, say: Callable[[str], None], episode_tokens: int | None = None
    ) -> RunConfig:
        self._planned, config = devices.settle(config, on_cpu(), say)
        return with_cpu_settings(config, say, episode_tokens)

    def queue_url(self, config: RunConfig) -> str:
        return config.queue.local_url

    def programs(self, config: RunConfig, run_file: Path, resume: bool) -> list[Program]:
        return run_programs(config, run_file, resume, self._planned)
