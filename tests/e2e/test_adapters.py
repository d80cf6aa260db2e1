"""Versions published as adapters to a real vLLM server of its own: what they compute, and which tokens are whose."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import torch

from slipstream.deploy.servers import vllm_server
from slipstream.learner.model.build import load_policy
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.protocol.config import LearnerSection, LoraSection, ModelSection, WeightSyncSection, load
from slipstream.protocol.messages import Server
from slipstream.protocol.versions import version_of
from slipstream.rollout_worker.inference.client import InferenceClient
from slipstream.rollout_worker.inference.engine import Known, Sampled, SampledSpan, TurnRequest
from slipstream.weight_sync.fleet.adapter_publication import have_loaded
from slipstream.weight_sync.fleet.server_publication import ServerSync
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.proof import ProofFailed
from slipstream.weight_sync.transports.base import build_transport
from slipstream.weight_sync.vllm.adapter_store import PREFIX
from slipstream.weight_sync.weights.snapshot import Probe, Snapshot, probe_token_ids
from tests.e2e.conftest import EXAMPLE, MODULES, SmallRun, _small_run, wait_until_healthy
from tests.kit.ports import free_port
from tests.kit.supervised import processes

pytest.importorskip("peft", reason="needs slipstream-rl[lora]")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LORA = ["--lora.r", "8", "--lora.lora_alpha", "16", "--weight_sync.adapter_only", "true"]
TOLERANCE = 1e-3
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that takes adapters."""
    overrides = ["--model.path", str(model_folder), "--vllm.port", str(free_port()), *LORA]
    config = load(EXAMPLE / "run.toml", overrides)
    with processes(tmp_path_factory.mktemp("vllm"), MODULES) as started:
        env = vllm_server.environment(config) | {"OMP_NUM_THREADS": "1"}
        started.start("vllm", *vllm_server.command(vllm_server.with_cpu_settings(config), 0), env=env)
        wait_until_healthy(config.vllm.urls[0], started)
        yield config.vllm.urls[0]


@pytest.fixture
async def control(url: str) -> AsyncIterator[ServerControl]:
    async with ServerControl(url, timeout_s=30) as control:
        yield control


@pytest.fixture(scope="module")
def policy(model_folder: Path) -> Policy:
    torch.manual_seed(0)
    model, lora = ModelSection(path=str(model_folder), dtype="float32"), LoraSection(r=8, lora_alpha=16)
    return load_policy(str(model_folder), model, Scoring(1.0, 16), LearnerSection(), lora=lora)


