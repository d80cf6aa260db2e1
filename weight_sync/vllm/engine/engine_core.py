"""A turn that begins under new weights reads no keys and values of older ones: neither from vLLM's prefix cache, nor
from the part of its own prompt that was computed before.

A turn's tokens carry the label that the engine has when they are sampled. So the engine, not who asks, decides under
which salt a prompt is cached: the worker learns of a swap late. vLLM makes a request's block hashes on the thread that
reads its socket, where a swap may still lie ahead in the queue. What is added on the engine's own thread is compared
with the weights of that moment, and hashed again if they are others.

Turns that have tokens already keep their cache: their later tokens are labelled apart from the first, and the blocks
that they fill go under the old salt, where no new turn looks. Requests whose keys and values come from another server
are left alone.
"""

from __future__ import annotations

import itertools
import time
from functools import wraps
from typing import Any

_MARK = "weights "

_CHANGES = itertools.count(1)

"""Of this process. A label alone would not do: weights that fail their proof have that of those that follow."""


def install_prefix_salt() -> None:
    """Have the engine core salt what it is asked, with what salt the caller sent kept. Harmless when called again."""
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore, "slipstream_salt"):
        return
    EngineCore.slipstream_salt = f"{_MARK}0"
    preprocess, add, label = EngineCore.preprocess_add_request, EngineCore.add_request, EngineCore.set_weight_version

    @wraps(preprocess)
    def preprocess_add_request(core: Any, request: Any) -> Any:
        given = request.cache_salt
        request.cache_salt = _salted(core, given)
        try:
            return preprocess(core, request)
        finally:
            request.cache_salt = given

    @wraps(add)
    def add_request(core: Any, request: Any, *wave: Any, **named: Any) -> None:
        _renew(core, request)
        add(core, request, *wave, **named)

    # Each transport labels through this call, those that load in place too, while nothing generates.
    @wraps(label)
    def set_weight_version(core: Any, weight_version: str) -> None:
        label(core, weight_version)
        core.slipstream_salt = f"{_MARK}{weight_version} {next(_CHANGES)}"
        begin_anew(core)

    EngineCore.preprocess_add_request = preprocess_add_request
    EngineCore.add_request = add_request
    EngineCore.set_weight_version = set_weight_version


def begin_anew(core: Any) -> None:
    """Have all requests without a token so far compute their prompts under the weights of now. Between two steps."""
    scheduler = core.scheduler
    now = time.monotonic()
    # The last first: each is put at the head of those that wait.
    for request in [request for request in reversed(scheduler.running) if not request.num_output_tokens]:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now, drop_stale_output=True)
        # It may be scheduled in the very next step, and must not look as if it had been in the one before.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    for request in scheduler.waiting:
        if not request.num_output_tokens:
            _renew(core, request)


def _renew(core: Any, request: Any) -> None:
    """Nothing of the request is computed yet."""
    salt = _salted(core, request.cache_salt)
    if request.cache_salt != salt:
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()


def _salted(core: Any, salt: str | None) -> str:
    """`salt` as the caller sent it, or as it was made for other weights."""
    given = salt or ""
    if given.startswith(_MARK):
        given = given.partition("|")[2]
    return f"{core.slipstream_salt}|{given}"
