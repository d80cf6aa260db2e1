"""Messages of vLLM 0.32's `/inference/v1/generate`, and the check of its answers. Nothing that is missing is filled
in."""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Container, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from slipstream.protocol import reasons
from slipstream.protocol.config.sections.sampling import (
    NEUTRAL,
    GenerationKwargs,
    keeps_mask,
    mask_logprobs,
    typed,
)
from slipstream.protocol.versions import Label, parse
from slipstream.rollout_worker.inference.engine import Masks, Sampled, SampledSpan, TurnRequest
from slipstream.rollout_worker.inference.experts import RecordedExperts
from slipstream.rollout_worker.inference.failures import BadSample, UnknownWeights
from slipstream.rollout_worker.vision.messages import Placed

# Value that vLLM sends in place of a log-prob that is missing, NaN or minus infinity.
_NO_LOGPROB = -9999.0
# vLLM's finish reasons, and those of an episode: a turn that vLLM ended for repetition was cut off.
_FINISH_REASONS = {"stop": "stop", "length": "length", "repetition": "length", "abort": "abort"}
# The float32 log-prob of a certain token may come out this far above 0.
_ROUNDING = 1e-4
# What vLLM tells of a sampling mask holds so much of the probability at least; less if the server samples otherwise.
_MASK_SUM = 0.95
# Larger than any turn: a choice then comes in two parts, its first token and the rest.
_ONE_CHUNK = 1 << 30
# Segments hold ids as int32.
_MAX_ID = 2**31 - 1
# Samples show a publication before the registry does, which is updated every 10 s or sooner. No run publishes three
# versions a second.
_VERSIONS_AHEAD = 32


class SamplingParams(GenerationKwargs, kw_only=True, omit_defaults=True):
    """Sampling parameters of a request. The defaults are vLLM's; a field with its default is not sent.

    Attributes:
        logprobs: 0 asks for the log-prob of the sampled token only; more for those of the likeliest ones, too.
        stream_interval: Number of tokens between chunks.
        routed_experts_prompt_start: First token of the prompt whose experts are wanted.
    """

    max_tokens: int
    temperature: float
    stop_token_ids: list[int]
    logprobs: int
    detokenize: bool
    n: int
    stream_interval: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: list[str] | None = None
    skip_special_tokens: bool = True
    routed_experts_prompt_start: int = 0


def sampling_params(turn: TurnRequest, stream_interval: int | None) -> SamplingParams:
    """Return the sampling parameters of a request: the run's, but for the turn's own.

    vLLM searches the text for stop strings. So it has to make the text, with special tokens, as a tag may be one.
    """
    rollout, own = turn.rollout, turn.own
    shape: dict[str, Any] = {
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p,
        "repetition_penalty": rollout.repetition_penalty,
        "presence_penalty": rollout.presence_penalty,
        "frequency_penalty": rollout.frequency_penalty,
    }
    off = {name: value for name, value in shape.items() if value != NEUTRAL[name]}
    stops = [*rollout.stop, *own.stop]
    further = msgspec.structs.asdict(typed(rollout.generation_kwargs))
    # vLLM refuses a turn of fewer tokens, such as the last one of an episode.
    further["min_tokens"] = min(max(0, further["min_tokens"] - turn.begun), turn.max_tokens)
    if own.form is not None:
        further["structured_outputs"] = own.form
    # Another temperature is an evaluation's, which is not learnt from; at 0 vLLM tells no mask.
    masked = keeps_mask(rollout) and own.temperature in (None, rollout.temperature)
    return SamplingParams(
        max_tokens=turn.max_tokens,
        temperature=rollout.temperature if own.temperature is None else own.temperature,
        stop_token_ids=turn.stop_token_ids,
        logprobs=mask_logprobs(rollout.top_k) if masked else 0,
        detokenize=bool(stops),
        n=turn.n,
        stream_interval=stream_interval,
        stop=stops or None,
        skip_special_tokens=not stops,
        **off,
        **further,
    )


class ImageRange(msgspec.Struct):
    """Tokens `[offset, offset + length)` of the prompt stand for an image."""

    offset: int
    length: int


