"""Settings of the vLLM servers, of publishing weights to them, and of the launcher."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Literal

from pydantic import Field, field_validator

from slipstream.protocol.addresses import checked_url
from slipstream.protocol.config.sections.base import (
    WILDCARDS,
    Bytes,
    Count,
    CountOrZero,
    Host,
    Port,
    Seconds,
    Section,
    own_url,
    setting,
)

# Maximum servers of a run's registry.
MAX_SERVERS = 1024


class WeightSyncSection(Section):
    transport: Literal["auto", "gloo", "http", "nccl", "nccl_staged", "ipc"] = setting(
        "auto",
        description="way of the weights, at both ends: gloo (CPU, plain TCP), http (servers pull from the learner"
        " and each other, also behind NAT), nccl_staged (GPU to GPU, during generation), ipc (one "
        "shared GPU), nccl (vLLM's own engine, paused)",
        why="gloo on CPUs, ipc on a shared GPU, else nccl_staged",
    )
    peer_access: Literal["auto", "on", "off"] = setting(
        "auto",
        description="whether NCCL may copy between GPUs directly and through shared memory; off: not, at both ends",
        why="off where GPUs cannot reach each other, since NCCL may hang",
    )
    every: Count = setting(
        1,
        description="N: optimiser steps between publications",
        why="fresh weights are better, and cheap",
    )
    quorum: int = setting(
        1,
        ge=1,
        le=MAX_SERVERS,
        description="servers that must prove a version for its publication to count",
        why="no server holds up the run",
    )
    adapter_only: bool | Literal["auto"] = setting(
        "auto",
        description="with lora.r: publish only the adapter, about a hundredth of the bytes and without a pause; "
        "auto: on GPUs, where vLLM can serve the adapter",
        why="on a CPU adapters slow vLLM down",
    )
    host: Host = setting(
        "127.0.0.1", description="the learner's address as the servers see it", why="right on one machine"
    )
    probe_tolerance: Annotated[float, Field(gt=0, le=1000)] | Literal["auto"] = setting(
        "auto",
        description="difference of log-probs between server and learner, in nats: nine in ten of a probe stay "
        "below it, all below 4 times it; in 16 bits half stay below it, nine in ten below 4 times and"
        " all below 40 times it; auto: 0.001 in float32, 0.5 in 16 bits, 2 and 4 when quantised to 8 "
        "and 4 bits",
        why="ten times the largest float32 difference; four times the largest bfloat16 median",
    )
    timeout_s: Seconds = setting(
        300.0,
        description="time-out of one publication to one server",
        why="70 GB over 2 Gbit/s",
    )
    bucket_bytes: Bytes = setting(
        64 * 1024**2,
        description="bytes sent at once by all ranks together; each end on a GPU holds up to two such buffers",
        why="cheap calls, small buffers",
    )
    http_port: int = setting(
        0,
        ge=0,
        le=65535,
        description="port of `host` where the learner serves weights; 0: any free port",
        why="without a firewall no port matters",
    )
    http_mbytes_per_s: float = setting(
        0.0,
        ge=0,
        le=10**6,
        description="maximum megabytes a second sent by the learner and by each server that passes weights on; 0:"
        " no limit",
        why="fastest",
    )
    delta: bool = setting(
        False,
        description="send only changed values if that is less; exact; for gloo and http",
        why="costs the learner a copy of the weights; no faster on fast lines",
    )
    full_every: Count = setting(
        20,
        description="with `delta`, publications to a server between full ones",
        why="hidden faults do not last",
    )

    @field_validator("host")
    @classmethod
    def _can_be_dialled(cls, value: str) -> str:
        if value in WILDCARDS:
            raise ValueError(
                "is an address to listen on, and servers cannot dial it; give the address at which they reach the "
                "learner's machine, such as 10.0.0.5"
            )
        return value


class VllmSection(Section):
    servers: list[str] = setting(
        [], description="URLs of running servers; empty: the launcher starts `count`", why="one machine needs none"
    )
    count: int = setting(1, ge=0, le=64, description="servers that the launcher starts; 0: all join", why="one GPU")
    host: Host = setting(
        "127.0.0.1",
        description="address that the launched servers listen on",
        why="loopback needs no token",
    )
    port: Port = setting(
        8100,
        description="port of the first launched server; the next follow",
        why="vLLM's usual 8000 may be taken",
    )
    max_model_len: int = setting(
        4096,
        ge=16,
        le=10**9,
        description="context of the model: prompt, turns and tools",
        why="a prompt, 2,000 sampled tokens, tool results",
    )
    max_num_seqs: Count = setting(
        64,
        description="sequences that one server samples at once",
        why="limited by the cache; on GPUs `slipstream up` fits it, at most 256",
    )
    start_timeout_s: Seconds = setting(
        600.0, description="time-out of a server's start", why="loads and compiles a large model"
    )
    drain_timeout_s: Seconds = setting(
        300.0,
        description="time after which a leaving server is removed despite running requests",
        why="longer than a turn",
    )
    args: list[str] = setting(
        [],
        description="further arguments of vLLM's server, as on its command line",
        why="RL's own are set already",
    )

    @field_validator("servers")
    @classmethod
    def _urls(cls, value: list[str]) -> list[str]:
        return [checked_url(url) for url in value]

    @property
    def launched(self) -> int:
        """Servers that the launcher starts; the others run elsewhere, or join by themselves."""
        return 0 if self.servers else self.count

    @property
    def urls(self) -> list[str]:
        return self.servers or [own_url(self.host, self.port + i) for i in range(self.count)]


class DeploySection(Section):
    restart: CountOrZero = setting(
        3,
        description="consecutive restarts of a server, worker or queue that died, and of a learner that lost a rank",
        why="survives a crash; a recurring fault ends the run",
    )
    grace_s: Seconds = setting(
        20.0,
        description="time after a stop after which processes are killed",
        why="a small model's checkpoint",
    )


TYPES = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}

# Nats: maximum difference of a log-prob that rounding explains, over ids from the whole vocabulary.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.5}

_EIGHT_BITS, _FOUR_BITS = 2.0, 4.0

# Methods by which vLLM itself quantises 16-bit weights, which the learner sends, as it loads them.
QUANTISED = {
    **dict.fromkeys(("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8"), _EIGHT_BITS),
    **dict.fromkeys(("int8_per_channel_weight_only", "experts_int8", "torchao", "online"), _EIGHT_BITS),
    "nvfp4_per_token": _FOUR_BITS,
}


def served_dtype(model_dtype: str, args: Sequence[str]) -> str:
    """Return the type that servers compute in: float32, bfloat16 or float16."""
    given = flag_value(args, "--dtype")
    return TYPES.get(given or model_dtype, model_dtype)


def served_quantisation(args: Sequence[str]) -> str | None:
    """Return the quantisation that `vllm.args` asks for; None for none."""
    return flag_value(args, "--quantization", "-q")


def served_bits(args: Sequence[str]) -> int:
    """Return the bits of a weight that the servers quantise; 0 where they do not."""
    method = served_quantisation(args)
    if method is None:
        return 0
    return 4 if QUANTISED.get(method) == _FOUR_BITS else 8


def probe_tolerance(model_dtype: str, args: Sequence[str]) -> float:
    """Return the value of `weight_sync.probe_tolerance = "auto"`, in nats."""
    method = served_quantisation(args)
    return QUANTISED[method] if method in QUANTISED else TOLERANCES[served_dtype(model_dtype, args)]


# Flags of vLLM that the plan of the GPUs counts with: whole numbers, and sizes as `size_of` reads them.
_COUNTS = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
    ("--prefill-context-parallel-size", "-pcp"),
)
_SIZES = ("--max-num-batched-tokens", "--kv-cache-memory-bytes")


def check_server_args(args: Sequence[str]) -> None:
    """Check the flags that Slipstream reads, and that servers can load the learner's weights. Raises ValueError."""
    for names in _COUNTS:
        _check_number(args, names, "a whole number above 0", lambda text: int(text) > 0)
    for name in _SIZES:
        _check_number(args, (name,), "a number above 0, such as 8192, 8k or 1.5g", lambda text: bool(size_of(text)))
    share = ("--gpu-memory-utilization",)
    _check_number(args, share, "a share above 0 and at most 1", lambda text: 0 < float(text) <= 1)
    method = served_quantisation(args)
    if method is not None and method not in QUANTISED:
        raise ValueError(
            f"vllm.args has --quantization {method}, whose weights are packed before a server loads them: it cannot "
            f"take those that the learner sends, and the first publication would fail. Take one that vLLM quantises by "
            f"itself: {', '.join(QUANTISED)}"
        )


