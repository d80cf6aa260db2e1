"""The routes that Slipstream adds to vLLM's server, by method and path: state, staging, swap, lease, and the proof.

A handler takes the engine's client and the JSON body, and returns a message of `protocol.engine`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psutil

from slipstream.protocol.engine import (
    NO_ANSWER,
    Done,
    Dropped,
    EngineState,
    LayerFindings,
    Scores,
    ServerFacts,
    Staged,
    Swap,
)
from slipstream.weight_sync.server.cancellation import gather_two
from slipstream.weight_sync.vllm import control_rules, engines
from slipstream.weight_sync.vllm.engine.contract import EngineClient
from slipstream.weight_sync.vllm.engine_state import EngineStatus, Handler, RouteError, status_of, why_unanswered
from slipstream.weight_sync.vllm.engines import Answers, ask_states, ask_workers, label_of, reason_not_to_serve

# Maximum sequences of a request, far more than a probe has.
MAX_SEQUENCES = 64

# Seconds between questions whether the layers are read: 38 M parameters take 10 ms.
PROOF_POLL_S = 0.02
LAYERS_TIMEOUT_S = 120.0

# Seconds between two questions how far the workers are, at first and at last.
SERVER_POLL_S = (0.01, 0.1)
MAX_WAIT_S = 60.0


async def score(engine: EngineClient, body: dict[str, Any]) -> Scores:
    """Score `{"token_ids": [[int]]}`, in every engine.

    Raises:
        RouteError: 501 if the workers cannot do it.
    """
    return given_logprobs(await ask_workers(engine, "slipstream_score", given_token_ids(engine, body)))


def given_token_ids(engine: EngineClient, body: dict[str, Any]) -> list[list[int]]:
    """Read the token ids of a request's body. Raises `RouteError` 400."""
    model = engine.model_config
    return _token_ids(body.get("token_ids"), model.get_vocab_size(), model.max_model_len)


def given_logprobs(replies: Answers[dict[str, Any]]) -> Scores:
    """Make the answer of `score` from those of all workers. Raises `RouteError` 501."""
    _refuse_if_impossible(replies)
    engines = []
    for workers in replies.engines:
        logprobs = next((reply["logprobs"] for reply in workers if reply["logprobs"] is not None), None)
        if logprobs is None:
            raise RouteError(501, "no worker of this server holds logits")
        engines.append(logprobs)
    return Scores(engines)


async def layers(engine: EngineClient, body: dict[str, Any]) -> LayerFindings:
    """Compare the live layers with the weights proven before the swap to `{"label": str}`, over all workers.

    Raises:
        RouteError: 409 if other weights serve, 501 if nothing was proven.
    """
    label = body.get("label")
    # Asked at once, both are answered between the same two steps of each engine.
    states, begun = await gather_two(ask_states(engine), ask_workers(engine, "slipstream_read_layers"))
    if states is None:
        raise RouteError(504, NO_ANSWER)
    if label != (serving := label_of(states)):
        raise RouteError(409, f"weights {serving!r} serve, not {label!r}")
    return await read(engine, begun)


async def read(engine: EngineClient, begun: Answers[dict[str, Any]]) -> LayerFindings:
    """Wait for the workers' findings about their layers.

    Args:
        begun: The workers' answers when they began to read.

    Raises:
        RouteError: 501 if a worker cannot read, 504 if one takes too long.
    """
    _refuse_if_impossible(begun)
    try:
        async with asyncio.timeout(LAYERS_TIMEOUT_S):
            while True:
                await asyncio.sleep(PROOF_POLL_S)
                replies = await ask_workers(engine, "slipstream_layers")
                if all(replies):
                    break
    except TimeoutError:
        raise RouteError(504, f"the layers were not read within {LAYERS_TIMEOUT_S:g} s") from None
    named = {
        kind: sorted(
            f"{worker}: {name}" if worker else name for worker, found in replies.named() for name in found[kind]
        )
        for kind in ("wrong", "unread")
    }
    return LayerFindings(sum(reply["checked"] for reply in replies), **named)


def _refuse_if_impossible(replies: Answers[dict[str, Any]]) -> None:
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


async def state(engine: EngineClient, body: dict[str, Any]) -> EngineState:
    """Return the server's state."""
    status = status_of(engine)
    refused = status.broken or reason_not_to_serve(engine)
    states = await _settled_states(engine, status) if refused is None else None
    stuck = why_stuck(states, status, time.monotonic()) if states is not None else None
    parallel = engine.vllm_config.parallel_config
    transfer = engine.vllm_config.weight_transfer_config
    owner, now = status.owner, time.monotonic()
    paused = states is None or any(each["paused"] for each in states)
    return EngineState(
        boot="-".join([status.boot, *(each["boot"] for each in states or ())]),
        label=(status.adapter or label_of(states)) if states else "",
        paused=paused,
        whole=status.whole,
        alive=states is not None,
        pause_owner=status.pause_owner if paused else "none",
        workers=parallel.world_size_across_dp,
        transport=transfer.backend if transfer is not None else "none",
        reason=refused or (None if states else await asyncio.to_thread(why_unanswered, psutil.Process())),
        owner=owner.live(now),
        owner_silent_s=owner.silent_s(now),
        stuck=stuck,
        step_s=status.step_s,
        generated=sum(each["generated"] for each in states or ()),
    )


