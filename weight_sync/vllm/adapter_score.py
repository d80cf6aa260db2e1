"""Log-probs under an adapter that is loaded and does not serve yet: computed inside the workers, beside generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weight_sync.vllm.route import RouteError

if TYPE_CHECKING:
    from weight_sync.vllm.adapter_shelf import Shelf


async def score(shelf: Shelf, name: str, body: dict[str, Any]) -> dict[str, Any]:
    """`{"token_ids": [[int]]}` -> `{"logprobs": [[float]]}`, in nats at temperature 1; 501 where it cannot be done."""
    shelf.lora(name)
    raise RouteError(501, "not computed in the workers")
