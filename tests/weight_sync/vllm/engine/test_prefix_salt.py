"""What a turn that begins under new weights reads of older ones' keys and values: nothing. With vLLM's own scheduler,
cache and requests; only the model is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

BLOCK = 16
PROMPT = list(range(1, 50))
"""Three full blocks and one token."""
LONG = list(range(1, 101))
"""More than one step takes."""
STEP_TOKENS = 64


class Engine:
    """vLLM's engine core without a model: what a step samples is always `7`."""

    def __init__(self, folder: Path, asynchronous: bool, caching: bool) -> None:
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config = EngineArgs(
            str(folder),
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=256,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=8,
            block_size=BLOCK,
            enable_prefix_caching=caching,
            enforce_eager=True,
        ).create_engine_config()
        config.scheduler_config.async_scheduling = asynchronous
        config.cache_config.num_gpu_blocks = 100
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        self.core: Any = EngineCore.__new__(EngineCore)
        self.core.structured_output_manager = StructuredOutputManager(config)
        kind = AsyncScheduler if asynchronous else Scheduler
        self.scheduler: Any = kind(config, cache, self.core.structured_output_manager, BLOCK, BLOCK)
        self.core.scheduler = self.scheduler
        self.core.mm_receiver_cache = None
        init_none_hash(sha256)
        self.hashed = 0
        hasher = get_request_block_hasher(BLOCK, sha256)

        def counted(request: Any) -> Any:
            hashes = hasher(request)
            self.hashed += len(hashes)
            return hashes

        self.core.request_block_hasher = counted if caching else None
        self.core.set_weight_version("1")

    def read(self, name: str, ids: list[int], salt: str | None = "run:1", tokens: int = 1, **more: Any) -> Any:
        """The request as the thread that reads the socket hands it to the engine's own."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        request, _ = self.core.preprocess_add_request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=ids,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=more.get("lora"),
                cache_salt=salt,
                data_parallel_rank=None,
            )
        )
        return request

    def add(self, name: str, ids: list[int], **more: Any) -> Any:
        request = self.read(name, ids, **more)
        self.core.add_request(request)
        return request

    def step(self) -> Any:
        """Return what was scheduled, after processing its output."""
        from vllm.v1.outputs import ModelRunnerOutput

        scheduled = self.scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        sampled = [[] if self.scheduler.requests[name].is_prefill_chunk else [7] for name in names]
        indices = {name: index for index, name in enumerate(names)}
        output = ModelRunnerOutput(req_ids=names, req_id_to_index=indices, sampled_token_ids=sampled)
        self.scheduler.update_from_output(scheduled, output)
        return scheduled

    def hits(self, name: str) -> int:
        """Tokens that the request, scheduled now, need not compute."""
        scheduled = self.step()
        (found,) = [new.num_computed_tokens for new in scheduled.scheduled_new_reqs if new.req_id == name]
        return int(found)

    def preempt(self, request: Any) -> None:
        """As where another request needs its blocks."""
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm")
    from transformers import Qwen3Config

    from slipstream.weight_sync.vllm.engine import engine_core

    engine_core.install_prefix_salt()
    engine_core.install_prefix_salt()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(vocab_size=128, num_key_value_heads=1, head_dim=32, max_position_embeddings=256, **sizes)
    config.architectures = ["Qwen3ForCausalLM"]
    saved = tmp_path_factory.mktemp("model")
    config.save_pretrained(saved)
    return saved


@pytest.fixture(params=[False, True], ids=["in step", "asynchronous"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Engine:
    return Engine(folder, request.param, caching=True)


def test_turns_under_the_same_weights_share_their_prefix_and_hash_it_once(engine: Engine) -> None:
    engine.add("first", PROMPT)
    assert engine.hits("first") == 0
    assert engine.hashed == 3
    engine.add("second", PROMPT)
    assert engine.hits("second") == 3 * BLOCK
    assert engine.hashed == 6


def test_a_worker_that_has_not_heard_of_a_swap_gets_no_block_of_older_weights(engine: Engine) -> None:
    engine.add("before", PROMPT)
    engine.step()
    engine.core.set_weight_version("2")
    engine.add("after", PROMPT, salt="run:1")
    assert engine.hits("after") == 0
    engine.add("next", PROMPT, salt="run:1")
    assert engine.hits("next") == 3 * BLOCK


def test_a_request_that_was_read_before_the_swap_and_added_after_it_hashes_anew(engine: Engine) -> None:
    engine.add("before", PROMPT)
    engine.step()
    late = engine.read("late", PROMPT)
    engine.core.set_weight_version("2")
    engine.core.add_request(late)
    assert engine.hits("late") == 0


def test_a_request_that_waits_at_the_swap_hashes_anew(engine: Engine) -> None:
    engine.add("before", PROMPT)
    engine.step()
    engine.add("waits", PROMPT)
    engine.core.set_weight_version("2")
    assert engine.hits("waits") == 0


def test_a_prompt_that_is_half_computed_at_the_swap_is_computed_anew(engine: Engine) -> None:
    halves = [engine.add(name, LONG) for name in ("half", "waits")]
    engine.step()
    assert halves[0].num_computed_tokens == STEP_TOKENS
    engine.core.set_weight_version("2")
    again = engine.step()
    assert again.num_scheduled_tokens == {"half": STEP_TOKENS}, "from its first token, and before what came later"
    assert again.preempted_req_ids == {"half"}
    assert "half" in again.scheduled_cached_reqs.all_token_ids, "vLLM's workers took it out of their batch"
    for _ in range(4):
        engine.step()
    assert [list(request.output_token_ids) for request in halves] == [[7], [7]]
    assert not engine.scheduler.requests
    engine.add("next", LONG)
    assert engine.hits("next") == 6 * BLOCK, "what was computed again serves those that follow"


def test_half_computed_prompts_begin_anew_in_the_order_in_which_they_came(engine: Engine) -> None:
    engine.scheduler.scheduler_config.long_prefill_token_threshold = STEP_TOKENS // 2
    for name in ("first", "second"):
        engine.add(name, LONG)
    assert len(engine.step().num_scheduled_tokens) == 2
    engine.core.set_weight_version("2")
    assert list(engine.step().num_scheduled_tokens) == ["first", "second"]


def test_a_half_computed_prompt_is_computed_anew_where_nothing_is_cached(folder: Path) -> None:
    engine = Engine(folder, asynchronous=False, caching=False)
    engine.add("half", LONG)
    engine.step()
    engine.core.set_weight_version("2")
    assert engine.step().num_scheduled_tokens == {"half": STEP_TOKENS}


def test_a_turn_that_has_tokens_goes_on_where_it_was_and_its_blocks_serve_no_new_turn(engine: Engine) -> None:
    turn = engine.add("turn", PROMPT, tokens=40)
    for _ in range(20):
        engine.step()
    before = (turn.num_computed_tokens, list(turn.block_hashes))
    engine.core.set_weight_version("2")
    assert (turn.num_computed_tokens, list(turn.block_hashes)) == before
    assert engine.step().num_scheduled_tokens == {"turn": 1}
    for _ in range(15):
        engine.step()
    assert len(turn.block_hashes) > len(before[1]), "a block was filled by both"
    engine.add("new", list(turn.all_token_ids))
    assert engine.hits("new") == 0


def test_a_preempted_turn_computes_under_the_weights_that_its_tokens_will_be_labelled_with(engine: Engine) -> None:
    begun = engine.add("begun", PROMPT, tokens=9)
    engine.step()
    silent = engine.add("silent", LONG[::-1])
    engine.step()
    for request in (silent, begun):
        engine.preempt(request)
    hashes = {request.request_id: list(request.block_hashes) for request in (begun, silent)}
    engine.core.set_weight_version("2")
    assert begun.block_hashes == hashes["begun"], "it has tokens of both, and says so"
    assert silent.block_hashes != hashes["silent"]
    taken = engine.step().num_scheduled_tokens
    assert silent.num_computed_tokens == taken["silent"], "nothing of it was cached"


def test_i5_a_label_that_comes_twice_may_stand_for_two_models(engine: Engine) -> None:
    """A server that failed its proof of version 2 is sent version 2 again."""
    engine.core.set_weight_version("2")
    engine.add("unproven", PROMPT)
    engine.step()
    engine.core.set_weight_version("2")
    engine.add("proven", PROMPT)
    assert engine.hits("proven") == 0


@pytest.mark.parametrize("swaps", [0, 1])
def test_what_callers_and_adapters_keep_apart_stays_apart(engine: Engine, swaps: int) -> None:
    from vllm.lora.request import LoRARequest

    kinds = [
        {"salt": "run:1"},
        {"salt": "other:1"},
        {"salt": None},
        {"salt": "run:1", "lora": LoRARequest("adapter", 1, "/nowhere")},
    ]
    for turn in range(2):
        requests = [engine.read(f"{turn}.{number}", PROMPT, **kind) for number, kind in enumerate(kinds)]
        for _ in range(swaps if turn == 0 else 0):
            engine.core.set_weight_version("2")
        for number, request in enumerate(requests):
            engine.core.add_request(request)
            assert engine.hits(f"{turn}.{number}") == (3 * BLOCK if turn else 0)
