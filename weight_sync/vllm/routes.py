"""The routes that Slipstream adds to vLLM's server, by method and path: state, staging, swap, lease, and the proof.

A handler takes the engine's client and the JSON body, and returns the JSON answer.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from weight_sync.server.cancellation import gather_two
from weight_sync.server.control import NO_ANSWER
from weight_sync.vllm import control_rules
from weight_sync.vllm.engine.contract import EngineClient
from weight_sync.vllm.engine_state import Handler, RouteError, status_of

# Maximum sequences of a request, far more than a probe has.
MAX_SEQUENCES = 64

# Seconds between questions whether the layers are read: 38 M parameters take 10 ms.
PROOF_POLL_S = 0.02
LAYERS_TIMEOUT_S = 120.0

# An engine answers between two steps; one that takes longer does not count as alive.
LOOK_TIMEOUT_S = 4.0

# Seconds between two questions how far the workers are, at first and at last.
SERVER_POLL_S = (0.01, 0.1)
MAX_WAIT_S = 60.0


async def score(engine: EngineClient, body: dict[str, Any]) -> dict[str, Any]:
    """Score `{"token_ids": [[int]]}`: `{"logprobs": [[float]]}` in nats at temperature 1; 501 if it cannot be done."""
    token_ids = given_token_ids(engine, body)
    return given_logprobs(await engine.collective_rpc("slipstream_score", args=(token_ids,)))


def given_token_ids(engine: EngineClient, body: dict[str, Any]) -> list[list[int]]:
    """Read the token ids of a request's body. Raises `RouteError` 400."""
    model = engine.model_config
    return _token_ids(body.get("token_ids"), model.get_vocab_size(), model.max_model_len)


def given_logprobs(replies: list[dict[str, Any]]) -> dict[str, Any]:
    """Make the answer from those of all workers. Raises `RouteError` 501."""
    _refuse_if_impossible(replies)
    logprobs = next((reply["logprobs"] for reply in replies if reply["logprobs"] is not None), None)
    if logprobs is None:
        raise RouteError(501, "no worker of this server holds logits")
    return {"logprobs": logprobs}


async def layers(engine: EngineClient, body: dict[str, Any]) -> dict[str, Any]:
    """Compare the live layers with the weights proven before the swap to `{"label": str}`, over all workers.

    Returns:
        `{"checked": int, "wrong": [str], "unread": [str]}`.

    Raises:
        RouteError: 409 if other weights serve, 501 if nothing was proven.
    """
    label = body.get("label")
    # Asked at once, both are answered between the same two steps of the engine.
    serving, begun = await gather_two(engine.get_weight_version(), engine.collective_rpc("slipstream_read_layers"))
    if label != serving:
        raise RouteError(409, f"weights {serving!r} serve, not {label!r}")
    return await read(engine, begun)


async def read(engine: EngineClient, begun: list[dict[str, Any]]) -> dict[str, Any]:
    """Wait for the workers' findings about their layers.

    Args:
        begun: The workers' answers when they began to read.

    Raises:
        RouteError: 501 if a worker cannot read, 504 if one takes too long.
    """
    _refuse_if_impossible(begun)
    replies: list[dict[str, Any]] = [{}]
    try:
        async with asyncio.timeout(LAYERS_TIMEOUT_S):
            while not all(replies):
                await asyncio.sleep(PROOF_POLL_S)
                replies = await engine.collective_rpc("slipstream_layers")
    except TimeoutError:
        raise RouteError(504, f"the layers were not read within {LAYERS_TIMEOUT_S:g} s") from None
    several = len(replies) > 1
    named = {
        kind: sorted(
            f"worker {rank}: {name}" if several else name for rank, of in enumerate(replies) for name in of[kind]
        )
        for kind in ("wrong", "unread")
    }
    return {"checked": sum(reply["checked"] for reply in replies), **named}


def _refuse_if_impossible(replies: list[dict[str, Any]]) -> None:
    for reply in replies:
        if "cannot" in reply:
            raise RouteError(501, str(reply["cannot"]))


