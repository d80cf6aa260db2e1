"""Who gets which GPU, what it is told of it, and what the run file leaves open: there is no GPU where these run."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest

from slipstream.deploy.run import processes
from slipstream.deploy.servers import device_plan, devices, probes, vllm_server
from slipstream.deploy.servers.device_plan import DevicePlan, Part, Seat
from slipstream.deploy.servers.model_shape import ModelShape
from slipstream.deploy.servers.probes import Gpu
from slipstream.protocol.config import ConfigError, load

GIB = 1024**3


def machine(count: int, gib: int = 80, cut_off: bool = False) -> list[Gpu]:
    entries = [str(i) for i in range(count)]
    apart = {entry: tuple(other for other in entries if other != entry) if cut_off else () for entry in entries}
    return [Gpu(entry, "a GPU", gib * GIB, apart[entry]) for entry in entries]


# Qwen3-0.6B: 1.1 GiB in bfloat16, and 112 KiB for the keys and values of a token.
SMALL = ModelShape(28, 1024, 3072, 16, 8, 128, 151936, tied=True)
# Qwen2.5-7B: 14.2 GiB.
LARGE = ModelShape(28, 3584, 18944, 28, 4, 128, 152064)


def planned(
    run_file: Path, found: list[Gpu], *overrides: str, shape: ModelShape | None = SMALL, part: Part = "run"
) -> DevicePlan:
    return device_plan.plan(found, load(run_file, ["--model.dtype", "bfloat16", *overrides]), shape, part)


def gpus_of(plan: DevicePlan) -> list[tuple[str, ...]]:
    return [plan.learner.entries if plan.learner else (), *(seat.entries for seat in plan.servers)]


def test_learner_and_servers_have_gpus_of_their_own_where_there_are_enough(run_file: Path) -> None:
    plan = planned(run_file, machine(4), "--vllm.count", "2")
    assert gpus_of(plan) == [("0",), ("1",), ("2",)]
    assert plan.transport == "nccl_staged"
    # 0.92 of 80 GiB, less the next version, built next to the one that serves, and two buckets of 64 MiB.
    assert plan.servers[0].share == pytest.approx(0.92 - (SMALL.parameters * 2 / GIB + 0.125) / 80)
    assert plan.servers[0].cache == 0, "vLLM measures: nothing else is on its GPU"
    assert "GPU 3: not used; raise vllm.count or learner.ranks" in plan.lines()


def test_a_single_gpu_is_shared_and_weights_go_by_ipc(run_file: Path) -> None:
    plan = planned(run_file, machine(1), "--vllm.count", "2")
    assert gpus_of(plan) == [("0",)] * 3
    assert plan.transport == "ipc"
    assert all(seat.cache for seat in plan.servers), "vLLM would count the learner's memory as its own"
    assert "GPU 0 is shared by learner, vllm-0, vllm-1: each has a fixed part of its memory" in plan.lines()


def test_too_few_gpus_beside_the_learner_are_shared_by_the_servers(run_file: Path) -> None:
    plan = planned(run_file, machine(2), "--vllm.count", "2")
    assert gpus_of(plan) == [("0",), ("1",), ("1",)]
    assert plan.transport == "nccl_staged"
    assert plan.learner is not None
    assert plan.learner.share == 0, "the learner has its GPU for itself"


def test_parallel_servers_get_as_many_gpus_as_they_take(run_file: Path) -> None:
    args = '["--tensor-parallel-size", "2", "-pp=1", "--max-model-len", "64"]'
    plan = planned(run_file, machine(6), "--vllm.count", "2", "--vllm.args", args, "--learner.ranks", "2")
    assert gpus_of(plan) == [("0", "1"), ("2", "3"), ("4", "5")]
    with pytest.raises(ConfigError, match=r"2 servers of 2 GPUs each .* and a learner of 1 take 5 GPUs, and .* has 4"):
        planned(run_file, machine(4), "--vllm.count", "2", "--vllm.args", args)


def test_a_teacher_of_a_path_takes_the_last_gpus_for_itself(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(run_file, ["--teacher.path", "/models/large", "--teacher.args", '["-tp", "2"]'])
    monkeypatch.setattr(probes, "visible_gpus", lambda: machine(4))
    plan, _ = devices.settle(config, False, lambda line: None)
    assert plan is not None
    assert gpus_of(plan) == [("0",), ("1",)]
    assert plan.teacher is not None
    assert plan.teacher.entries == ("2", "3")
    found = {program.name: program for program in processes.run_programs(config, run_file, False, plan)}
    assert found["teacher"].env["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setattr(probes, "visible_gpus", lambda: machine(2))
    with pytest.raises(ConfigError, match=r"^teacher\.path: .*slipstream serve"):
        devices.settle(config, False, lambda line: None)


def test_a_machine_that_only_serves_gives_its_gpus_to_the_server(run_file: Path) -> None:
    plan = planned(run_file, machine(1), "--vllm.count", "4", shape=LARGE, part="server")
    assert gpus_of(plan) == [(), ("0",)]
    assert plan.transport == "nccl_staged"
    assert planned(run_file, machine(1), "--weight_sync.transport", "nccl_staged", part="server").transport
    tensor = ("--vllm.args", '["-tp", "2"]', "--learner.ranks", "8")
    assert gpus_of(planned(run_file, machine(2), *tensor, part="server")) == [(), ("0", "1")]
    with pytest.raises(ConfigError, match=r"= ipc: the learner is on another machine; leave it at auto"):
        planned(run_file, machine(1), "--weight_sync.transport", "ipc", part="server")


def test_what_does_not_fit_is_refused_with_figures_and_with_what_would_fit(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner.ranks = 2: this machine has one GPU"):
        planned(run_file, machine(1), "--learner.ranks", "2")
    with pytest.raises(
        ConfigError, match=r"takes 147.\d GiB \(weights 28.4 GiB, .*learner.ranks = 3 and .*shard_weights"
    ):
        planned(run_file, machine(8), shape=LARGE)
    with pytest.raises(ConfigError, match=r"it would fit with lora.r = 16"):
        planned(run_file, machine(1), shape=LARGE)
    with pytest.raises(ConfigError, match=r"no setting makes it fit: take a smaller model or more GPUs"):
        planned(run_file, machine(1, gib=4))
    # Weights twice, vLLM's own, and a cache for one sequence.
    tight = ("--lora.r", "16", "--weight_sync.adapter_only", "false")
    with pytest.raises(ConfigError, match=r"new weights 14.2 GiB.*it would fit with vllm.args = .*parallel-size"):
        planned(run_file, [machine(1)[0], *machine(4, gib=24)[1:]], *tight, shape=LARGE)
    with pytest.raises(ConfigError, match=r"one sequence of vllm.max_model_len = 900000 takes 96.\d GiB"):
        planned(
            run_file, machine(2), "--vllm.max_model_len", "900000", "--learner.token_budget", "900000", part="server"
        )


def test_a_model_of_unknown_size_is_not_counted(run_file: Path) -> None:
    assert planned(run_file, machine(2), shape=None).servers[0].share == pytest.approx(0.7)
    plan = planned(run_file, machine(1), "--vllm.count", "2", shape=None)
    assert [seat.share for seat in plan.servers] == pytest.approx([0.175, 0.175])
    assert plan.chosen == {}


def test_what_the_run_file_leaves_open_is_chosen_from_the_memory(run_file: Path) -> None:
    large, small = (planned(run_file, machine(2, gib)).chosen for gib in (80, 24))
    assert large == {
        ("learner", "token_budget"): 32768,
        ("learner", "gradient_checkpointing"): False,
        ("vllm", "max_num_seqs"): 256,
    }
    # 2.6 GiB of the 24 x 0.92 are vLLM's own, 2.3 the weights, twice: 35 whole sequences of 448 MiB, so 70 that grow.
    assert small["vllm", "max_num_seqs"] == pytest.approx(74, abs=6)
    assert (small["learner", "token_budget"], small["learner", "gradient_checkpointing"]) == (32768, True)
    given = ("--learner.token_budget", "5000", "--vllm.max_num_seqs", "7", "--learner.gradient_checkpointing", "true")
    assert planned(run_file, machine(2), *given).chosen == {}


def test_the_run_file_follows_the_checkpoint_and_the_plan_and_that_is_said_in_one_line(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    text = {**sizes, "num_key_value_heads": 8, "vocab_size": 151936, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(text), encoding="utf-8")
    monkeypatch.setattr(probes, "visible_gpus", lambda: machine(2))
    monkeypatch.setattr("slipstream.protocol.config.machine.bfloat16_unit", lambda: None)
    config, said = load(run_file, ["--model.path", str(folder)]), list[str]()
    _, settled = devices.settle(config, cpu=False, say=said.append)
    assert settled.model.dtype == "bfloat16"
    assert (settled.learner.token_budget, settled.vllm.max_num_seqs) == (32768, 256)
    assert [line for line in said if "model.dtype" in line] == [said[-1]]
    assert said[-1].endswith("learner.gradient_checkpointing = false, vllm.max_num_seqs = 256") or "256" in said[-1]
    own = load(run_file, ["--model.path", str(folder), "--model.dtype", "float32"])
    assert devices.settle(own, cpu=False, say=said.append)[1].model.dtype == "float32", "the run file's stays"
    monkeypatch.setattr(probes, "visible_gpus", list)
    said.clear()
    assert devices.settle(config, cpu=False, say=said.append)[1].model == config.model
    monkeypatch.setattr(probes, "visible_gpus", lambda: machine(2))
    assert devices.settle(config, cpu=True, say=said.append)[1].model == config.model, "float32 is faster there"
    assert said == []
    monkeypatch.setattr("slipstream.protocol.config.machine.bfloat16_unit", lambda: "AMX")
    monkeypatch.setattr(devices, "bfloat16_unit", lambda: "AMX")
    assert devices.settle(config, cpu=True, say=said.append)[1].model.dtype == "bfloat16"
    assert len(said) == 1
    assert "AMX" in said[0]
    assert devices.settle(own, cpu=True, say=said.append)[1].model.dtype == "float32", "the run file's stays"


@pytest.mark.parametrize("part", ["run", "server"])
def test_the_first_start_with_a_hub_s_model_takes_its_type_too(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: Part
) -> None:
    """A server that joins is the first process on its machine to ask for the model."""
    kept = tmp_path / "config.json"

    def download(name: str, file: str, revision: str | None = None) -> None:
        assert (name, file, revision) == ("maker/model", "config.json", None)
        kept.write_text('{"dtype": "bfloat16"}', encoding="utf-8")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    cached = lambda *_, **__: str(kept) if kept.exists() else None  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    monkeypatch.setattr(probes, "visible_gpus", lambda: machine(2))
    config = load(run_file, ["--model.path", "maker/model"])
    assert devices.settle(config, cpu=False, say=lambda line: None, part=part)[1].model.dtype == "bfloat16"


def test_a_learner_by_itself_takes_its_gpus_only_where_servers_are_elsewhere(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(devices.SHARE, raising=False)
    monkeypatch.setattr(probes, "visible_gpus", lambda: machine(1))
    monkeypatch.setattr(devices, "model_shape", lambda model: SMALL)
    monkeypatch.setattr(devices, "checkpoint_dtype", lambda model: "bfloat16")
    beside, apart = load(run_file, []), load(run_file, ["--vllm.servers", '["http://10.0.0.1:8000"]'])
    said = list[str]()
    assert devices.settle_learner(beside, said.append).learner == beside.learner
    assert devices.settle_learner(apart, said.append).learner.token_budget == 32768
    assert devices.settle_learner(apart, said.append).model.dtype == "bfloat16"
    monkeypatch.setenv(devices.SHARE, "0.000")
    assert devices.settle_learner(apart, said.append) == apart, "the supervisor has settled it"
    monkeypatch.delenv(devices.SHARE)
    monkeypatch.setenv("WORLD_SIZE", "2")
    several = apart.model_copy(update={"learner": apart.learner.model_copy(update={"ranks": 2})})
    assert devices.settle_learner(several, said.append) == several, "one of two ranks, whose node has one GPU"


def test_gpus_that_do_not_reach_each_other_switch_p2p_and_shm_off_and_that_is_said(run_file: Path) -> None:
    """trl#5865."""
    config = load(run_file, [])
    plan = device_plan.plan(machine(2, cut_off=True), config, None)
    assert any("P2P and SHM are off" in line for line in plan.lines())
    off = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    settled = devices.settled(config, plan, cpu=False)
    assert devices.nccl_environment(settled) == off
    assert vllm_server.environment(settled).items() >= off.items()
    assert devices.nccl_environment(devices.settled(config, device_plan.plan(machine(2), config, None), False)) == {}


