"""vLLM's command line and environment: what RL rests on is there, and what the user adds overrides it."""

from __future__ import annotations

import json
import os
import shutil
from importlib import import_module
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from aiohttp import web
from typer.testing import CliRunner

from slipstream.deploy.cli import app
from slipstream.deploy.servers import cpu_settings, vllm_server
from slipstream.protocol import codec
from slipstream.protocol.config import ConfigError, RunConfig, load
from slipstream.protocol.messages import Server, ServerChange, ServerState


@pytest.fixture(params=[True, False], ids=["cpu", "gpu"])
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    on_cpu: bool = request.param
    monkeypatch.setattr(vllm_server, "on_cpu", lambda: on_cpu)
    return on_cpu


def config(run_file: Path, *overrides: str) -> RunConfig:
    return load(run_file, list(overrides))


def value_of(command: list[str], flag: str) -> str:
    assert command.count(flag) == 1
    return command[command.index(flag) + 1]


def test_what_rl_needs_is_on_the_command_line(run_file: Path, cpu: bool) -> None:
    settings = config(run_file, "--vllm.max_model_len", "777", "--vllm.max_num_seqs", "33", "--model.dtype", "bfloat16")
    command = vllm_server.command(settings, 0)
    # Log-probs of the distribution that was sampled from, whatever the checkpoint's own sampling defaults.
    assert value_of(command, "--logprobs-mode") == "processed_logprobs"
    assert value_of(command, "--generation-config") == "vllm"
    assert value_of(command, "--weight-transfer-config") == f'{{"backend": "{"gloo" if cpu else "nccl_staged"}"}}'
    assert value_of(command, "--served-model-name") == "policy"
    assert value_of(command, "--max-model-len") == "777"
    assert value_of(command, "--max-num-seqs") == "33"
    assert value_of(command, "--dtype") == "bfloat16"
    assert "--enable-scale-out" in command
    assert ("--enforce-eager" in command) == cpu
    assert Path(value_of(command, "--model")) == (run_file.parent / "model").resolve()


