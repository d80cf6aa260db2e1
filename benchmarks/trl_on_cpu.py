"""Stand-ins for the three things for which TRL 1.16's AsyncGRPOTrainer needs a GPU.

They are attention over its packed rows (here torch's, with a mask), the name of the GPU (for MFU only), and NCCL for
weights (here a file in memory that vLLM loads with `reload_weights`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
import safetensors.torch
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from trl.experimental.async_grpo import async_grpo_trainer, packing
from trl.experimental.async_grpo.vllm_client import VLLMClient

import slipstream

# The mask of the row that was packed last, which all layers share.
_mask: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)


def tree_mask(kv_index: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor) -> torch.Tensor:
    """Return which positions of a packed row each position sees: those of its path, up to itself."""
    global _mask
    if _mask[0] is not kv_index:
        starts, ends = cu_q.tolist(), cu_k.tolist()
        seen = torch.zeros(starts[-1], starts[-1], dtype=torch.bool)
        for at in range(len(starts) - 1):
            seen[starts[at] : starts[at + 1], kv_index[ends[at] : ends[at + 1]]] = True
        _mask = kv_index, seen.tril()  # pre-order: a later position of a path stands later in the row
    found = _mask[1]
    assert found is not None
    return found


def attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **given: Any
) -> tuple[torch.Tensor, None]:
    """TRL's `tree_attention` by torch's kernel for CPUs, in float32: on short rows it is the faster type there."""
    names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    packed = names[0] in given  # not in a forward pass of one plain sequence
    seen = tree_mask(*(given[name] for name in names)) if packed else None
    with torch.autocast("cpu", enabled=False):
        out = torch.nn.functional.scaled_dot_product_attention(
            query.float(),
            key.float(),
            value.float(),
            attn_mask=seen,
            is_causal=not packed,
            scale=given.get("scaling"),
            enable_gqa=True,
        )
    return out.transpose(1, 2).to(query.dtype), None


def use_stand_ins() -> None:
    """Replace what TRL needs a GPU for, but for the transfer of weights."""
    AttentionInterface.register(packing.TREE_ATTENTION, attention)
    AttentionMaskInterface.register(packing.TREE_ATTENTION, lambda **_: None)
    async_grpo_trainer.register_tree_attention = lambda: None
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None


class FileTransfer:
    """TRL's `WeightTransferProtocol` by a file in memory, for a server with `trl_server_worker.TiedHead`.

    Args:
        url: The vLLM server.
        dtype: The type that it serves.

    Attributes:
        pauses, differences: As of `SlipstreamTransfer`; there is no proof.
    """

    def __init__(self, url: str, dtype: torch.dtype) -> None:
        self._client = VLLMClient(url)
        self._dtype = dtype
        self._folder = Path("/dev/shm") / f"trl-async-{url.rpartition(':')[2]}"
        self._folder.mkdir(exist_ok=True)
        self.pauses: list[float] = []
        self.differences: list[float] = []

    def init_weight_transfer(self) -> None:
        self._client.wait_for_server_ready()

    def pause(self) -> None:
        self._paused = time.perf_counter()
        self._client.pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        safetensors.torch.save_file(
            {name: tensor.to(self._dtype).contiguous() for name, tensor in iterator}, self._folder / "model.safetensors"
        )
        self._call("reload_weights", weights_path=str(self._folder))
        self._call("pack_head")

    def _call(self, method: str, **arguments: str) -> None:
        body = {"method": method, "kwargs": arguments}
        requests.post(f"{self._client.server_url}/collective_rpc", json=body, timeout=120).raise_for_status()

    def resume(self) -> None:
        self._client.resume()
        self.pauses.append(time.perf_counter() - self._paused)

    def destroy(self) -> None:
        shutil.rmtree(self._folder)


class SlipstreamTransfer:
    """TRL's `WeightTransferProtocol` by `slipstream.servers`: the server generates while it is given the weights.

    Args:
        url: The vLLM server, with Slipstream's part in it.
        model_path: The model that it serves.
        dtype: The type that it computes in.

    Attributes:
        model: The policy in training; set before the training begins.
        pauses: Seconds for which each publication kept the server from generating.
        differences: The largest distance of a log-prob of the proof, in nats, of each publication.
    """

    model: Any

    def __init__(self, url: str, model_path: str, dtype: str) -> None:
        self._fleet = slipstream.servers(url, model=model_path, dtype=dtype)
        self._version = 0
        self.pauses: list[float] = []
        self.differences: list[float] = []

    def init_weight_transfer(self) -> None:
        self._fleet.__enter__()

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._version += 1
        self._fleet.publish(self._version, iterator, self._score)

    def _score(self, token_ids: list[int]) -> torch.Tensor:
        with torch.autocast("cpu", enabled=self.model.dtype != torch.float32):
            logits = self.model(torch.tensor([token_ids])).logits[0, :-1]
        return logits.float().log_softmax(-1).gather(-1, torch.tensor(token_ids)[1:, None]).squeeze(-1)

    def resume(self) -> None:
        record = self._fleet.wait()
        if record is not None:
            self.pauses.append(record.pause_s)
            self.differences.append(record.probe_max_abs_diff)

    def destroy(self) -> None:
        self._fleet.__exit__(None, None, None)
