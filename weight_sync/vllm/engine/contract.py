"""Everything that Slipstream takes from vLLM's objects at run time, as types.

Code under `weight_sync/vllm` annotates vLLM's objects with these, so that mypy refuses an attribute that is not listed.
`tests/weight_sync/vllm/engine/test_vllm_contract.py` holds each list against vLLM's source: against both model runners,
since a CPU takes the first generation (V1) and a GPU the second (V2), and only a GPU can import some of the modules.

Imports of names from vLLM's modules are no part of this; the same test finds those by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from typing import Any, Protocol


class ParallelConfig(Protocol):
    """vLLM's `ParallelConfig`."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    prefill_context_parallel_size: int
    data_parallel_size: int
    data_parallel_index: int
    enable_expert_parallel: bool
    rank: int
    world_size: int
    distributed_executor_backend: Any

    # Of the front end alone.
    _api_process_count: int

    @property
    def local_engines_only(self) -> bool: ...

    @property
    def world_size_across_dp(self) -> int: ...


class ModelConfig(Protocol):
    """vLLM's `ModelConfig`."""

    model: str
    dtype: Any
    max_model_len: int
    served_model_name: Any
    logprobs_mode: Any
    max_logprobs: int
    quantization: Any

    @property
    def uses_mrope(self) -> bool: ...

    @property
    def is_encoder_decoder(self) -> bool: ...

    @property
    def is_moe(self) -> bool: ...

    def get_vocab_size(self) -> int: ...


class LoRAConfig(Protocol):
    """vLLM's `LoRAConfig`."""

    max_lora_rank: int
    lora_dtype: Any


class WeightTransferConfig(Protocol):
    """vLLM's `WeightTransferConfig`."""

    backend: Any


class CompilationConfig(Protocol):
    """vLLM's `CompilationConfig`."""

    static_forward_context: dict[str, Any]


class VllmConfig(Protocol):
    """vLLM's `VllmConfig`."""

    @property
    def parallel_config(self) -> ParallelConfig: ...

    @property
    def model_config(self) -> ModelConfig: ...

    @property
    def compilation_config(self) -> CompilationConfig: ...

    @property
    def lora_config(self) -> LoRAConfig | None: ...

    @property
    def weight_transfer_config(self) -> WeightTransferConfig | None: ...


class AttentionImpl(Protocol):
    """vLLM's `AttentionImpl` of any backend. Some have `alibi_slopes`, `sinks` and `logits_soft_cap` besides."""

    scale: float


class AttentionLayer(Protocol):
    """vLLM's `Attention`. Some releases have `kv_cache_update_bypass` besides."""

    attn_type: Any
    sliding_window: int | None
    kv_sharing_target_layer_name: str | None
    impl: AttentionImpl
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    # Called as a module; Slipstream replaces it for one pass.
    forward: Callable[..., Any]


class QuantizeMethod(Protocol):
    """vLLM's `QuantizeMethodBase`: how a layer holds its weight and multiplies with it."""

    def process_weights_after_loading(self, layer: Any) -> None: ...

    def apply(self, layer: Any, /, *inputs: Any) -> Any: ...


class LayerReloadingInfo(Protocol):
    """vLLM's record of a layer that is loaded again."""

    restore_metadata: Any
    restore_device: Any
    kernel_tensors: Any


class AdapterLayer(Protocol):
    """vLLM's `BaseLinearLayerWithLoRA`. Those that are cut over workers have `slice_lora_a` and `slice_lora_b`."""

    n_slices: int
    tp_size: int
    lora_a_stacked: Sequence[Any]
    lora_b_stacked: Sequence[Any]


class AdapterManager(Protocol):
    """vLLM's `LoRAModelManager`."""

    lora_index_to_id: Sequence[int | None]
    modules: Mapping[str, Any]
    packed_modules: Mapping[str, list[str]]
    model: Any

    @property
    def lora_config(self) -> LoRAConfig: ...


class WorkerAdapterManager(Protocol):
    """vLLM's `WorkerLoRAManager`."""

    @property
    def _adapter_manager(self) -> AdapterManager: ...


class ModelRunner(Protocol):
    """vLLM's `GPUModelRunner`, of either generation."""

    device: Any
    model: Any

    @property
    def vllm_config(self) -> VllmConfig: ...

    @property
    def model_config(self) -> ModelConfig: ...

    @property
    def lora_config(self) -> LoRAConfig | None: ...

    @property
    def lora_manager(self) -> WorkerAdapterManager: ...

    def _set_active_loras(
        self, prompt_lora_mapping: tuple[int, ...], token_lora_mapping: tuple[int, ...], lora_requests: set[Any]
    ) -> None: ...


