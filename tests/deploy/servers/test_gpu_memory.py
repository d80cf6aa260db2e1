"""Bytes of servers and learner on a GPU, against published models, torch's own optimisers and vLLM's own parser."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.deploy.servers import gpu_memory
from slipstream.deploy.servers.gpu_memory import Parallelism
from slipstream.deploy.servers.model_shape import ModelShape, shape_of
from slipstream.protocol.config import LearnerSection, RunConfig
from slipstream.protocol.config.sections.learner import SHARDED
from slipstream.protocol.config.sections.servers import size_of

DENSE = ModelShape(64, 5120, 25600, 64, 8, 128, 151936)
MIXTURE = ModelShape(48, 2048, 768, 32, 4, 128, 151936, experts=128, chosen=8)


def run_of(*arguments: str, **sections: dict[str, Any]) -> RunConfig:
    values = {"model": {"path": "m", "dtype": "bfloat16"}, "task": {"path": "task.py:task"}, **sections}
    return RunConfig.model_validate({**values, "vllm": {**sections.get("vllm", {}), "args": list(arguments)}})


def test_shapes_have_the_parameters_that_their_makers_publish() -> None:
    small = ModelShape(28, 1024, 3072, 16, 8, 128, 151936, tied=True)
    published = {small: 0.596e9, DENSE: 32.76e9, MIXTURE: 30.5e9}
    for shape, parameters in published.items():
        assert shape.parameters == pytest.approx(parameters, rel=2e-3)
    mixture = {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
    assert shape_of({**mixture, **heads, "num_experts": 128, "num_experts_per_tok": 8}) == MIXTURE
    assert shape_of({"text_config": {**mixture, **heads}}) == ModelShape(48, 2048, 6144, 32, 4, 128, 151936)
    assert shape_of({"model_type": "rwkv"}) is None
    for name, value in (("intermediate_size", [8192, 16384]), ("num_attention_heads", [8, 16]), ("vocab_size", None)):
        assert shape_of({**mixture, **heads, name: value}) is None, "its layers differ"
    assert shape_of({**mixture, **heads, "text_config": None}) is not None


SPELLINGS = [
    (["-tp", "2"], Parallelism(tensor=2)),
    (["-tp=2"], Parallelism(tensor=2)),
    (["--tensor-parallel-size=4"], Parallelism(tensor=4)),
    (["--tensor_parallel_size", "2", "-tp", "8"], Parallelism(tensor=8)),
    (["--tensor-parallel", "2", "--pipeline_parallel_size=3"], Parallelism(tensor=2, pipeline=3)),
    (["-pp", "2", "--data-parallel-size", "2", "-ep"], Parallelism(pipeline=2, data=2)),
    (["-dp=4", "--enable-expert-parallel"], Parallelism(data=4)),
    (["-pcp", "2"], Parallelism(context=2)),
    (["--data-parallel-size-local", "2"], Parallelism()),
]


def test_parallelism_is_read_as_vllm_reads_it() -> None:
    cli_args = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    for arguments, expected in SPELLINGS:
        theirs = parser.parse_args(arguments)
        read = (theirs.tensor_parallel_size, theirs.pipeline_parallel_size, theirs.data_parallel_size)
        assert Parallelism.of(arguments) == expected
        assert Parallelism(*read, theirs.prefill_context_parallel_size) == expected
    assert Parallelism(2, 3, 4, 1).gpus == 24
    for text in ("256", "1k", "1K", "25.6k", "3G", "2g"):
        theirs = parser.parse_args(["--kv-cache-memory-bytes", text])
        assert size_of(text) == theirs.kv_cache_memory_bytes


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--tensor-parallel-size", value] for value in ("two", "0", "-1", "2.0", "")),
        ["-tp"],
        ["-dp=0"],
        ["--pipeline_parallel_size=x"],
        ["-pcp", "0"],
        *(["--gpu-memory-utilization", value] for value in ("90%", "nan", "1.5", "0")),
        *(["--kv-cache-memory-bytes", value] for value in ("1e12", "1Gi", "1.5G", "-5")),
        ["--max-num-batched-tokens", "many"],
    ],
)
def test_numbers_that_a_plan_cannot_count_with_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match=r"vllm.args has --\S+ .*: give it a"):
        run_of(*arguments)


def test_sizes_are_counted_as_vllm_reads_them() -> None:
    asked = [run_of("--max-num-batched-tokens", size) for size in ("8k", "8000")]
    one, other = (gpu_memory.server_bytes(DENSE, each, "nccl_staged") for each in asked)
    assert one == other


@pytest.mark.parametrize(
    ("shape", "arguments", "parameters"),
    [
        (DENSE, [], DENSE.parameters),
        (DENSE, ["-tp=4"], DENSE.parameters / 4),
        (DENSE, ["-dp=4"], DENSE.parameters),  # each engine has a copy
        (DENSE, ["-pp=4"], 16 * DENSE.layer + DENSE.embedding),  # the first and the last stage are the fullest
        (MIXTURE, ["-tp=2"], MIXTURE.parameters / 2),
        # Experts are shared by all engines, the rest is not.
        (MIXTURE, ["-dp=4", "-ep"], 48 * (MIXTURE.layer_dense + MIXTURE.layer_experts / 4) + MIXTURE.ends),
    ],
)
def test_a_server_holds_its_shard_of_the_live_and_of_the_next_weights(
    shape: ModelShape, arguments: list[str], parameters: float
) -> None:
    counted = gpu_memory.server_bytes(shape, run_of(*arguments), "nccl_staged")
    assert counted.weights == counted.new_weights == pytest.approx(2 * parameters, rel=1e-6)


def test_buffers_are_buckets_whatever_the_model() -> None:
    bucket = 64 * 1024**2
    for ranks in (1, 4):
        run = run_of(learner={"ranks": ranks}, vllm={"count": 3})
        for shape in (DENSE, ModelShape(2, 64, 128, 2, 2, 32, 512)):
            assert gpu_memory.server_bytes(shape, run, "nccl_staged").staging == 2 * bucket, "all ranks' together"
            assert gpu_memory.learner_bytes(shape, run, 64, True).staging == 3 * bucket // ranks, "to each server"
    assert gpu_memory.learner_bytes(DENSE, run, 64, True, beside=3).staging == 6 * bucket, "by ipc"
    assert gpu_memory.server_bytes(DENSE, run, "ipc").staging == 0, "loaded from where it lies"
    assert gpu_memory.server_bytes(DENSE, run, "nccl").staging == 2 * DENSE.largest_tensor * 2, "in place, whole"


def test_what_a_server_does_not_hold_is_not_counted() -> None:
    fp8 = gpu_memory.server_bytes(DENSE, run_of("--quantization=fp8"), "nccl")
    assert fp8.new_weights == 0, "in place"
    assert fp8.weights == DENSE.layers * DENSE.layer + 2 * DENSE.ends
    assert fp8.staging == 2 * 2 * DENSE.embedding, "whole tensors arrive"
    alone = gpu_memory.server_bytes(DENSE, run_of(lora={"r": 16}), "nccl_staged")
    assert alone.new_weights == alone.staging == 0
    assert alone.weights > 2 * DENSE.parameters
    sequence = gpu_memory.server_bytes(DENSE, run_of(vllm={"max_model_len": 4096}), "nccl_staged").cache
    assert sequence == 4096 * 2 * 64 * 8 * 128 * 2
    assert gpu_memory.token_bytes(DENSE, run_of("-tp=16")) == 2 * 64 * 1 * 128 * 2, "heads are not halved further"
    assert gpu_memory.token_bytes(DENSE, run_of("--kv-cache-dtype=fp8", "-pp=4")) == 2 * 16 * 8 * 128


def test_a_rank_holds_its_share() -> None:
    whole = gpu_memory.learner_bytes(DENSE, run_of(), 8192, checkpointing=True)
    p = DENSE.parameters
    assert (whole.weights, whole.gradients, whole.optimiser, whole.computing) == (4 * p, 4 * p, 8 * p, 2 * p)
    assert (whole.published, whole.reference) == (2 * p, 0)
    shared = gpu_memory.learner_bytes(
        DENSE, run_of(learner={"ranks": 8, "shard_weights": True}), 8192, checkpointing=True
    )
    assert (shared.weights, shared.optimiser, shared.published) == (p / 2, p, p / 4)
    ends = DENSE.layer + DENSE.ends  # a layer, embedding and output layer are whole while they compute
    assert shared.gradients == p / 2 + 4 * ends
    copies = gpu_memory.learner_bytes(DENSE, run_of(learner={"ranks": 8}), 8192, checkpointing=True)
    assert copies.weights == whole.weights
    assert copies.published == p / 4, "each rank sends its share"
    low = gpu_memory.learner_bytes(DENSE, run_of(learner={"weights_dtype": "model"}), 8192, checkpointing=True)
    assert (low.weights, low.gradients, low.optimiser, low.computing) == (2 * p, 2 * p, 4 * p, 0)
    near = gpu_memory.learner_bytes(DENSE, run_of(learner={"kl_coef": 0.1}), 8192, checkpointing=True)
    assert near.reference == 2 * p
    adapter = gpu_memory.learner_bytes(DENSE, run_of(lora={"r": 16}), 8192, checkpointing=True)
    assert adapter.weights == pytest.approx(2 * p, rel=0.02)
    assert adapter.gradients + adapter.optimiser + adapter.published < 0.05 * adapter.weights


def test_activations_grow_with_the_row_and_shrink_with_checkpointing() -> None:
    kept, inputs = (gpu_memory.activation_bytes(DENSE, 8192, way, stream=4, compute=2) for way in (False, True))
    assert kept == pytest.approx(2 * gpu_memory.activation_bytes(DENSE, 4096, False, stream=4, compute=2))
    # The input of each of 64 layers, 5,120 float32 values a token, and two layers at work.
    assert inputs == pytest.approx(8192 * 5120 * 4 * 64, rel=0.6)
    assert inputs < kept / 5


@pytest.mark.parametrize("name", sorted(SHARDED))
def test_an_optimiser_keeps_what_is_counted(name: str) -> None:
    torch = pytest.importorskip("torch")
    from slipstream.learner.training.optimiser import build_optimiser
    from tests.kit.model import tiny_model

    model, section = tiny_model(), LearnerSection.model_validate({"optim": name})
    stepper = build_optimiser(model, section).stepper
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    stepper.step()
    state = [value for state in stepper.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    found = sum(value.numel() * value.element_size() for value in state if value.ndim)
    shape = shape_of(model.config.to_dict())
    assert shape is not None
    counted = gpu_memory.learner_bytes(shape, run_of(learner={"optim": name}), 64, checkpointing=False).optimiser
    weights, norms = 4 * shape.parameters, 0.05 * 4 * shape.parameters
    temporary = 0 if name in ("adamw_torch_fused", "muon") else weights  # a copy for each of a step's operations
    assert found + temporary == pytest.approx(counted, abs=2 * norms)
