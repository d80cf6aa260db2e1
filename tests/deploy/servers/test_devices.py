"""Who gets which GPU, from the GPUs that there are and the run file alone: there is none where these tests run."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.run import processes
from deploy.servers import devices, probes, vllm_server
from deploy.servers.devices import Seat
from deploy.servers.probes import Gpu
from protocol.config import ConfigError, load

GIB = 1024**3


def machine(count: int, gib: int = 80, cut_off: bool = False) -> list[Gpu]:
    entries = [str(i) for i in range(count)]
    apart = {entry: tuple(other for other in entries if other != entry) if cut_off else () for entry in entries}
    return [Gpu(entry, "a GPU", gib * GIB, apart[entry]) for entry in entries]


def planned(run_file: Path, found: list[Gpu], *overrides: str, weights: int | None = 2 * GIB) -> devices.DevicePlan:
    return devices.plan(found, load(run_file, list(overrides)), weights)


def test_learner_and_servers_have_gpus_of_their_own_where_there_are_enough(run_file: Path) -> None:
    plan = planned(run_file, machine(4), "--vllm.count", "2")
    assert plan.learner.entries == ("0",)
    assert [seat.entries for seat in plan.servers] == [("1",), ("2",)]
    assert plan.transport == "nccl_staged"
    # 0.9 of 80 GiB, less twice the weights, which are built beside those that serve.
    assert plan.servers[0].share == pytest.approx(0.9 - 4 / 80)


def test_a_single_gpu_is_shared_and_weights_go_by_ipc(run_file: Path) -> None:
    plan = planned(run_file, machine(1), "--vllm.count", "2")
    assert [plan.learner.entries, *(seat.entries for seat in plan.servers)] == [("0",)] * 3
    assert plan.transport == "ipc"
    assert [seat.share for seat in plan.servers] == pytest.approx([0.175, 0.175])


def test_too_few_gpus_beside_the_learner_are_shared_by_the_servers(run_file: Path) -> None:
    plan = planned(run_file, machine(2), "--vllm.count", "2")
    assert [seat.entries for seat in plan.servers] == [("1",), ("1",)]
    assert plan.transport == "nccl_staged"
    assert plan.servers[0].share == pytest.approx(0.45 - 4 / 80)


def test_parallel_servers_get_as_many_gpus_as_they_take(run_file: Path) -> None:
    args = '["--tensor-parallel-size", "2", "-pp=1", "--max-model-len", "64"]'
    plan = planned(run_file, machine(6), "--vllm.count", "2", "--vllm.args", args, "--learner.ranks", "2")
    assert plan.learner.entries == ("0", "1")
    assert [seat.entries for seat in plan.servers] == [("2", "3"), ("4", "5")]
    with pytest.raises(ConfigError, match=r"2 servers of 2 GPUs each .* take 5 GPUs, and this machine has 4"):
        planned(run_file, machine(4), "--vllm.count", "2", "--vllm.args", args)


def test_what_does_not_fit_is_an_error_with_its_figures(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner.ranks = 2: this machine has one GPU"):
        planned(run_file, machine(1), "--learner.ranks", "2")
    with pytest.raises(ConfigError, match=r"the weights alone take 30.0 GiB; lower vllm.count"):
        planned(run_file, machine(2), weights=30 * GIB)


def test_gpus_that_do_not_reach_each_other_switch_p2p_and_shm_off_and_that_is_said(run_file: Path) -> None:
    """trl#5865."""
    config = load(run_file, [])
    plan = devices.plan(machine(2, cut_off=True), config, None)
    assert any("P2P and SHM are off" in line for line in plan.lines())
    off = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    settled = devices.settled(config, plan, cpu=False)
    assert devices.nccl_environment(settled) == off
    assert vllm_server.environment(settled).items() >= off.items()
    assert devices.nccl_environment(devices.settled(config, devices.plan(machine(2), config, None), False)) == {}


@pytest.mark.parametrize(("forced", "expected"), [("on", False), ("off", True)])
def test_peer_access_can_be_forced(run_file: Path, forced: str, expected: bool) -> None:
    config = load(run_file, ["--weight_sync.peer_access", forced])
    plan = devices.plan(machine(2, cut_off=not expected), config, None)
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
    one = devices.settled(config, devices.plan(machine(1), config, None), cpu=False)
    assert one.weight_sync.transport == "ipc"
    monkeypatch.setattr(vllm_server, "on_cpu", lambda: False)
    assert '{"backend": "slipstream_ipc"}' in vllm_server.command(one, 0)
    elsewhere = load(run_file, ["--vllm.servers", '["http://10.0.0.1:8000"]'])
    assert devices.settled(elsewhere, None, cpu=False) is elsewhere, "each server says what it has"


def test_quantised_servers_take_a_tolerance_and_vllms_own_reload(run_file: Path) -> None:
    fp8 = ("--vllm.args", '["--quantization=fp8"]')
    with pytest.raises(ConfigError, match=r"probe_tolerance = auto allows; measure .* and set it"):
        devices.check_quantised(load(run_file, [*fp8]))
    with pytest.raises(ConfigError, match=r"transport = gloo: quantised .* set weight_sync.transport = nccl"):
        devices.check_quantised(
            load(run_file, [*fp8, "--weight_sync.probe_tolerance", "1.0", "--weight_sync.transport", "gloo"])
        )
    devices.check_quantised(load(run_file, [*fp8, "--weight_sync.probe_tolerance", "1.0"]))
    assert planned(run_file, machine(2), *fp8).transport == "nccl"
    with pytest.raises(ConfigError, match="a GPU apart from the learner's"):
        planned(run_file, machine(1), *fp8)


def test_the_launcher_hands_out_what_is_planned(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "on_cpu", lambda: False)
    config = load(run_file, ["--vllm.count", "2"])
    plan = devices.plan(machine(3), config, 2 * GIB)
    found = {one.name: one.env for one in processes.run_programs(config, run_file, False, plan)}
    assert [found[name].get("CUDA_VISIBLE_DEVICES") for name in ("learner", "vllm-0", "vllm-1")] == ["0", "1", "2"]
    assert "CUDA_VISIBLE_DEVICES" not in found["worker-0"]
    assert devices.seat_of(None, 1, found["vllm-1"]) == Seat((), 0.85)


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
    assert devices.here(config, cpu=True) is None
    monkeypatch.setattr(probes, "_DRIVERS", ())
    assert devices.here(config, cpu=False) is None
    assert devices.here(load(run_file, ["--vllm.servers", '["http://10.0.0.1:8000"]']), cpu=False) is None


def test_torch_is_asked_in_a_process_of_its_own_and_finds_none_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(probes, "_DRIVERS", (tmp_path,))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert probes.visible_gpus() == []