class RecordsOfWorker(Protocol):
    """vLLM's `AuxOutputWorkerConnector`, which keeps the experts that were chosen for each request's tokens."""

    _buffer: Any
    _requests: dict[str, Any]
    _lock: Any

    def _publish_blocks(self, batches: list[Any], *, release_keys: Sequence[str]) -> None: ...

    def _teardown(self, request_ids: Sequence[str]) -> None: ...


class RecordsOfScheduler(Protocol):
    """vLLM's `AuxOutputSchedulerConnector`."""

    _finished_requests: dict[str, Any]


class Worker(Protocol):
    """vLLM's GPU `Worker`, of which the CPU's is a subclass."""

    model_runner: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def finish_weight_update(self) -> None: ...


class WeightTransferEngine(Protocol):
    """vLLM's base of all engines that receive weights. Each of its workers makes one."""

    config: Any
    vllm_config: Any
    parallel_config: Any
    device: Any
    model: Any

    def init_transfer_engine(self, init_info: Any) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any: ...

    def receive_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self) -> None: ...

    def reset_weight_update_target(self) -> None: ...

    def shutdown(self) -> None: ...


class Request(Protocol):
    """vLLM's `Request` in the engine."""

    request_id: str
    num_computed_tokens: int
    cache_salt: str | None
    block_hashes: Any

    @property
    def num_output_tokens(self) -> int: ...

    def update_block_hashes(self) -> None: ...


class Scheduler(Protocol):
    """vLLM's `Scheduler`."""

    running: list[Request]
    waiting: Any
    prev_step_scheduled_req_ids: set[str]

    @property
    def pause_state(self) -> Any: ...

    def set_pause_state(self, pause_state: Any, /) -> None: ...

    def get_request_counts(self) -> tuple[int, int]: ...

    def _preempt_request(self, request: Request, timestamp: float, *, drop_stale_output: bool) -> None: ...


class EngineCore(Protocol):
    """vLLM's `EngineCore`, which Slipstream gives a salt."""

    slipstream_salt: str
    slipstream_tower: bool
    batch_queue: Any
    model_executor: Any

    @property
    def scheduler(self) -> Scheduler: ...

    @property
    def _idle_state_callbacks(self) -> MutableSequence[Callable[[Any], None]]: ...

    def step(self) -> Any: ...

    def step_with_batch_queue(self) -> Any: ...

    def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]: ...

    def get_weight_version(self) -> str: ...

    def set_weight_version(self, weight_version: str) -> None: ...

    def is_scheduler_paused(self) -> bool: ...

    def _reset_caches(self) -> None: ...

    def reset_encoder_cache(self) -> None: ...


class CoreClient(Protocol):
    """vLLM's `AsyncMPClient`: the API process's end of the engine cores."""

    resources: Any

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]: ...

    async def is_scheduler_paused_async(self) -> bool: ...

    async def pause_scheduler_async(self, mode: Any, clear_cache: bool) -> None: ...

    async def resume_scheduler_async(self) -> None: ...


class EngineManager(Protocol):
    """vLLM's `CoreEngineProcManager`."""

    failed_proc_name: str | None

    def finished_procs(self) -> dict[str, int]: ...


class ServingModels(Protocol):
    """vLLM's `OpenAIServingModels`."""

    lora_requests: Mapping[str, Any]

    async def load_lora_adapter(self, wanted: Any, /) -> Any: ...

    async def unload_lora_adapter(self, wanted: Any, /) -> Any: ...


class OutputProcessor(Protocol):
    """vLLM's `OutputProcessor`. Each state has a `lora_name`."""

    request_states: Mapping[str, Any]


class EngineClient(Protocol):
    """vLLM's `AsyncLLM`, on which Slipstream keeps its status."""

    slipstream_status: Any

    @property
    def vllm_config(self) -> VllmConfig: ...

    @property
    def model_config(self) -> ModelConfig: ...

    @property
    def engine_core(self) -> CoreClient: ...

    @property
    def output_processor(self) -> OutputProcessor: ...

    @property
    def errored(self) -> bool: ...

    async def resume_generation(self) -> None: ...