def moved(policy: Policy, version: int, by: float = 0.03) -> Snapshot:
    """The next version of the adapter, far enough from the last one to be told apart."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * by)
    return published(policy, version)


def published(policy: Policy, version: int) -> Snapshot:
    assert policy.adapter is not None
    ids = probe_token_ids(512, version)
    return Snapshot(version, policy.adapter.alone(), Probe(ids, policy.score(ids)), torch.float32)


def sync_of(control: ServerControl) -> ServerSync:
    section = WeightSyncSection(timeout_s=20)
    return ServerSync(control, lambda: build_transport(section), TOLERANCE)


def request(tokens: int, choices: int = 1, exact: bool = False) -> TurnRequest:
    rollout = load(EXAMPLE / "run.toml", ["--rollout.temperature", "1.0"]).rollout
    name = f"r{torch.randint(1 << 30, ()).item()}"
    return TurnRequest(name, PROMPT, tokens, rollout, [], "salt", choices, exact=exact)


async def turns_of(client: InferenceClient, url: str, wanted: TurnRequest) -> list[Sampled]:
    answers = [answer async for answer in client.generate(Server("a", url), wanted)]
    return [answer.checked(Known("", 100)) for answer in answers]


async def spans_of(client: InferenceClient, url: str, tokens: int, choices: int = 1) -> list[list[SampledSpan]]:
    return [turn.spans for turn in await turns_of(client, url, request(tokens, choices, exact=True))]


async def test_log_probs_under_each_adapter_are_the_learners_and_nothing_is_paused(
    control: ServerControl, policy: Policy
) -> None:
    server = sync_of(control)
    for version in (1, 2, 3, 4, 5):
        snapshot = moved(policy, version)
        outcome = await server.publish(snapshot)
        assert outcome.proof.max_abs_diff < 1e-4
        assert outcome.pause_s == 0.0
        assert outcome.proof.layers, "what vLLM's layers hold was compared to what was sent"
        assert snapshot.adapter is not None
        name, ids = snapshot.adapter.name, snapshot.probe.token_ids
        assert snapshot.probe.logprobs == pytest.approx((await control.score_by_request(ids, name))[0], abs=1e-4)
        state = await control.adapters()
        assert state.served == name
        assert len(state.loaded) == min(version, 3)
        assert (await control.state()).label == str(version)
    # The base under it never changed.
    assert await control.weight_label() == "default"


async def test_i2_requests_in_flight_keep_their_adapter_and_later_ones_have_the_next(
    control: ServerControl, policy: Policy
) -> None:
    server = sync_of(control)
    await server.publish(moved(policy, 11))
    async with InferenceClient(60) as client, asyncio.TaskGroup() as tasks:
        # Of several versions at once, each with its own log-probs.
        assert await spans_of(client, control.url, 4) == [[SampledSpan(11, 0, 4, "a")]]
        long = tasks.create_task(spans_of(client, control.url, 400, choices=16))
        await asyncio.sleep(0.3)
        await server.publish(moved(policy, 12))
        assert not long.done()
        assert await spans_of(client, control.url, 4) == [[SampledSpan(11, 0, 4, "a")]]  # it learns from this answer
        assert await spans_of(client, control.url, 4) == [[SampledSpan(12, 0, 4, "a")]]
        assert not long.done()
    assert long.result() == [[SampledSpan(11, 0, 400, "a")]] * 16


async def test_tokens_that_an_adapter_sampled_have_its_log_probs(control: ServerControl, policy: Policy) -> None:
    server = sync_of(control)
    await server.publish(moved(policy, 21))
    async with InferenceClient(60) as client:
        [turn] = await turns_of(client, control.url, request(24))
    ours = policy.score(PROMPT + turn.token_ids)[len(PROMPT) - 1 :]
    assert turn.logprobs == pytest.approx(ours, abs=1e-4)


async def test_i5_an_adapter_that_fails_its_proof_is_given_to_nobody(control: ServerControl, policy: Policy) -> None:
    server = sync_of(control)
    await server.publish(moved(policy, 31))
    wrong = moved(policy, 32)
    wrong.probe.logprobs[5] += 0.01
    with pytest.raises(ProofFailed, match="version 32"):
        await server.publish(wrong)
    async with InferenceClient(60) as client:
        assert await spans_of(client, control.url, 4) == [[SampledSpan(31, 0, 4, "a")]]
    assert (await server.publish(moved(policy, 33))).proof.max_abs_diff < 1e-4


def change_file(name: str) -> None:
    (file,) = Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{name}/adapter_model.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"?")


async def test_f2_an_adapter_whose_file_is_changed_after_it_arrived_is_named(
    control: ServerControl, policy: Policy
) -> None:
    """Loaded well, so its log-probs are right; vLLM reads the file again once it has let go of the adapter."""
    server = sync_of(control)
    changed = moved(policy, 34)
    assert changed.adapter is not None
    await have_loaded(control, changed.adapter)
    change_file(changed.adapter.name)
    with pytest.raises(ProofFailed, match=r"version 34 .*its file on the server's disk, which was changed"):
        await server.publish(changed)
    assert (await server.publish(moved(policy, 35))).proof.layers


async def test_i5_the_base_is_refused_and_a_name_that_is_gone_leads_to_the_newest(
    control: ServerControl, policy: Policy
) -> None:
    server = sync_of(control)
    await server.publish(moved(policy, 41))
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}, "output_mode": "tokens"}
    path = f"{control.url}/inference/v1/generate"
    async with aiohttp.ClientSession() as session, session.post(path, json=body) as response:
        assert response.status == 409
        assert version_of(response.headers["slipstream-adapter"]) == 41
    async with InferenceClient(60) as client:
        assert await spans_of(client, control.url, 2) == [[SampledSpan(41, 0, 2, "a")]]
        for version in (42, 43, 44):
            await server.publish(moved(policy, version))
        assert await spans_of(client, control.url, 2) == [[SampledSpan(44, 0, 2, "a")]]


@pytest.fixture
def run(url: str, model_folder: Path, tmp_path: Path) -> Iterator[SmallRun]:
    overrides = ["--vllm.servers", f'["{url}"]', *LORA, "--learner.learning_rate", "3e-3", "--rollout.group_size", "4"]
    overrides += ["--learner.groups_per_step", "4", "--learner.steps", "8", "--learner.checkpoint_every", "0"]
    with processes(tmp_path, MODULES) as started:
        yield _small_run(model_folder, tmp_path, started, overrides)


def test_a_run_trains_on_adapters_alone(run: SmallRun) -> None:
    run.start("queue", "worker", "learner")
    assert run.wait("learner") == 0, run.processes.logs()
    lines = [json.loads(line) for line in (run.config.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step" in line and "loss" in line]
    assert len(steps) == 8
    # Tokens under a wrong version would be far from the learner's policy of that version.
    fresh = [line["sampler/kl_staleness_0"] for line in steps if line.get("sampler/kl_staleness_0") is not None]
    assert fresh
    assert max(fresh) < 1e-4


async def test_i5_merged_weights_can_follow_and_adapters_do_not_outlive_their_base(
    control: ServerControl, policy: Policy
) -> None:
    """The last one here: the base is another after it."""
    server = sync_of(control)
    await server.publish(moved(policy, 51))
    ids = probe_token_ids(512, 52)
    merged = Snapshot(52, policy.named_weights(), Probe(ids, policy.score(ids)), torch.float32)
    assert (await server.publish(merged)).proof.max_abs_diff < 1e-4
    assert (await control.adapters()).loaded == []
    assert (await control.state()).label == "52"