def _check_number(args: Sequence[str], names: Sequence[str], wanted: str, fits: Callable[[str], bool]) -> None:
    if not has_flag(args, *names):
        return
    given = flag_value(args, *names)
    with suppress(ValueError):
        if given is not None and fits(given):
            return
    raise ValueError(f"vllm.args has {names[0]} {'without a value' if given is None else given}: give it {wanted}")


def size_of(text: str) -> int | None:
    """Read a number as vLLM's flags take it: 256, 4k = 4,000, 4K = 4,096, 1.5g; None if it is none."""
    found = re.fullmatch(r"(\d+)([KMGT]?)|(\d+(?:\.\d+)?)([kmgt])", text.strip())
    if found is None:
        return None
    whole, binary, number, decimal = found.groups()
    if whole is not None:
        return int(whole) << 10 * " KMGT".index(binary or " ")
    return int(float(number) * 10 ** (3 * " kmgt".index(decimal)))


def flag_value(args: Sequence[str], *names: str) -> str | None:
    """Return the last value given for a flag of vLLM, which is the one that vLLM takes; None if it is not given.

    Args:
        args: A command line: `--flag value`, `--flag=value`, with underscores for dashes, and without a last "-size".
        names: The flag's names, such as `--tensor-parallel-size` and `-tp`.
    """
    found = None
    for place, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if _flag_name(name) in {_flag_name(each) for each in names}:
            found = value if equals else next(iter(args[place + 1 : place + 2]), None)
    return found


def has_flag(args: Sequence[str], *names: str) -> bool:
    """Tell whether a command line has a flag, with or without a value."""
    return not {_flag_name(arg.partition("=")[0]) for arg in args}.isdisjoint(_flag_name(name) for name in names)


def _flag_name(name: str) -> str:
    return name.replace("_", "-").removesuffix("-size") if name.startswith("--") else name
