"""The probe of a server: it asks as workers do, and the curve is that of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.deploy.planning import probe
from slipstream.deploy.planning.probe import Shape
from slipstream.deploy.planning.serving import Curve
from slipstream.protocol.config import ConfigError
from tests.kit.config import config
from tests.kit.fake_vllm import FakeEngine, FakeVllm, Fault, serving

TURN = 5


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_SETTLE_S", 0.05)
    monkeypatch.setattr(probe, "_MEASURE_S", 1.0)
    monkeypatch.setattr(probe, "_PROMPTS", 8)


def settings() -> Any:
    return config(rollout={"group_size": 4}, vllm={"max_num_seqs": 8})


async def test_a_probe_runs_as_many_requests_as_it_says_and_finds_how_long_they_take() -> None:
    most = 0

    def latency_s(index: int) -> float:
        """Of a request: 10 ms for each that runs."""
        nonlocal most
        most = max(most, engine.running)
        return 0.01 * engine.running

    engine = FakeEngine(policy=lambda ids, index: [7] * TURN, latency_s=latency_s)
    server = FakeVllm(engine)
    async with serving(server) as url:
        curve = await probe.measure(settings(), url, Shape(prompt=8, turn=TURN, turns=1.5))
    assert most == 8
    assert [round(running) for running, _ in curve.points][-1] in range(5, 9)
    assert curve.token_s(8) > 2 * curve.token_s(1) > 0.002
    first = [body for body in server.requests if body["sampling_params"]["n"] == 4]
    later = [body for body in server.requests if body["sampling_params"]["n"] == 1 and len(body["token_ids"]) == 13]
    assert first
    assert later, "no episode continued to its second turn"
    assert {body["sampling_params"]["min_tokens"] for body in (*first, *later)} == {TURN}


async def test_servers_that_share_cores_are_measured_at_one_time() -> None:
    running = 0

    def latency_s(index: int) -> float:
        """Of a request: 10 ms for each that runs on any of the servers."""
        nonlocal running
        running = sum(engine.running for engine in engines)
        return 0.01 * running

    engines = [FakeEngine(policy=lambda ids, index: [7] * TURN, latency_s=latency_s) for _ in range(2)]
    async with serving(FakeVllm(engines[0])) as first, serving(FakeVllm(engines[1])) as second:
        alone = await probe.measure(settings(), first, Shape(8, TURN, 1.5))
        curve = await probe.measure_sharing(settings(), [first, second], Shape(8, TURN, 1.5), alone)
    assert curve.points == alone.points
    assert 1.5 < curve.among(2) < 2.7
    assert curve.among(3) == pytest.approx(1.5 * curve.among(2)), "not measured"
    assert alone.among(3) == 3.0


@pytest.mark.parametrize(
    ("fault", "says"), [(Fault("status", None), "500"), (Fault("status", None, status=400), "400")]
)
async def test_a_server_that_refuses_is_named(fault: Fault, says: str) -> None:
    server = FakeVllm(FakeEngine(policy=lambda ids, index: [7] * TURN))
    server.faults.append(fault)
    async with serving(server) as url:
        with pytest.raises(ConfigError, match=rf"the vLLM server at {url} does not answer the probe.*{says}"):
            await probe.measure(settings(), url, Shape(8, TURN, 1.5))


def test_a_curve_is_kept_beside_the_record_and_a_broken_one_named(tmp_path: Path) -> None:
    assert probe.read(tmp_path) is None
    curve = Curve(((1.0, 0.01), (8.0, 0.02)), 0.001, ((2, 2.4),))
    probe.save(curve, tmp_path)
    assert probe.read(tmp_path) == curve
    broken = ["{", '{"points":[]}', '{"points":[[4,0.1],[2,0.1]]}', '{"points":[[1,-0.1]]}', '{"points":[[1,1e-300]]}']
    for text in (*broken, '{"points":[[1,0.1]],"prefill_s":-1}', '{"points":[[1,0.1]],"sharing":[[2,0]]}'):
        (tmp_path / probe.FILE_NAME).write_text(text)
        with pytest.raises(ConfigError, match="delete it, and measure again with --probe"):
            probe.read(tmp_path)
