"""Sections of `benchmarks.gpu_day` about correctness. Each returns its figures, and raises if what it tries is wrong.

Each takes `small`: tiny sizes, on a CPU as well where `gpu_day.SECTIONS` says so.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.learner import TOLERANCE, first_step
from benchmarks.learner_cases import CASES, SIZES, batch
from benchmarks.learner_ways import Ours, Padded
from slipstream.learner.attention import packed
from slipstream.learner.feed import packing, trie

# Largest difference to a dense mask in float32, of outputs and gradients of about 1.
ATTENTION = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}

# Files whose tests use a GPU where there is one, and need no vLLM.
DEVICE_TESTS = (
    "tests/learner/attention",
    "tests/learner/model/test_quantised.py",
    "tests/learner/training/test_flops.py",
    "tests/weight_sync/transports/test_communicator.py",
)

JOIN_S = 20.0


def device() -> torch.device:
    """Return the GPU, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def attention(small: bool) -> dict[str, Any]:
    """Compare the learner's attention along a trie with a dense mask, forward and backward."""
    here, worst = device(), dict[str, float]()
    types = (torch.float16, torch.bfloat16) if here.type == "cuda" else (torch.float32,)
    for kind in types:
        for width in (16,) if small else (64, 128, 256):
            for heads, key_heads in ((4, 4), (4, 2)) if small else ((8, 8), (16, 8), (28, 4)):
                for levels in (1, 2) if small else (1, 2, 3, 5):
                    found = _attention_difference(here, kind, width, (heads, key_heads), levels, 6 if small else 200)
                    name = str(kind).removeprefix("torch.")
                    worst[name] = max(worst.get(name, 0.0), found)
                    if found > ATTENTION[kind]:
                        raise AssertionError(f"{name}, width {width}, heads {heads}/{key_heads}, {levels}: {found}")
    return {"largest difference": worst}