class Features(msgspec.Struct):
    """Images of a request. Each field has one entry, `image`, a list of one item an image."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[ImageRange]]
    kwargs_data: dict[str, list[str]]

    @classmethod
    def of(cls, images: Sequence[Placed]) -> Features | msgspec.UnsetType:
        if not images:
            return msgspec.UNSET
        return cls(
            {"image": [image.wire.hash for image, _ in images]},
            {"image": [ImageRange(start, image.wire.tokens) for image, start in images]},
            {"image": [image.item for image, _ in images]},
        )


class GenerateRequest(msgspec.Struct):
    model: str
    request_id: str
    token_ids: list[int]
    sampling_params: SamplingParams
    cache_salt: str
    stream: bool = False
    output_mode: str = "tokens"
    features: Features | msgspec.UnsetType = msgspec.UNSET


def request_of(turn: TurnRequest, model: str, weights: str | int | None) -> GenerateRequest:
    """Make the request for a turn.

    Args:
        model: Name of the model, or of the adapter, to ask for.
        weights: Names the weights, whose cached keys and values nothing else may use.
    """
    interval = _ONE_CHUNK if turn.stream else None
    params = sampling_params(turn, interval)
    params.routed_experts_prompt_start = turn.experts_from or 0
    if turn.exact:
        params.min_tokens = turn.max_tokens
    return GenerateRequest(
        model=model,
        request_id=turn.id,
        token_ids=turn.token_ids,
        sampling_params=params,
        cache_salt=f"{turn.cache}:{weights}",
        stream=turn.stream,
        features=Features.of(turn.images),
    )


class TopLogprob(msgspec.Struct):
    token_id: int
    logprob: float


class Logprob(msgspec.Struct):
    """The log-prob of a sampled token.

    Attributes:
        top_logprobs: The sampled token and likely ones, a list of `TopLogprob`.
    """

    logprob: float | None
    top_logprobs: msgspec.Raw = msgspec.Raw(b"[]")


class Logprobs(msgspec.Struct):
    content: list[Logprob] | None = None


class WeightVersion(msgspec.Struct):
    """Output tokens `[start, end)` were sampled with the weights labelled `version`."""

    version: str
    start: int
    end: int


class SampledChoice(msgspec.Struct):
    """One sampled continuation; in a stream, the part of it that is new."""

    index: Annotated[int, msgspec.Meta(ge=0)]
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[WeightVersion] | None = None
    routed_experts: str | None = None


class ErrorInfo(msgspec.Struct):
    message: str = ""
    code: int = 500


class Reply(msgspec.Struct):
    """An answer, or one event of a stream, where an error comes with status 200."""

    choices: list[SampledChoice] = []
    error: ErrorInfo | None = None


class Asked(NamedTuple):
    """Facts that an answer is checked against.

    Attributes:
        max_tokens: Maximum tokens that were asked for.
        stop_token_ids: Ids that end a turn.
        newest_version: The newest version that the registry has named for any server.
        adapter: Label of the adapter that was asked for; the labels in an answer are then those of the base model.
        run_id: Id of this run; tokens of another run are refused.
        experts: First token of the prompt whose experts were asked for, and the prompt's length; None without
            `learner.router_replay`.
        mask: Whether the sampling mask was asked for.
    """

    max_tokens: int
    stop_token_ids: Container[int]
    newest_version: int
    adapter: Label | None = None
    run_id: str = ""
    experts: tuple[int, int] | None = None
    mask: bool = False


def recorded_experts(text: str | None, start: int, prompt: int, sampled: int) -> list[RecordedExperts]:
    """Read the experts that vLLM recorded (`--enable-return-routed-experts`): an array of numpy in base64.

    Args:
        text: The answer; None from a server that records none.
        start: First token of which experts were asked for.
        prompt: Tokens of the request's prompt.
        sampled: Tokens that were sampled after it.

    Returns:
        One entry. None if the server told nothing, or not of every token, so that it cannot be known of which.

    Raises:
        BadSample: BAD_EXPERTS, it is no such array.
    """
    if text is None:
        return []
    try:
        ids = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError, binascii.Error) as error:
        raise BadSample(reasons.BAD_EXPERTS, f"routed_experts is no array: {error}") from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 3 or ids.dtype not in (np.uint8, np.uint16) or not ids[:1].size:
        shown = f"{ids.dtype} {ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise BadSample(reasons.BAD_EXPERTS, f"routed_experts is {shown}, not [tokens, layers, choices] of small ids")
    return [RecordedExperts(start, ids)] if len(ids) == prompt + sampled - 1 - start else []


def join(part: SampledChoice, more: SampledChoice) -> SampledChoice:
    """Join a streamed choice so far and its next part."""
    content = None
    if part.logprobs and more.logprobs and part.logprobs.content is not None and more.logprobs.content is not None:
        content = part.logprobs.content + more.logprobs.content
    return SampledChoice(
        index=part.index,
        token_ids=(part.token_ids or []) + (more.token_ids or []),
        logprobs=Logprobs(content),
        finish_reason=more.finish_reason,
        weight_versions=more.weight_versions,
        routed_experts=more.routed_experts,
    )


def sampled_of(choice: SampledChoice, server: str, asked: Asked) -> Sampled:
    """Check and return the tokens of a finished choice. An abort after the end of the turn does not count.

    Args:
        server: Name of the server.

    Raises:
        BadSample: The choice cannot be trained on.
        UnknownWeights: A label is no version of this run.
    """
    token_ids = choice.token_ids or []
    finish_reason = _FINISH_REASONS.get(choice.finish_reason or "")
    if finish_reason is None:
        raise BadSample(reasons.FINISH_REASON, f"finish_reason is {choice.finish_reason!r}")
    if not token_ids:
        if finish_reason == "abort":
            return Sampled()
        raise BadSample(reasons.NO_TOKENS, f"no token was sampled, finish_reason is {choice.finish_reason!r}")
    _check_ids(token_ids, asked.max_tokens)
    if finish_reason == "abort" and token_ids[-1] in asked.stop_token_ids:
        finish_reason = "stop"
    return Sampled(
        token_ids=token_ids,
        spans=_spans(_versions(choice, len(token_ids), asked), len(token_ids), server, asked),
        logprobs=_logprobs(choice.logprobs, len(token_ids)),
        finish_reason=finish_reason,
        experts=[]
        if asked.experts is None
        else recorded_experts(choice.routed_experts, *asked.experts, len(token_ids)),
        masks=_masks(choice.logprobs, token_ids) if asked.mask else Masks(),
    )


def _versions(choice: SampledChoice, size: int, asked: Asked) -> list[WeightVersion] | None:
    """Return the versions of the tokens. A request keeps the adapter that it asked for to its end."""
    return choice.weight_versions if asked.adapter is None else [WeightVersion(str(asked.adapter), 0, size)]


def _check_ids(token_ids: list[int], max_tokens: int) -> None:
    if len(token_ids) > max_tokens:
        raise BadSample(reasons.TOO_MANY, f"{len(token_ids)} tokens, {max_tokens} were asked for")
    if min(token_ids) < 0:
        raise BadSample(reasons.TOKEN_ID_NEGATIVE, f"a token id is {min(token_ids)}")
    if max(token_ids) > _MAX_ID:
        raise BadSample(reasons.TOKEN_ID_UNKNOWN, f"a token id is {max(token_ids)}, beyond int32")


def _logprobs(logprobs: Logprobs | None, size: int) -> list[float]:
    content = logprobs.content if logprobs is not None else None
    if content is None or len(content) != size:
        given = "no" if content is None else str(len(content))
        raise BadSample(reasons.MISSING_LOGPROBS, f"{given} log-probs for {size} tokens")
    values = [entry.logprob for entry in content]
    for value in values:
        if value is None or math.isnan(value) or not _NO_LOGPROB < value <= _ROUNDING:
            raise BadSample(reasons.BAD_LOGPROBS, f"a log-prob is {value}")
    return [min(value, 0.0) for value in values if value is not None]


def _masks(logprobs: Logprobs | None, token_ids: list[int]) -> Masks:
    """Return the ids that each token was sampled from: those whose log-prob is not minus infinity."""
    masks = Masks()
    for token, entry in zip(token_ids, (logprobs and logprobs.content) or [], strict=True):
        try:
            left = {top.token_id: top.logprob for top in _TOP.decode(entry.top_logprobs) if top.logprob > _NO_LOGPROB}
        except msgspec.DecodeError as error:
            raise BadSample(reasons.BAD_MASK, f"top_logprobs are unreadable: {error}") from None
        known = math.fsum(map(math.exp, left.values()))
        if token not in left or not _MASK_SUM < known < 2 - _MASK_SUM or not 0 <= min(left) <= max(left) <= _MAX_ID:
            among = "among" if token in left else "not among"
            raise BadSample(
                reasons.BAD_MASK,
                f"the {len(left)} tokens that could be sampled have {known:.3f} of the probability, and the sampled "
                f"one is {among} them: is the server's --logprobs-mode processed_logprobs?",
            )
        masks.add(list(left))
    return masks


_TOP = msgspec.json.Decoder(list[TopLogprob])


def _spans(versions: list[WeightVersion] | None, size: int, server: str, asked: Asked) -> list[SampledSpan]:
    if not versions:
        raise BadSample(reasons.MISSING_VERSIONS, f"no weight_versions for {size} tokens")
    position, newest, spans = 0, asked.newest_version, []
    for span in versions:
        label = parse(span.version)
        if label is None or label.run != asked.run_id:
            raise UnknownWeights(span.version[:80], server, asked.run_id)
        if label.version > newest + _VERSIONS_AHEAD:
            detail = f"tokens of version {label.version}, while the registry knows of none above {newest}"
            raise BadSample(reasons.BAD_VERSIONS, detail)
        if span.start != position or span.end < span.start:
            raise BadSample(reasons.BAD_VERSIONS, f"weight_versions do not cover the {size} tokens: {versions}")
        position = span.end
        if span.end > span.start:
            spans.append(SampledSpan(label.version, span.start, span.end, server))
    if position != size:
        raise BadSample(reasons.BAD_VERSIONS, f"weight_versions end at {position} of {size} tokens")
    return spans