def test_the_cpu_engine_computes_by_itself_unless_it_has_several_workers_or_threads_to_bind(
    run_file: Path, cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = "--distributed-executor-backend"
    monkeypatch.delenv(vllm_server.THREADS_BIND, raising=False)
    assert (flag in vllm_server.command(config(run_file), 0)) == cpu
    assert flag not in vllm_server.command(config(run_file, "--vllm.args", '["-tp", "2"]'), 0)
    monkeypatch.setenv(vllm_server.THREADS_BIND, "0-3")
    assert flag not in vllm_server.command(config(run_file), 0)


def test_vllm_has_the_executor_inside_its_engine() -> None:
    pytest.importorskip("vllm")
    module, _, name = vllm_server.IN_ENGINE.rpartition(".")
    assert hasattr(import_module(module), name)


def test_a_hub_name_stays_as_it_is(run_file: Path, cpu: bool) -> None:
    assert value_of(vllm_server.command(config(run_file, "--model.path", "org/name"), 0), "--model") == "org/name"


def test_tokenizer_revision_and_remote_code_are_passed_on(run_file: Path, cpu: bool) -> None:
    plain = vllm_server.command(config(run_file, "--model.path", "org/name"), 0)
    assert not {"--revision", "--trust-remote-code", "--tokenizer", "--tokenizer-revision"} & {*plain}
    own = vllm_server.command(
        config(run_file, "--model.path", "org/name", "--model.revision", "abc", "--model.trust_remote_code", "true"), 0
    )
    assert value_of(own, "--revision") == "abc"
    assert "--trust-remote-code" in own
    assert "--tokenizer" not in own, "the model's, at its revision"
    hub = config(run_file, "--model.path", "org/name", "--model.revision", "abc", "--model.tokenizer", "org/other")
    other = vllm_server.command(hub, 0)
    assert (value_of(other, "--tokenizer"), value_of(other, "--tokenizer-revision")) == ("org/other", "main")
    local = vllm_server.command(config(run_file, "--model.tokenizer", str(run_file.parent / "model")), 0)
    assert Path(value_of(local, "--tokenizer")) == (run_file.parent / "model").resolve()


def test_vllm_takes_these_flags(run_file: Path) -> None:
    parser = pytest.importorskip("vllm.engine.arg_utils")
    known = {name.replace("_", "-") for name in parser.EngineArgs.__dataclass_fields__}
    assert {"revision", "trust-remote-code", "tokenizer", "tokenizer-revision"} <= known


@pytest.mark.parametrize(
    ("overrides", "offline"),
    [([], True), (["--model.tokenizer", "org/name"], False), (["--model.trust_remote_code", "true"], False)],
)
def test_only_what_is_all_local_is_served_offline(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], offline: bool
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert ("HF_HUB_OFFLINE" in vllm_server.environment(config(run_file, *overrides))) == offline


def test_the_users_arguments_stand_last_and_so_override_ours(run_file: Path, cpu: bool) -> None:
    command = vllm_server.command(config(run_file, "--vllm.args", '["--max-num-seqs", "1", "--swap space"]'), 0)
    assert command[-3:] == ["--max-num-seqs", "1", "--swap space"]


def test_replicas_differ_in_port_and_seed_and_in_nothing_else(run_file: Path, cpu: bool) -> None:
    """With one seed, two replicas would sample the same episodes."""
    settings = config(run_file, "--vllm.count", "2", "--run.seed", "7")
    first, second = (vllm_server.command(settings, index) for index in range(2))
    assert [value_of(line, "--port") for line in (first, second)] == [url.split(":")[-1] for url in settings.vllm.urls]
    differing = {first[place - 1] for place, (a, b) in enumerate(zip(first, second, strict=True)) if a != b}
    assert differing == {"--port", "--seed"}


def test_no_two_runs_with_neighbouring_seeds_share_a_servers_seed(run_file: Path, cpu: bool) -> None:
    seeds = [
        value_of(vllm_server.command(config(run_file, "--vllm.count", "64", "--run.seed", str(seed)), index), "--seed")
        for seed in (7, 8)
        for index in range(64)
    ]
    assert len(set(seeds)) == len(seeds)


def test_the_environment_opens_vllms_control_routes(run_file: Path, cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "as it is")
    environment = vllm_server.environment(config(run_file))
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["KEPT"] == "as it is"
    assert (environment.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind") == cpu
    assert (vllm_server.KEPT_PAGES.items() <= environment.items()) == cpu


def test_what_the_user_set_in_the_environment_stays(run_file: Path, cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    assert vllm_server.environment(config(run_file))["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"


async def test_i5_a_server_that_starts_is_announced_as_joining(run_file: Path, unused_tcp_port: int) -> None:
    seen: list[Server] = []

    async def put(request: web.Request) -> web.Response:
        seen.append(codec.decode_json(await request.read(), ServerChange).server)
        return web.Response(body=codec.encode_json(seen[-1]))

    app = web.Application()
    app.router.add_put("/v1/servers/{name}", put)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
    try:
        settings = config(run_file, "--queue.port", str(unused_tcp_port), "--vllm.count", "2", "--vllm.port", "9000")
        await vllm_server.announce(settings, 1)
    finally:
        await runner.cleanup()
    assert [(s.name, s.url, s.state) for s in seen] == [("vllm-1", "http://127.0.0.1:9001", ServerState.JOINING)]


async def test_a_server_starts_without_a_queue_too(run_file: Path, unused_tcp_port: int) -> None:
    await vllm_server.announce(config(run_file, "--queue.port", str(unused_tcp_port)), 0, patience_s=0.05)


@pytest.mark.parametrize(
    ("overrides", "index"), [(["--vllm.count", "2"], 2), (["--vllm.servers", '["http://a:1"]'], 1)]
)
def test_a_server_that_the_run_file_does_not_have_is_refused(run_file: Path, overrides: list[str], index: int) -> None:
    with pytest.raises(ConfigError, match=f"--index {index}"):
        vllm_server.run(config(run_file, *overrides), index)


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://127.0.0.1:9100", "127.0.0.1", "9100"),
        ("http://10.0.0.9:9100", "10.0.0.9", "9100"),
        ("http://a", "a", "80"),
    ],
)
def test_a_server_that_the_run_file_names_starts_where_that_expects_it(
    run_file: Path, cpu: bool, monkeypatch: pytest.MonkeyPatch, url: str, host: str, port: str
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "0123456789abcdef0123456789abcdef")
    monkeypatch.setattr(vllm_server.probes, "require_modules", lambda *_: None)
    monkeypatch.setattr(vllm_server, "announce", AsyncMock())
    started: list[list[str]] = []
    monkeypatch.setattr(vllm_server.os, "execve", lambda path, line, env: started.append(line))
    servers = f'["http://127.0.0.1:1", "{url}"]'
    vllm_server.run(config(run_file, "--vllm.servers", servers), 1)
    (line,) = started
    assert (value_of(line, "--host"), value_of(line, "--port"), value_of(line, "--seed")) == (host, port, "1")


def test_a_server_of_adapters_takes_their_rank_and_those_in_flight(run_file: Path, cpu: bool) -> None:
    lora = ["--lora.r", "12", "--queue.max_staleness", "3"]
    command = vllm_server.command(config(run_file, *lora, "--weight_sync.adapter_only", "true"), 0)
    assert "--enable-lora" in command
    assert value_of(command, "--max-lora-rank") == "16"
    assert value_of(command, "--max-loras") == "5"
    assert value_of(command, "--max-cpu-loras") == "6"
    for merged in (lora, [*lora, "--weight_sync.adapter_only", "false"], ["--weight_sync.adapter_only", "auto"]):
        on = "--enable-lora" in vllm_server.command(config(run_file, *merged), 0)
        assert on == (not cpu and merged == lora)


def test_i8_the_token_is_asked_for_before_adapters_are_looked_at(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "s" * 32)
    command = vllm_server.command(config(run_file, "--lora.r", "8", "--weight_sync.adapter_only", "true"), 0)
    outward = [command[place + 1] for place, flag in enumerate(command) if flag == "--middleware"]
    assert outward.index("slipstream.weight_sync.vllm.adapters.Adapters") < outward.index(
        "slipstream.weight_sync.vllm.guard.RequireToken"
    )
    assert outward[0] == "slipstream.weight_sync.vllm.middleware.Slipstream"


def test_a_plain_server_takes_vllm_s_own_flags_after_what_the_cpu_build_needs(
    cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(vllm_server.os, "execve", lambda path, line, env: started.append(line))
    runner = CliRunner()
    given = ["--runner", "pooling", "--port", "8300"]
    assert runner.invoke(app, ["serve", "org/reward-model", *given]).exit_code == 0
    (line,) = started
    assert line[line.index("--model") + 1] == "org/reward-model"
    assert line[-4:] == given
    assert ("--enforce-eager" in line, "--kv-cache-memory-bytes" in line) == (cpu, cpu)


@pytest.mark.parametrize(("fast", "dtype"), [((), "float32"), (("bfloat16",), None)])
def test_a_plain_server_computes_in_a_type_that_the_cpu_multiplies_in(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fast: tuple[str, ...], dtype: str | None
) -> None:
    model = tmp_path / "model"
    shutil.copytree(load(run_file).model.path, model)
    facts = json.loads((model / "config.json").read_text()) | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (model / "config.json").write_text(json.dumps(facts))
    started: list[list[str]] = []
    monkeypatch.setattr(vllm_server, "on_cpu", lambda: True)
    monkeypatch.setattr(cpu_settings, "fast_types", lambda on_gpu: frozenset(fast))
    monkeypatch.setattr(os, "execve", lambda program, line, env: started.append(line))
    vllm_server.serve(str(model), ["--port", "9"])
    (line,) = started
    assert line[-2:] == ["--port", "9"]
    assert ("--dtype" in line and value_of(line, "--dtype")) == (dtype or False)