async def _settled_states(engine: EngineClient, status: EngineStatus) -> list[dict[str, Any]] | None:
    """Return each engine's state. Engines swap one after the other, which does not count as a difference, and pause and
    resume a moment before or after that is known here."""
    states = await ask_states(engine)
    if states is not None and _is_unowned(states, status):
        states = await ask_states(engine)
    if states is not None and len({each["label"] for each in states}) > 1:
        await control_rules.end_of_swap(status)
        states = await ask_states(engine)
    return states


def why_stuck(states: list[dict[str, Any]], status: EngineStatus, now: float) -> str | None:
    """Return why nothing is generated though nobody who may has asked for that; None where it may be."""
    stalled = status.progress.why_stalled(states, now)
    if any(state["asleep"] for state in states):
        return "it sleeps: start it again"
    if _is_unowned(states, status):
        return "it is paused, and neither a publication nor a person holds the pause: POST /resume ends it"
    return stalled


def _is_unowned(states: list[dict[str, Any]], status: EngineStatus) -> bool:
    """Return whether an engine is paused by none of a person, a lease and a swap."""
    held = status.pause_owner != "none" or status.swapped is not None or not status.whole
    return any(state["paused"] for state in states) and not held


async def facts(engine: EngineClient, body: dict[str, Any]) -> ServerFacts:
    """Return the flags of the server that decide whether a run can use it.

    vLLM's own `/server_info` takes longer, as it describes the machine too.
    """
    config = engine.vllm_config
    model, transfer = config.model_config, config.weight_transfer_config
    return ServerFacts(
        served_name=model.served_model_name,
        logprobs_mode=str(model.logprobs_mode),
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=model.max_model_len,
        transport=transfer.backend if transfer is not None else None,
        scale_out=status_of(engine).scale_out,
        quantization=model.quantization,
        max_logprobs=model.max_logprobs,
        engines=config.parallel_config.data_parallel_size,
    )


async def goodbye(engine: EngineClient, body: dict[str, Any]) -> Done:
    """End the ownership of `{"run": id}`, whose learner has ended: another run may have this server."""
    run = body.get("run")
    if not isinstance(run, str):
        raise RouteError(400, 'a goodbye wants {"run": text}')
    status_of(engine).owner.leaves(run)
    return Done()


async def staged(engine: EngineClient, body: dict[str, Any]) -> Staged:
    """Report how far the slowest worker is, once all have ended or `{"wait_s": seconds}` are over."""
    ends = time.monotonic() + min(float(body.get("wait_s", 0.0)), MAX_WAIT_S)
    pause_s, longest_s = SERVER_POLL_S
    while True:
        report = _slowest(await ask_workers(engine, "slipstream_staging"))
        left_s = ends - time.monotonic()
        if report.stage in ("ready", "failed") or left_s <= 0:
            return report
        await asyncio.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, longest_s)


def _slowest(reports: Answers[dict[str, Any]]) -> Staged:
    order = ("failed", "receiving", "building", "ready")
    worker, slowest = min(reports.named(), key=lambda named: order.index(named[1]["stage"]))
    stages = {stage for report in reports for stage in report["seconds"]}
    seconds = {stage: max(report["seconds"].get(stage, 0.0) for report in reports) for stage in stages}
    error = slowest["error"]
    return Staged(slowest["stage"], f"{worker}: {error}" if worker and error else error, seconds)


async def drop_update(engine: EngineClient, body: dict[str, Any]) -> Dropped:
    """Drop an open update, for which vLLM has no route."""
    dropped = await ask_workers(engine, "slipstream_drop_update")
    return Dropped(any(dropped))


async def swap(engine: EngineClient, body: dict[str, Any]) -> Swap:
    """Swap: `{"label": str, "clear_cache": bool}`. It ends even if its client does not wait any more."""
    label, clear_cache = body.get("label"), body.get("clear_cache", False)
    if not isinstance(label, str) or not isinstance(clear_cache, bool):
        raise RouteError(400, 'a swap wants {"label": text, "clear_cache": true or false}')
    return await asyncio.shield(asyncio.ensure_future(_swap(engine, label, clear_cache)))


async def _swap(engine: EngineClient, label: str, clear_cache: bool) -> Swap:
    status = status_of(engine)
    if not status.whole:
        raise RouteError(409, "another swap is under way")
    status.whole = False
    status.swapped = ended = asyncio.Event()
    try:
        result = await engines.swap(engine, label, clear_cache)
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
    return Swap(result["pause_s"], result["exchange_s"])


ROUTES: dict[tuple[str, str], Handler] = {
    ("GET", "/slipstream/state"): state,
    ("GET", "/slipstream/facts"): facts,
    ("POST", "/slipstream/staged"): staged,
    ("POST", "/slipstream/drop_update"): drop_update,
    ("POST", "/slipstream/swap"): swap,
    ("POST", "/slipstream/lease"): control_rules.renew_pause,
    ("POST", "/slipstream/goodbye"): goodbye,
    ("POST", "/slipstream/score"): score,
    ("POST", "/slipstream/layers"): layers,
}