def _attention_difference(
    here: torch.device, kind: torch.dtype, width: int, heads: tuple[int, int], levels: int, part: int
) -> float:
    """Return the largest difference, of outputs and gradients, to a dense mask in float32.

    Args:
        here: The device.
        kind: Type of the inputs.
        width: Channels of a head.
        heads: Heads of queries, and of keys.
        levels: Inner levels of the trie.
        part: Tokens of a node.
    """
    random = np.random.default_rng(levels)
    stem = [random.integers(0, 1000, part) for _ in range(levels)]
    sequences = [
        np.concatenate([*stem[: 1 + number % levels], random.integers(0, 1000, part)]).astype(np.int32)
        for number in range(2 * levels)
    ]
    samples = [packing.Sample(ids, *_nothing(len(ids)), rollout=i) for i, ids in enumerate(sequences)]
    row = packing.pack_row(samples, branches=True).to(here)
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, n, row.tokens, width, device=here, dtype=kind, requires_grad=True)
        for n in (heads[0], *heads[1:] * 2)
    ]
    ours, _ = packed.varlen_sdpa(torch.nn.Module(), *inputs, None, row_layout=packed.RowLayout(row))
    built = trie.build([sample.forwarded for sample in samples])
    places, reach = np.arange(built.tokens), np.repeat(built.reach, np.diff(built.starts))
    seen = torch.from_numpy((places[None] <= places[:, None]) & (places[:, None] < reach[None])).to(here)
    exact = [each.detach().float().requires_grad_() for each in inputs]
    query, key, value = (each[0] for each in exact)
    key, value = (each.repeat_interleave(heads[0] // heads[1], 0) for each in (key, value))
    scores = (query @ key.mT / width**0.5).masked_fill(~seen, -torch.inf)
    theirs = (scores.softmax(-1) @ value).transpose(0, 1)[None]
    upstream = torch.randn_like(theirs)
    gradients = torch.autograd.grad(ours, inputs, upstream.to(ours.dtype))
    expected = torch.autograd.grad(theirs, exact, upstream)
    pairs = zip((ours, *gradients), (theirs, *expected), strict=True)
    return max(float((one.float() - other).abs().max() / other.abs().max().clamp(min=1)) for one, other in pairs)


def _nothing(length: int) -> tuple[Any, ...]:
    """Return log-probs, weights, staleness and freshness of a sample whose tokens all train."""
    weights = np.ones(length, dtype=np.float32)
    weights[0] = 0.0
    return np.zeros_like(weights), weights, np.zeros(length, dtype=np.int32), weights > 0


def agreement(small: bool) -> dict[str, Any]:
    """Compare the gradient of a step, and that of a plain padded loop in the same type, with a loop in float32.

    In bfloat16 two ways differ from each other by as much as each from the truth: ours may not be further from it.
    """
    size, here = SIZES["0.4M"] if small else SIZES["0.6B"], device()
    step = batch(CASES["short"].smaller(8 if small else 2), size.config["vocab_size"])
    exact = first_step(Padded(replace(size, dtype=torch.float32), step, 4096, here))[1].cpu()
    norm, figures = float(exact.norm()), dict[str, Any]()
    for kind in (Ours, Padded):
        _, gradient = first_step(kind(size, step, 4096, here))
        figures[f"{kind.name}, from float32"] = float((gradient.cpu() - exact).norm()) / norm
    ours, padded = (figures[f"{kind.name}, from float32"] for kind in (Ours, Padded))
    if ours > max(TOLERANCE["cpu"], 1.25 * padded):
        raise AssertionError(f"the gradient is further from float32 than a padded loop's: {figures}")
    return figures


def snapshot(small: bool) -> dict[str, Any]:
    """Take snapshots of float32 weights in bfloat16, and compare the second with a plain cast."""
    from slipstream.weight_sync.weights.snapshot import Probe, Snapshot

    here = device()
    torch.manual_seed(0)
    shape = (64, 64) if small else (8192, 8192)
    weights = {f"layers.{i}.weight": torch.randn(shape, device=here) for i in range(4 if small else 112)}
    probe = Probe([0, 1], np.zeros(1, dtype=np.float32))
    figures: dict[str, Any] = {"weights GB": sum(each.nbytes for each in weights.values()) / 1e9}
    taken = None
    for name in ("first", "second"):
        _wait(here)
        began = time.perf_counter()
        taken = Snapshot(1, weights.items(), probe, torch.bfloat16, None if taken is None else taken.flat)
        _wait_for_stream(here)
        figures[f"{name}, learner waits s"] = time.perf_counter() - began
        views = taken.manifest.views(taken.flat)
        figures[f"{name}, on the host after s"] = time.perf_counter() - began
    for name, tensor in weights.items():
        if not torch.equal(views[name], tensor.to(torch.bfloat16).cpu()):
            raise AssertionError(f"{name} is not the weight cast to bfloat16")
    return figures


def _wait(here: torch.device) -> None:
    if here.type == "cuda":
        torch.cuda.synchronize()


def _wait_for_stream(here: torch.device) -> None:
    """Wait for the learner's own stream; copies on other streams continue."""
    if here.type == "cuda":
        torch.cuda.current_stream().synchronize()


def no_synchronisation(small: bool) -> dict[str, Any]:
    """Run rows forward and backward while torch forbids to wait for the GPU."""
    from benchmarks.gpu_speed import SHAPES, build_policy, rows_of

    here, shape = device(), SHAPES["tiny" if small else "0.6B"]
    policy = build_policy(shape, here)
    rows = [row.to(here) for row in rows_of(shape, 4096, small)]
    for mode in ("default", "error"):  # the first run compiles and caches
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for row in rows:
                policy(row).logprobs.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"rows": len(rows)}


def checksums(small: bool) -> dict[str, Any]:
    """Compare checksums on the GPU with those on the host, and change a bit."""
    from slipstream.weight_sync.vllm.engine.fingerprints import fingerprint
    from slipstream.weight_sync.weights.checksum import checksum

    here, size = device(), 2**20 + 3 if small else 2**31 + 3
    torch.manual_seed(0)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, device=here)
    checksum(data)  # loads the kernels
    torch.cuda.synchronize()
    began = time.perf_counter()
    ours = checksum(data).cpu()
    seconds = time.perf_counter() - began
    print_of = fingerprint(data)
    if not torch.equal(ours, checksum(data.cpu())):
        raise AssertionError("the GPU's checksum is not the host's")
    data[size // 2] ^= 1
    if torch.equal(ours, checksum(data).cpu()) or print_of == fingerprint(data):
        raise AssertionError("a changed bit does not show")
    return {"GB/s": size / seconds / 1e9}


def ipc(small: bool) -> dict[str, Any]:
    """Let another process open memory of this one, change it and be killed; then let one outlive its exporter."""
    from slipstream.weight_sync.transports.gpu.communicator import own_gpu
    from slipstream.weight_sync.transports.gpu.ipc import export_storage

    size = 2**20 if small else 14 * 10**9
    memory = torch.zeros(size, dtype=torch.uint8, device=device())
    began = time.perf_counter()
    reader, there = _start(_open_and_fill, export_storage(memory, own_gpu().uuid))
    if there.recv() != "filled":
        raise AssertionError("the other process did not fill the memory")
    seconds = time.perf_counter() - began
    reader.kill()
    reader.join(JOIN_S)
    torch.cuda.synchronize()
    if int(memory[0]) != 7 or int(memory[-1]) != 7:
        raise AssertionError("what the other process wrote is not here")
    exporter, handles = _start(_export, size)
    from slipstream.weight_sync.transports.gpu.ipc import open_storage

    opened = open_storage(handles.recv(), device())
    exporter.kill()
    exporter.join(JOIN_S)
    after = int(opened[-1])
    return {"GB": size / 1e9, "opened and filled s": seconds, "byte after the exporter's end": after}


def _open_and_fill(pipe: Any, handle: Any) -> None:
    from slipstream.weight_sync.transports.gpu.ipc import open_storage

    open_storage(handle, device()).fill_(7)
    torch.cuda.synchronize()
    pipe.send("filled")
    pipe.recv()


def _export(pipe: Any, size: int) -> None:
    from slipstream.weight_sync.transports.gpu.communicator import own_gpu
    from slipstream.weight_sync.transports.gpu.ipc import export_storage

    memory = torch.full((size,), 9, dtype=torch.uint8, device=device())
    torch.cuda.synchronize()
    pipe.send(export_storage(memory, own_gpu().uuid))
    pipe.recv()


def nccl(small: bool) -> dict[str, Any]:
    """Make a group of one, broadcast, abort it, and make another."""
    from slipstream.weight_sync.transports.gpu.communicator import Communicator, own_gpu
    from slipstream.weight_sync.transports.gpu.nccl_library import NcclError

    gpu, began = own_gpu(device()), time.perf_counter()
    for _ in range(2):
        group = Communicator(gpu, JOIN_S)
        group.meet(gpu.library.unique_id(), 1, 0)
        data = torch.arange(2**20, device=gpu.device).view(torch.uint8)
        group.broadcast(data)
        group.wait()
        group.abort()
        try:
            group.broadcast(data)
        except NcclError:
            continue
        raise AssertionError("a group that was aborted still broadcasts")
    return {"two groups s": time.perf_counter() - began}


def nccl_on_one_gpu(small: bool) -> dict[str, Any]:
    """Let two processes try to meet on one GPU: both must raise within the time limit."""
    from slipstream.weight_sync.transports.gpu.communicator import own_gpu

    unique_id = own_gpu(device()).library.unique_id()
    began = time.perf_counter()
    ranks = [_start(_meet, unique_id, rank) for rank in (0, 1)]
    answers = [pipe.recv() if pipe.poll(2 * JOIN_S) else "hangs" for _, pipe in ranks]
    for process, _ in ranks:
        process.kill()
        process.join(JOIN_S)
    if any(not answer.startswith("refused") for answer in answers):
        raise AssertionError(f"the ranks answer {answers}")
    return {"refused after s": time.perf_counter() - began, "by": answers[0][:200]}


def _meet(pipe: Any, unique_id: bytes, rank: int) -> None:
    from slipstream.weight_sync.transports.gpu.communicator import Communicator, own_gpu
    from slipstream.weight_sync.transports.gpu.nccl_library import NcclError

    try:
        Communicator(own_gpu(device()), JOIN_S).meet(unique_id, 2, rank)
        pipe.send("met")
    except NcclError as error:
        pipe.send(f"refused: {error}")
    pipe.recv()


def _start(target: Any, *arguments: Any) -> tuple[Any, Any]:
    """Start a process that gets one end of a pipe; return the process and the other end."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    return process, ours


def device_tests(small: bool) -> dict[str, Any]:
    """Run the tests that use a GPU where there is one."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *DEVICE_TESTS]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    summary = ended.stdout.strip().splitlines()[-1:] or [""]
    if ended.returncode:
        raise AssertionError(ended.stdout[-1500:] + ended.stderr[-400:])
    return {"pytest": summary[0]}
