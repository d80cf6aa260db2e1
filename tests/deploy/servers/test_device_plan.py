"""Any plan: no GPU gives more than it has, each has one user or is said to be shared, and a refusal names a remedy."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.deploy.servers import device_plan, gpu_memory
from slipstream.deploy.servers.device_plan import DevicePlan
from slipstream.deploy.servers.gpu_memory import ServerBytes
from slipstream.deploy.servers.model_shape import ModelShape
from slipstream.deploy.servers.probes import Gpu
from slipstream.protocol.config import ConfigError, RunConfig

SHAPES = st.builds(
    ModelShape,
    layers=st.integers(1, 80),
    hidden=st.sampled_from([64, 1024, 4096, 8192]),
    inner=st.sampled_from([128, 3072, 14336]),
    heads=st.sampled_from([8, 32, 64]),
    key_heads=st.sampled_from([1, 4, 8]),
    head=st.sampled_from([64, 128]),
    vocabulary=st.sampled_from([1000, 32000, 151936]),
    tied=st.booleans(),
    experts=st.sampled_from([0, 0, 8]),
    chosen=st.just(2),
)

FLAGS = st.lists(
    st.sampled_from(
        ["-tp=2", "-pp=2", "--data_parallel_size=2", "--gpu-memory-utilization=0.5", "--kv-cache-memory-bytes=8G"]
    ),
    max_size=2,
    unique=True,
)


def run_of(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "model"}, "task": {"path": "task.py:task"}, **sections})


@st.composite
def runs(draw: st.DrawFn) -> RunConfig:
    lora = draw(st.sampled_from([{}, {}, {"r": 16}]))
    learner: dict[str, Any] = {"ranks": draw(st.integers(1, 4)), "optim": draw(st.sampled_from(["sgd", "adamw_torch"]))}
    if draw(st.booleans()):
        learner["token_budget"] = 50000
    if draw(st.booleans()) and not lora:
        learner["shard_weights"] = True
    if draw(st.booleans()):
        learner["gradient_checkpointing"] = draw(st.booleans())
    vllm: dict[str, Any] = {"count": draw(st.integers(1, 4)), "args": draw(FLAGS)}
    vllm["max_model_len"] = draw(st.sampled_from([1024, 4096, 32768 if "token_budget" in learner else 8192]))
    if draw(st.booleans()):
        vllm["max_num_seqs"] = draw(st.sampled_from([1, 64, 500]))
    weight_sync = {"transport": draw(st.sampled_from(["auto", "auto", "http", "nccl"]))}
    model = {"path": "model", "dtype": draw(st.sampled_from(["float32", "bfloat16"]))}
    return run_of(model=model, learner=learner, vllm=vllm, weight_sync=weight_sync, lora=lora)


def taken(plan: DevicePlan, entry: str) -> int:
    """Bytes of a GPU that are given out, as the processes will take them."""
    learner = plan.learner.counted.total if plan.learner and plan.learner.counted else 0
    total = learner if plan.learner and entry in plan.learner.entries else 0
    return total + sum(seat.counted.total for seat in plan.servers if seat.counted and entry in seat.entries)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from([16, 24, 80, 141]), min_size=1, max_size=8),
    runs(),
    SHAPES,
    st.sampled_from(["run", "server", "learner"]),
)
def test_no_plan_gives_out_more_than_there_is(
    sizes: list[int], run: RunConfig, shape: ModelShape, part: device_plan.Part
) -> None:
    found = [Gpu(str(i), "a GPU", gib * gpu_memory.GIB) for i, gib in enumerate(sizes)]
    plan, refusal = None, ""
    try:
        plan = device_plan.plan(found, run, shape, part)
    except ConfigError as error:
        refusal = str(error)
    if plan is None:
        assert re.search("it would fit with|no setting makes it fit|lower|leave it", refusal), refusal
        return
    lines = list(plan.lines())
    seats = [*([plan.learner] if plan.learner else []), *plan.servers]
    for gpu in found:
        users = [seat for seat in seats if gpu.entry in seat.entries]
        assert taken(plan, gpu.entry) <= device_plan.USABLE * gpu.total + len(users)
        assert (gpu.entry in plan.unused) == (not users)
        assert any(line.startswith(f"GPU {gpu.entry} is shared by") for line in lines) == (len(users) > 1)
        assert sum(seat.share for seat in users) <= 1
    assert (plan.learner is None) == (part == "server")
    settled = device_plan.with_settings(run, plan.chosen)
    for seat in plan.servers:
        assert isinstance(seat.counted, ServerBytes)
        assert seat.counted.cache >= run.vllm.max_model_len * gpu_memory.token_bytes(shape, run)
        alone = sum(seat.entries[0] in other.entries for other in seats) == 1
        assert alone == (seat.cache == 0), "vLLM measures its memory only where nobody else takes any"
        # What vLLM takes by itself is its share; the next version and the staging come on top.
        own = seat.counted.weights + seat.counted.engine + seat.counted.cache
        assert seat.share * min(found[int(entry)].total for entry in seat.entries) == pytest.approx(own)
    for section, key in plan.chosen:
        assert key not in getattr(run, section).model_fields_set, "what the user sets stays"
    assert not plan.servers or settled.vllm.max_num_seqs >= 1


def test_a_remedy_that_is_named_is_one() -> None:
    """The setting of the refusal, put into the run file, gives a plan."""
    shape = ModelShape(28, 3584, 18944, 28, 4, 128, 152064)
    found = [Gpu(str(i), "a GPU", 80 * gpu_memory.GIB) for i in range(8)]
    with pytest.raises(ConfigError, match=r"would fit with learner.ranks = 3 and learner.shard_weights = true$"):
        device_plan.plan(found, run_of(model={"path": "model", "dtype": "bfloat16"}), shape)
    remedied = run_of(model={"path": "model", "dtype": "bfloat16"}, learner={"ranks": 3, "shard_weights": True})
    assert device_plan.plan(found, remedied, shape).servers


def test_tensor_parallelism_divides_the_heads() -> None:
    machine = [Gpu(str(number), "H100", 80 * gpu_memory.GIB) for number in range(4)]
    shape = ModelShape(28, 1024, 3072, 16, 8, 128, 151936)
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 3: the model has 16 attention heads.*take a size"):
        device_plan.plan(machine, run_of(vllm={"args": ["-tp", "3"]}), shape)
    device_plan.plan(machine, run_of(vllm={"args": ["-tp", "2"]}), shape)
