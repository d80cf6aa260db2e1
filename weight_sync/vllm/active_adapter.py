"""Which adapter the next pass through a worker's model is under."""

from __future__ import annotations

from typing import Any


def put_under(runner: Any, tokens: int, adapter: Any | None) -> None:
    """Have the next pass over so many tokens, all of whose logits but the last's are wanted, compute under `adapter`, a
    `LoRARequest`, or under none: what the engine's last step said would hold otherwise. Its next step says it anew."""
    if runner.lora_config is None:
        return
    number = 0 if adapter is None else adapter.lora_int_id
    requests = set() if adapter is None else {adapter}
    runner._set_active_loras((number,) * (tokens - 1), (number,) * tokens, requests)
