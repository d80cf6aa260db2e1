"""The proof's routes: what the server's log-probs are, and what its layers hold."""

from __future__ import annotations

import asyncio
from typing import Any

from weight_sync.server.cancellation import gather_two
from weight_sync.vllm.route import Handler, RouteError

# Far more than a probe has.
MOST_SEQUENCES = 64
# How often to look whether the layers are read: 38 M parameters take 10 ms.
LOOK_EVERY_S = 0.02
LAYERS_TIMEOUT_S = 120.0


async def score(engine: Any, body: dict[str, Any]) -> dict[str, Any]:
    """`{"token_ids": [[int]]}` -> `{"logprobs": [[float]]}`, in nats at temperature 1; 501 where it cannot be done."""
    token_ids = given_token_ids(engine, body)
    return given_logprobs(await engine.collective_rpc("slipstream_score", args=(token_ids,)))


def given_token_ids(engine: Any, body: dict[str, Any]) -> list[list[int]]:
    """Those of a request's body. Raises `RouteError` 400."""
    model = engine.model_config
    return _token_ids(body.get("token_ids"), model.get_vocab_size(), model.max_model_len)


def given_logprobs(replies: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer, from those of all workers. Raises `RouteError` 501."""
    _refuse_if_impossible(replies)
    logprobs = next((reply["logprobs"] for reply in replies if reply["logprobs"] is not None), None)
    if logprobs is None:
        raise RouteError(501, "no worker of this server holds logits")
    return {"logprobs": logprobs}


async def layers(engine: Any, body: dict[str, Any]) -> dict[str, Any]:
    """`{"label": str}` -> `{"checked": int, "wrong": [str], "unread": [str]}` over all workers: the live layers against
    what was proven before the swap to `label`. 409 where other weights serve, 501 where nothing was proven."""
    label = body.get("label")
    # Asked at once, they are answered between the same two steps of the engine.
    serving, begun = await gather_two(engine.get_weight_version(), engine.collective_rpc("slipstream_read_layers"))
    if label != serving:
        raise RouteError(409, f"weights {serving!r} serve, not {label!r}")
    return await read(engine, begun)


async def read(engine: Any, begun: list[dict[str, Any]]) -> dict[str, Any]:
    """What all workers found who have `begun` to read, by their answers. Raises `RouteError` 501, 504."""
    _refuse_if_impossible(begun)
    replies: list[dict[str, Any]] = [{}]
    try:
        async with asyncio.timeout(LAYERS_TIMEOUT_S):
            while not all(replies):
                await asyncio.sleep(LOOK_EVERY_S)
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
    """Ids as the model can take them: one that it does not have would end the engine."""
    if not isinstance(given, list) or not 0 < len(given) <= MOST_SEQUENCES:
        raise RouteError(400, f"token_ids: must be a list of 1 to {MOST_SEQUENCES} lists of token ids")
    for ids in given:
        if not isinstance(ids, list) or not 2 <= len(ids) <= longest:
            raise RouteError(400, f"token_ids: each list must hold 2 to {longest} ids")
        for token in ids:
            if type(token) is not int or not 0 <= token < vocabulary:
                raise RouteError(400, f"token_ids: {token!r:.40} is not an id of this model's {vocabulary}")
    return given


ROUTES: dict[tuple[str, str], Handler] = {
    ("POST", "/slipstream/score"): score,
    ("POST", "/slipstream/layers"): layers,
}