def _token_ids(given: Any, vocabulary: int, longest: int) -> list[list[int]]:
    """Check that the model can take the ids: one outside its vocabulary would end the engine."""
    if not isinstance(given, list) or not 0 < len(given) <= MAX_SEQUENCES:
        raise RouteError(400, f"token_ids: must be a list of 1 to {MAX_SEQUENCES} lists of token ids")
    for ids in given:
        if not isinstance(ids, list) or not 2 <= len(ids) <= longest:
            raise RouteError(400, f"token_ids: each list must hold 2 to {longest} ids")
        for token in ids:
            if type(token) is not int or not 0 <= token < vocabulary:
                raise RouteError(400, f"token_ids: {token!r:.40} is not an id of this model's {vocabulary}")
    return given


PROOF_ROUTES: dict[tuple[str, str], Handler] = {
    ("POST", "/slipstream/score"): score,
    ("POST", "/slipstream/layers"): layers,
}


async def ask_engine(engine: EngineClient, timeout_s: float | None = None) -> dict[str, Any] | None:
    """Return `engine_core.state`; None if there is no answer within `timeout_s`, by default `LOOK_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S if timeout_s is None else timeout_s):
            engine_state: dict[str, Any] = await engine.engine_core.call_utility_async("slipstream_state")
            return engine_state
    except TimeoutError:
        return None
    except Exception as error:
        # A dead engine raises vLLM's own error, which is no answer.
        if getattr(engine, "errored", False):
            return None
        raise RouteError(500, f"the engine cannot say its state: {error}") from error


async def state(engine: EngineClient, body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `weight_sync.server.answers.EngineState`."""
    status = status_of(engine)
    engine_state = await ask_engine(engine) if status.broken is None else None
    reason = status.broken or (None if engine_state else NO_ANSWER)
    parallel = engine.vllm_config.parallel_config
    transfer = engine.vllm_config.weight_transfer_config
    owner, now = status.owner, time.monotonic()
    return {
        "boot": f"{status.boot}-{engine_state['boot']}" if engine_state else status.boot,
        "label": (status.adapter or engine_state["label"]) if engine_state else "",
        "paused": engine_state["paused"] if engine_state else True,
        "whole": status.whole,
        "alive": engine_state is not None,
        "pause_owner": status.pause_owner if engine_state is None or engine_state["paused"] else "none",
        "workers": parallel.world_size_across_dp,
        "transport": transfer.backend if transfer is not None else "none",
        "reason": reason,
        "owner": owner.live(now),
        "owner_silent_s": owner.silent_s(now),
    }


