"""`slipstream plan --probe`: starts one of a run's vLLM servers, and measures it."""

from __future__ import annotations

import asyncio
import tempfile
import time
import urllib.request
from pathlib import Path

from deploy.planning import probe
from deploy.planning.rates import Record
from deploy.planning.serving import Curve
from deploy.run.processes import Child, Children, run_programs
from deploy.servers.probes import check_port
from protocol.config import ConfigError

# Seconds for a server to come up: it may load a large model, and compile.
_START_S = 1800.0
_GRACE_S = 10.0


def measure(record: Record, run_dir: Path) -> Curve:
    """Measure a server of a recorded run on this machine, which should do nothing else, and keep what was found.

    Raises:
        ConfigError: No server can be started here, or it does not come up.
    """
    config = record.config
    if config.vllm.servers:
        raise ConfigError(
            f"vllm.servers = {config.vllm.servers}: --probe starts a server of its own, and the run's are elsewhere; "
            f"make a short run with vllm.count = 1 on such a machine, and plan --probe --from it there"
        )
    check_port(config.vllm.host, config.vllm.port, "vllm.port", run_dir / config.run_file.name)
    curve = asyncio.run(_measured(record, run_dir))
    probe.save(curve, run_dir)
    return curve


async def _measured(record: Record, run_dir: Path) -> Curve:
    config = record.config
    program = next(of for of in run_programs(config, run_dir / config.run_file.name, False) if of.role == "vllm")
    with tempfile.TemporaryDirectory() as logs, Children(_GRACE_S) as children:
        server = children.start(program, Path(logs))
        try:
            await _wait_until_up(server)
            return await probe.measure(config, config.vllm.urls[0], record.rates.shape)
        finally:
            await children.end([server])


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
