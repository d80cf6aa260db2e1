"""What Prometheus reads of the queue: valid text, one series for each histogram, none for each worker."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import threading
from pathlib import Path
from timeit import repeat

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.protocol import codec
from slipstream.protocol.client import QueueClient
from slipstream.protocol.messages import (
    BeginSession,
    Group,
    LearnerReport,
    LeaseAck,
    LeaseRequest,
    Server,
    TicketRequest,
    WorkerReport,
)
from slipstream.rollout_queue import store
from slipstream.rollout_queue.observe.limits import SlotTimes
from slipstream.rollout_queue.observe.prometheus import Histograms
from tests.kit import config, group
from tests.kit.queue import Served, serve_version, serving

METRICS_PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


async def page(queue: Served) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{queue.url}/metrics") as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return await response.text()


def samples(text: str) -> dict[str, float]:
    """Return the values by name and labels, and check what every reader of the format relies on."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, f"{family.name} has no HELP"
        assert family.type != "unknown", f"{family.name} has no TYPE"
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in found, f"{name} is there twice"
            found[name] = sample.value
    return found


def lint(text: str) -> str:
    """Return what promtool says against the text; nothing where it is not installed."""
    if (promtool := shutil.which("promtool")) is None:
        return ""
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    return checked.stdout + checked.stderr


async def test_metrics_of_a_step_are_valid_and_say_what_happened(tmp_path: Path) -> None:
    settings = config(run={"dir": str(tmp_path)}, queue={"store": "sqlite"}, learner={"groups_per_step": 2})
    odd = 'name with "quotes", a \\ and a\nline'
    async with serving(settings, store.build(settings)) as queue, QueueClient(queue.url, patience_s=5.0) as client:
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        await serve_version(client, 0)
        await client.heartbeat(WorkerReport("w", [], failures={odd: 1}, capacity=3))
        for ticket in (await client.tickets(TicketRequest("w", 2, wait_s=0.0))).tickets:
            await client.submit(group(ticket))
        queue.time.now += 7.0
        groups = (await client.lease(LeaseRequest(1, "l", 2, wait_s=0.0))).groups
        trained = [codec.decode(bytes(body), Group).ticket_id for body in groups]
        report = LearnerReport(1, 0.5, 0.1, 1.0, 10, 0.0, 0, metrics={odd: 1.5})
        await client.ack("l", LeaseAck(1, trained, step=1, version=1, report=report))
        await client.tickets(TicketRequest("w", 1, wait_s=0.0))
        queue.broker.observations.connections.refuse(queue.time.now)
        queue.broker.observations.histograms.loop_lag(0.3)
        text = await page(queue)
        found = samples(text)
        assert lint(text) == ""
    expected = {
        "slipstream_group_age_seconds_count": 2,
        "slipstream_group_age_seconds_sum": 14,
        "slipstream_group_staleness_count": 2,
        "slipstream_group_staleness_bucket{le=0.0}": 2,
        "slipstream_poll_seconds_count": 2,
        "slipstream_loop_lag_max_seconds": 0.3,
        "slipstream_workers{does=idle}": 1,
        "slipstream_workers{does=silent}": 0,
        "slipstream_workers_limit": 2048,
        "slipstream_server_lag{server=vllm-0}": 1,
        "slipstream_step": 1,
        "slipstream_busy_total": 1,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert found["slipstream_commit_seconds_count"] >= 5
    assert found["slipstream_commit_decisions_sum"] >= found["slipstream_commit_seconds_count"]
    assert found["slipstream_store_bytes{part=all}"] > found["slipstream_store_bytes{part=log}"] > 0
    assert found["process_resident_memory_bytes"] > 2**20
    assert found["process_open_fds"] > 3


async def test_what_limits_and_what_one_more_would_bring_is_on_the_page() -> None:
    async with serving(config({"vllm": {"max_num_seqs": 4}})) as queue, QueueClient(queue.url) as client:
        assert "slipstream_one_more_gain{of=server}" not in samples(await page(queue))
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        await serve_version(client, 0)
        limits, now = queue.broker.observations.limits, queue.time.now
        for number in range(1, 6):
            limits.stepped(LearnerReport(number, 0.5, 0.9, 1.0, 10, 0.0, 0))
        await client.heartbeat(WorkerReport("w", [], capacity=32))
        limits.slots(SlotTimes(slot_s=32.0, episode_s=32.0), now)
        found = samples(await page(queue))
        assert found["slipstream_limit{part=servers}"] == 1
        assert found["slipstream_limit{part=learner}"] == 0
        assert found["slipstream_one_more_gain{of=server}"] == pytest.approx(1.0)
        assert (found["slipstream_servers_wanted"], found["slipstream_workers_wanted"]) == (2, 1)
        # While one is on its way, no other is asked for.
        await client.put_server(Server("vllm-1", "http://127.0.0.1:8101"))
        assert samples(await page(queue))["slipstream_servers_wanted"] == 2


async def test_the_page_does_not_grow_with_the_workers() -> None:
    async with serving(config()) as queue:
        sizes = []
        for count in (1, 100):
            for number in range(count):
                queue.broker.observations.worker_reports(WorkerReport(f"w{number}", []), queue.time.now)
            sizes.append(len(samples(await page(queue))))
        assert sizes[0] == sizes[1]


async def test_metrics_come_while_the_store_does_not_answer(tmp_path: Path) -> None:
    settings = config(run={"dir": str(tmp_path)}, queue={"store": "sqlite"})
    release = threading.Event()
    async with serving(settings, store.build(settings)) as queue:
        hanging = asyncio.create_task(queue.broker.writer.call(release.wait))
        await asyncio.sleep(0)
        found = samples(await page(queue))
        assert not release.is_set()
        release.set()
        await hanging
        assert not any(name.startswith("slipstream_store_bytes") for name in found)
        assert "slipstream_store_bytes{part=all}" in samples(await page(queue))


def test_an_observation_is_cheap_however_many_came_before() -> None:
    histograms = Histograms()
    for _ in range(10_000):
        histograms.commit_s(0.002, 3)
    each_s = min(repeat(lambda: histograms.poll_s(99.0), number=10_000, repeat=5)) / 10_000
    assert each_s < 20e-6, "seconds; a microsecond on a quiet machine"


async def test_every_metric_is_on_the_page_of_the_docs() -> None:
    async with serving(config()) as queue:
        found = text_string_to_metric_families(await page(queue))
        families = {f"{family.name}_total" if family.type == "counter" else family.name for family in found}
    named = set(re.findall(r"`(\w+)(?:\{[^`]*\})?`", METRICS_PAGE.read_text(encoding="utf-8")))
    assert {name for name in families if name.startswith("slipstream_")} - named == set()