async def facts(engine: EngineClient, body: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of the server that decide whether a run can use it.

    vLLM's own `/server_info` takes longer, as it describes the machine too.
    """
    config = engine.vllm_config
    model, transfer = config.model_config, config.weight_transfer_config
    return {
        "served_name": model.served_model_name,
        "logprobs_mode": str(model.logprobs_mode),
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "transport": transfer.backend if transfer is not None else None,
        "scale_out": status_of(engine).scale_out,
        "quantization": model.quantization,
    }


async def goodbye(engine: EngineClient, body: dict[str, Any]) -> dict[str, Any]:
    """End the ownership of `{"run": id}`, whose learner has ended: another run may have this server."""
    run = body.get("run")
    if not isinstance(run, str):
        raise RouteError(400, 'a goodbye wants {"run": text}')
    status_of(engine).owner.leaves(run)
    return {}


async def staged(engine: EngineClient, body: dict[str, Any]) -> dict[str, Any]:
    """Report how far the slowest worker is, once all have ended or `{"wait_s": seconds}` are over."""
    ends = time.monotonic() + min(float(body.get("wait_s", 0.0)), MAX_WAIT_S)
    pause_s, longest_s = SERVER_POLL_S
    while True:
        report = _slowest(await engine.collective_rpc("slipstream_staging"))
        left_s = ends - time.monotonic()
        if report["stage"] in ("ready", "failed") or left_s <= 0:
            return report
        await asyncio.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, longest_s)


def _slowest(reports: list[dict[str, Any]]) -> dict[str, Any]:
    order = ("failed", "receiving", "building", "ready")
    slowest = min(reports, key=lambda report: order.index(report["stage"]))
    stages = {stage for report in reports for stage in report["seconds"]}
    seconds = {stage: max(report["seconds"].get(stage, 0.0) for report in reports) for stage in stages}
    return {"stage": slowest["stage"], "error": slowest["error"], "seconds": seconds}


async def drop_update(engine: EngineClient, body: dict[str, Any]) -> dict[str, Any]:
    """Drop an open update, for which vLLM has no route."""
    dropped = await engine.collective_rpc("slipstream_drop_update")
    return {"dropped": any(dropped)}


async def swap(engine: EngineClient, body: dict[str, Any]) -> dict[str, Any]:
    """Swap: `{"label": str, "clear_cache": bool}`. It ends even if its client does not wait any more."""
    label, clear_cache = body.get("label"), body.get("clear_cache", False)
    if not isinstance(label, str) or not isinstance(clear_cache, bool):
        raise RouteError(400, 'a swap wants {"label": text, "clear_cache": true or false}')
    return await asyncio.shield(asyncio.ensure_future(_swap(engine, label, clear_cache)))


async def _swap(engine: EngineClient, label: str, clear_cache: bool) -> dict[str, Any]:
    status = status_of(engine)
    if not status.whole:
        raise RouteError(409, "another swap is under way")
    status.whole = False
    status.swapped = ended = asyncio.Event()
    try:
        result = await _exchanged(engine, label, clear_cache)
    except Exception as error:
        status.break_down(f"the swap to {label} failed: {error}")
        raise RouteError(503, status.broken or "") from error
    finally:
        # Those that wait for it continue only after this call has recorded the outcome.
        status.swapped = None
        ended.set()
    if not result["whole"]:
        status.break_down(f"the swap to {label} failed half-way: {result['error']}")
        raise RouteError(503, status.broken or "")
    status.whole = True
    if result["error"]:
        raise RouteError(409, result["error"])
    return {"pause_s": result["pause_s"], "exchange_s": result["exchange_s"]}


async def _exchanged(engine: EngineClient, label: str, clear_cache: bool) -> dict[str, Any]:
    core = engine.engine_core
    if engine.vllm_config.parallel_config.data_parallel_size == 1:
        result: dict[str, Any] = await core.call_utility_async("slipstream_swap", label, clear_cache)
        return result
    # Several engines step together: all stand still before the first is changed.
    began = time.monotonic()
    paused = await core.is_scheduler_paused_async()
    report = _slowest(await engine.collective_rpc("slipstream_staging"))
    if report["stage"] != "ready":
        return {"whole": True, "error": report["error"] or f"not ready to swap: {report['stage']}"}
    await core.pause_scheduler_async("keep", False)
    results = await core.call_utility_all_async("slipstream_exchange", label, clear_cache)
    failed = [result for result in results if result["error"]]
    if failed:
        return {**failed[0], "whole": False}
    if not paused:
        await core.resume_scheduler_async()
    return {**results[0], "pause_s": time.monotonic() - began}


SERVER_ROUTES: dict[tuple[str, str], Handler] = {
    ("GET", "/slipstream/state"): state,
    ("GET", "/slipstream/facts"): facts,
    ("POST", "/slipstream/staged"): staged,
    ("POST", "/slipstream/drop_update"): drop_update,
    ("POST", "/slipstream/swap"): swap,
    ("POST", "/slipstream/lease"): control_rules.renew_pause,
    ("POST", "/slipstream/goodbye"): goodbye,
}

ROUTES: dict[tuple[str, str], Handler] = {**SERVER_ROUTES, **PROOF_ROUTES}
