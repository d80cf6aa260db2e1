"""`slipstream plan --probe`: starts vLLM servers of a run, and measures them."""

from __future__ import annotations

import asyncio
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from slipstream.deploy.planning import probe
from slipstream.deploy.planning.advice import with_counts
from slipstream.deploy.planning.rates import Record
from slipstream.deploy.planning.serving import Curve
from slipstream.deploy.run.processes import Child, Children, run_programs
from slipstream.deploy.run.run_directory import resolved
from slipstream.deploy.servers.probes import check_port
from slipstream.deploy.servers.vllm_server import on_cpu
from slipstream.protocol.config import ConfigError, RunConfig

# Seconds for a server to come up: it may load a large model, and compile.
_START_S = 1800.0
_GRACE_S = 10.0


def measure(record: Record, run_dir: Path, servers: int) -> Curve:
    """Measure a server of a recorded run on this machine, which should do nothing else, and keep what was found.

    Args:
        servers: Number of servers that are planned. Where they would share the cores of a CPU machine, as many are
            measured at one time as well.

    Raises:
        ConfigError: No server can be started here, or it does not come up.
    """
    config = record.config
    if config.vllm.servers:
        raise ConfigError(
            f"vllm.servers = {config.vllm.servers}: --probe starts its own server, and the run's are elsewhere; "
            f"make a short run with vllm.count = 1 on such a machine, and plan --probe --from it there"
        )
    curve = asyncio.run(_measured(record, run_dir, servers))
    probe.save(curve, run_dir)
    return curve


async def _measured(record: Record, run_dir: Path, count: int) -> Curve:
    shape, config = record.rates.shape, with_counts(record.config, servers=1)
    async with _servers(config, run_dir) as urls:
        curve = await probe.measure(config, urls[0], shape)
    if count > 1 and on_cpu():
        config = with_counts(config, servers=count)
        async with _servers(config, run_dir) as urls:
            curve = await probe.measure_sharing(config, urls, shape, curve)
    return curve


@asynccontextmanager
async def _servers(config: RunConfig, run_dir: Path) -> AsyncIterator[Sequence[str]]:
    """Run the servers of a configuration. Yields their addresses."""
    for url in config.vllm.urls:
        check_port(config.vllm.host, urlsplit(url).port or 0, "vllm.port", run_dir / config.run_file.name)
    with tempfile.TemporaryDirectory() as folder, Children(_GRACE_S) as children:
        run_file = Path(folder) / config.run_file.name
        run_file.write_text(resolved(config), encoding="utf-8")
        programs = run_programs(config, run_file, resume=False)
        servers = [children.start(program, Path(folder)) for program in programs if program.name in config.server_names]
        try:
            for server in servers:
                await _wait_until_up(server)
            yield config.vllm.urls
        finally:
            await children.end(servers)


async def _wait_until_up(server: Child) -> None:
    deadline = time.monotonic() + _START_S
    while server.poll() is None and time.monotonic() < deadline:
        if await asyncio.to_thread(_answers, server.program.health or ""):
            return
        await asyncio.sleep(0.5)
    why = server.first_error() or "\n".join(server.tail()[-5:])
    raise ConfigError(f"the vLLM server to measure did not come up: {why}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False