def test_peers_are_the_gpus_of_all_ranks_that_send(run_file: Path) -> None:
    found = machine(4)
    found[1] = Gpu("1", "a GPU", 80 * GIB, ("3",))
    assert planned(run_file, found, "--vllm.count", "2").peers, "one rank, on GPU 0"
    assert not planned(run_file, found, "--vllm.count", "2", "--learner.ranks", "2").peers


@pytest.mark.parametrize(("forced", "expected"), [("on", False), ("off", True)])
def test_peer_access_can_be_forced(run_file: Path, forced: str, expected: bool) -> None:
    config = load(run_file, ["--weight_sync.peer_access", forced])
    plan = device_plan.plan(machine(2, cut_off=not expected), config, None)
    assert bool(devices.nccl_environment(devices.settled(config, plan, cpu=False))) == expected


@pytest.mark.parametrize(
    ("count", "transport", "remedy"), [(1, "nccl", "which is ipc here"), (2, "ipc", "which is nccl_staged here")]
)
def test_a_transport_that_the_machine_cannot_carry_is_refused(
    run_file: Path, count: int, transport: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        planned(run_file, machine(count), "--weight_sync.transport", transport)


def test_auto_is_settled_for_both_ends_at_once(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(run_file, [])
    assert config.weight_sync.transport == "auto"
    assert devices.settled(config, None, cpu=True).weight_sync.transport == "gloo"
    assert devices.settled(config, None, cpu=False).weight_sync.transport == "nccl_staged"
    one = devices.settled(config, device_plan.plan(machine(1), config, None), cpu=False)
    assert one.weight_sync.transport == "ipc"
    monkeypatch.setattr(vllm_server, "on_cpu", lambda: False)
    assert '{"backend": "slipstream_ipc"}' in vllm_server.command(one, 0)
    elsewhere = load(run_file, ["--vllm.servers", '["http://10.0.0.1:8000"]'])
    assert devices.settled(elsewhere, None, cpu=False) is elsewhere, "each server says what it has"


def test_quantised_servers_take_vllms_own_reload(run_file: Path) -> None:
    fp8 = ("--vllm.args", '["--quantization=fp8"]')
    assert planned(run_file, machine(2), *fp8).transport == "nccl"
    with pytest.raises(ConfigError, match="a GPU apart from the learner's"):
        planned(run_file, machine(1), *fp8)


def test_the_launcher_hands_out_what_is_planned(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "on_cpu", lambda: False)
    config = load(run_file, ["--vllm.count", "2"])
    plan = device_plan.plan(machine(3), config, SMALL)
    found = {one.name: one.env for one in processes.run_programs(config, run_file, False, plan)}
    assert [found[name].get("CUDA_VISIBLE_DEVICES") for name in ("learner", "vllm-0", "vllm-1")] == ["0", "1", "2"]
    assert "CUDA_VISIBLE_DEVICES" not in found["worker-0"]
    assert devices.seat_of(None, 1, found["vllm-1"]) == Seat((), pytest.approx(plan.servers[1].share, abs=1e-3))
    shared = device_plan.plan(machine(1), config, SMALL)
    found = {one.name: one.env for one in processes.run_programs(config, run_file, False, shared)}
    assert devices.seat_of(None, 1, found["vllm-1"]) == Seat(
        (), pytest.approx(shared.servers[1].share, abs=1e-3), shared.servers[1].cache
    )
    assert shared.learner is not None
    assert float(found["learner"][devices.SHARE]) == pytest.approx(shared.learner.share, abs=1e-3)


def test_a_seat_is_on_the_command_line_and_the_users_own_share_overrides_it(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "on_cpu", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = load(run_file, ["--vllm.args", '["--gpu-memory-utilization", "0.5"]', "--weight_sync.transport", "nccl"])
    command = vllm_server.command(config, 0, Seat(("3",), 0.7))
    shares = [command[i + 1] for i, word in enumerate(command) if word == "--gpu-memory-utilization"]
    assert shares == ["0.700", "0.5"]
    assert vllm_server.environment(config, Seat(("3",), 0.7))["CUDA_VISIBLE_DEVICES"] == "3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    assert vllm_server.environment(config, Seat(("3",), 0.7))["CUDA_VISIBLE_DEVICES"] == "6", "the user's stays"


def test_nothing_is_planned_where_no_gpu_is(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(run_file, [])
    assert devices.settle(config, True, pytest.fail)[0] is None
    monkeypatch.setattr(probes, "_DRIVERS", ())
    assert devices.settle(config, False, pytest.fail)[0] is None


def test_torch_is_asked_in_a_process_of_its_own_and_finds_none_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(probes, "_DRIVERS", (tmp_path,))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert probes.visible_gpus() == []


def test_a_learner_beside_servers_is_kept_within_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from slipstream.learner import run

    bounds = list[float]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", bounds.append)
    for share in ("0.250", "0.000"):  # 0: it has its GPU for itself
        monkeypatch.setenv(devices.SHARE, share)
        run.bound_gpu_memory()
    monkeypatch.delenv(devices.SHARE)
    run.bound_gpu_memory()
    assert bounds == [0.25]
