"""`vllm.args` are checked before anything starts, against the flags of the vLLM that is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.deploy.checks import preflight
from slipstream.deploy.servers import server_args, vllm_server
from slipstream.deploy.servers.device_plan import Seat
from slipstream.protocol.config import ConfigError, load

BUILD = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
print(json.dumps([name for action in parser._actions for name in action.option_strings]))
"""


@pytest.mark.wide  # real servers are given flags in tests/e2e
def test_the_flags_that_are_read_are_those_of_vllms_parser() -> None:
    pytest.importorskip("vllm")
    built = subprocess.run([sys.executable, "-c", BUILD], check=True, stdout=subprocess.PIPE, text=True, timeout=200)
    flags = set(json.loads(built.stdout.splitlines()[-1]))
    read = server_args.known_flags()
    assert flags <= read
    assert {flag for flag in read - flags if not flag.startswith("--no-")} == set()


@pytest.mark.parametrize(
    ("args", "remedy"),
    [
        (["--max-num-seqz", "4"], r"no flag --max-num-seqz; did you mean --max-num-seqs\?"),
        (["-zz"], r"no flag -zz; remove it; .* --help=all lists those"),
        (["--block-size 32"], r'two entries: \["--block-size", "32"\]'),
        (["--max_num_seqs=4"], r"--max_num_seqs: set vllm\.max_num_seqs"),
        (["--max-model-l", "9"], r"--max-model-l: set vllm\.max_model_len"),
        (["--seed", "1"], r"--seed: set run\.seed"),
        (["--no-enable-scale-out"], r"--no-enable-scale-out: leave it out"),
        (["--weight-transfer-config.backend", "nccl"], r"set weight_sync\.transport"),
        (["--api-key", "secret"], r"set SLIPSTREAM_TOKEN"),
        (["--speculative-config.method", "ngram"], r"speculative decoding is refused"),
        (["-sc", "{}"], r"-sc: leave it out: speculative decoding is refused"),
        (["--config=flags.yaml"], r"put what the file says into vllm\.args"),
    ],
)
def test_a_flag_that_vllm_has_not_or_slipstream_sets_is_refused_before_anything_starts(
    run_file: Path, args: list[str], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^vllm\.args: .*{remedy}") as refused:
        preflight.check_run(load(run_file, ["--vllm.args", json.dumps(args)]), resume=False)
    assert "\n" not in str(refused.value)


def test_flags_are_taken_as_vllm_spells_them() -> None:
    known = frozenset({"--block-size", "--compilation-config", "--tensor-parallel-size", "-tp", "-q", "--load-format"})
    spellings = [
        *("--block_size=32", "--compilation-config.mode", "3", "--tensor-parallel", "2", "-tp=2", "-qfp8", "-O3"),
        *("--load-format", "-1", "--middleware", "mine.Class"),
    ]
    server_args.check_flags(spellings, known | {"--middleware"})
    server_args.check_flags(["--of-another-release"], frozenset())
    with pytest.raises(ConfigError, match=r"set vllm\.port"):
        server_args.check_flags(["--port", "1"], frozenset())


# Flags that Slipstream sets and a user may set otherwise.
MAY_DIFFER = {
    *("--dtype", "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--enforce-eager", "--middleware"),
    *("--distributed-executor-backend", "--disable-uvicorn-access-log"),
    *("--max-lora-rank", "--max-loras", "--max-cpu-loras", "--max-logprobs"),
}


def test_every_flag_that_slipstream_sets_is_vllms_and_either_refused_or_free(run_file: Path) -> None:
    seat = Seat((), 0.5, 1000)
    line = vllm_server.command(load(run_file, ["--lora.r", "4", "--model.revision", "r"]), 0, seat)
    flags = {word for word in line[line.index("--model") :] if word.startswith("--")}
    assert flags <= server_args.known_flags()
    assert flags - server_args.OWN_FLAGS.keys() <= MAY_DIFFER
    server_args.check_flags(sorted(MAY_DIFFER), server_args.known_flags())


def test_quantised_servers_take_a_tolerance_and_vllms_own_transport(run_file: Path) -> None:
    fp8 = ("--vllm.args", '["--quantization=fp8"]')
    with pytest.raises(ConfigError, match=r"probe_tolerance = auto allows; measure .* and set it"):
        server_args.check_server_args(load(run_file, [*fp8]))
    with pytest.raises(ConfigError, match=r"transport = gloo: quantised .* set weight_sync.transport = nccl"):
        server_args.check_server_args(
            load(run_file, [*fp8, "--weight_sync.probe_tolerance", "1.0", "--weight_sync.transport", "gloo"])
        )
    server_args.check_server_args(load(run_file, [*fp8, "--weight_sync.probe_tolerance", "1.0"]))


def test_a_server_has_one_api_process(run_file: Path) -> None:
    for spelling in ('["--api-server-count", "2"]', '["--api_server_count=4"]', '["-asc", "2"]'):
        with pytest.raises(ConfigError, match=r"keeps its pauses and its owner in one API process; leave it out"):
            server_args.check_server_args(load(run_file, ["--vllm.args", spelling]))
    server_args.check_server_args(load(run_file, ["--vllm.args", '["--api-server-count", "1", "-dp", "2"]']))


def test_servers_that_cannot_tell_their_experts_are_refused_before_they_start(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = ("--learner.router_replay", "true")
    with pytest.raises(ConfigError, match=r"router_replay = true: model\.path = .* is a qwen3 without experts"):
        server_args.check_router_replay(load(run_file, [*replay]), cpu=True)
    facts = run_file.parent / "model" / "config.json"
    mixture = json.loads(facts.read_text()) | {"num_experts": 8}
    facts.unlink()
    facts.write_text(json.dumps(mixture))
    with pytest.raises(ConfigError, match=r"router_replay = true: vLLM's CPU build .*; set learner.router_replay"):
        server_args.check_router_replay(load(run_file, [*replay]), cpu=True)
    for refused in ('["-pp", "2"]', '["-dcp", "2"]', '["--no-enable-prefix-caching"]'):
        with pytest.raises(ConfigError, match=r"router_replay = true: .*vllm.args"):
            server_args.check_router_replay(load(run_file, [*replay, "--vllm.args", refused]), cpu=False)
    server_args.check_router_replay(load(run_file, [*replay]), cpu=False)
    server_args.check_router_replay(load(run_file, []), cpu=True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config = load(run_file, [*replay])
    server_args.check_router_replay(config, cpu=True)
    assert "--enable-return-routed-experts" in vllm_server.command(config, 0)
