"""Validates groups: each rule has a reason. Nothing is filled in: a group that breaks a rule is rejected whole."""

from __future__ import annotations

import math
from contextlib import suppress

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.protocol import codec, reasons
from slipstream.protocol.images import MAX_BYTES, Image
from slipstream.protocol.messages import (
    MAX_METRIC,
    MAX_ROLES,
    SCHEMA_VERSION,
    Group,
    Rollout,
    RoutedExperts,
    SamplingMask,
    Segment,
    TeacherTop,
)
from slipstream.rollout_queue.ledger.records import GroupFacts, Refusal, TicketRecord

# A rollout of 1,024 segments, each with an answer, and all metrics and notes that are allowed has about 26,000 values;
# one of a thousand turns in one segment about 6,000. Twenty of the largest fit into a group. At the bound, whatever a
# body's size, notes take about 30 MB to decode, and empty lists about 10 MB.
_MAX_ITEMS_PER_ROLLOUT = 2**15
_MAX_ITEMS = 2**19
# In a real group every fourth or fifth value is a list or map. An empty one costs several times as much as a number.
_MIN_ITEMS_PER_CONTAINER = 4
_MAX_DEPTH = 32
_MAX_SERVERS = 1024
_MAX_SEGMENTS = 1024
_MAX_METRICS = 256
_MAX_NAME_CHARACTERS = 256
_MAX_NOTES = 256
_MAX_NOTE_CHARACTERS = 4096
_MAX_IMAGES = 4096
_MAX_ARRAYS = 16
# Bytes of all images of a group, unpacked: the learner holds them for a step.
_MAX_UNPACKED = 2 * MAX_BYTES


class _Stamp(msgspec.Struct):
    schema_version: int = SCHEMA_VERSION


class Rules(msgspec.Struct, frozen=True):
    """Bounds that a run sets for a group.

    Attributes:
        group_size: Maximum number of rollouts of a role, from the ticket.
        learner_version: No token is newer.
        vocabulary: Token ids are below it; None if unknown.
        max_tokens: Maximum tokens of a segment up to its last sampled one, which are all that is trained on.
        min_rollouts: Minimum number of rollouts of a role, since an advantage compares several.
    """

    group_size: int
    learner_version: int
    vocabulary: int | None = None
    max_tokens: int | None = None
    min_rollouts: int = 2


class Arrival(msgspec.Struct, frozen=True):
    """A valid group, and the facts that the ledger keeps of it."""

    group: Group
    facts: GroupFacts


def read(body: bytes, ticket: TicketRecord, rules: Rules) -> Arrival:
    """Decode and check the group in a request's body. Refused for the first rule that it breaks."""
    group = decode(body, rules.group_size)
    check_group(group, ticket, rules)
    return Arrival(group, GroupFacts.of(group, len(body)))


def decode(body: bytes, group_size: int) -> Group:
    """Decode the group in a request's body.

    Whatever passes here the learner can decode too: how deep a decoder can get depends on its caller's stack.

    Args:
        body: msgpack.
        group_size: Rollouts of the group at most, which bound its number of values.

    Raises:
        Refusal: TOO_DEEP, TOO_MANY, SCHEMA_VERSION, UNDECODABLE.
    """
    max_items = min(_MAX_ITEMS, _MAX_ITEMS_PER_ROLLOUT * group_size)
    if len(body) <= max_items:  # too small for too many values; and no unknown field is allowed, so none is too deep
        with suppress(codec.DecodeError):
            group = codec.decode(body, Group)
            if group.schema_version == SCHEMA_VERSION:
                return group
    try:
        shape = codec.shape(body, codec.Shape(max_items, max_items // _MIN_ITEMS_PER_CONTAINER, _MAX_DEPTH))
        if shape.depth > _MAX_DEPTH:
            raise Refusal(reasons.TOO_DEEP, f"the group nests deeper than the {_MAX_DEPTH} levels that are allowed")
        if shape.items > max_items or shape.containers > max_items // _MIN_ITEMS_PER_CONTAINER:
            raise Refusal(
                reasons.TOO_MANY,
                f"the group holds more than the {max_items} values that are allowed, or more than "
                f"{max_items // _MIN_ITEMS_PER_CONTAINER} lists and maps: let its episodes have fewer segments, "
                f"turns or notes",
            )
        stamp = codec.decode(body, _Stamp)
        if stamp.schema_version != SCHEMA_VERSION:
            raise Refusal(
                reasons.SCHEMA_VERSION,
                f"the group has schema {stamp.schema_version}, this queue reads {SCHEMA_VERSION}: run one release of "
                f"Slipstream everywhere",
            )
        return codec.decode(body, Group)
    except codec.DecodeError as error:
        raise Refusal(reasons.UNDECODABLE, str(error)) from error


def check_group(group: Group, ticket: TicketRecord, rules: Rules) -> None:
    """Refuse a group for the first rule that it breaks."""
    if (group.ticket_id, group.index) != (ticket.id, ticket.index) or group.epoch < 0:
        raise Refusal(
            reasons.TICKET_MISMATCH,
            f"ticket {ticket.id} is for row {ticket.index}, the group names ticket {group.ticket_id}, row "
            f"{group.index}, epoch {group.epoch}",
        )
    _check_size(group, rules)
    _check_count(len(group.server_names), _MAX_SERVERS, "servers", "the group")
    _check_names(("worker_id", group.worker_id), *(("a server's name", name) for name in group.server_names))
    _check_count(len(group.reward_weights), _MAX_METRICS, "reward weights", "the group")
    _check_names(*(("a reward weight's name", name) for name in group.reward_weights))
    for name, weight in group.reward_weights.items():
        if wrong := _metric_fault(weight):
            raise Refusal(reasons.REWARD_NOT_FINITE, f"the weight of reward {name} {wrong}")
    if group.worker_id != ticket.worker_id:
        raise Refusal(
            reasons.WORKER_MISMATCH, f"ticket {ticket.id} is worker {ticket.worker_id}'s, the group {group.worker_id}'s"
        )
    for number, rollout in enumerate(group.rollouts):
        where = f"rollout {number}"
        _check_count(len(rollout.segments), _MAX_SEGMENTS, "segments", where)
        _check_metrics(rollout, where)
    if not _tokens_are_sound(group, rules):
        _check_tokens(group, rules)
    for number, rollout in enumerate(group.rollouts):
        for position, segment in enumerate(rollout.segments):
            place = f"rollout {number}, segment {position}"
            if segment.experts is not None:
                _check_experts(segment.experts, len(segment.token_ids), place)
            if segment.sampling_mask is not None:
                _check_mask(segment, segment.sampling_mask, rules.vocabulary, place)
            if segment.teacher is not None:
                _check_teacher(segment.teacher, segment.sampled_tokens, place)
            if segment.teacher_top is not None:
                _check_teacher_top(segment.teacher_top, segment.sampled_tokens, rules.vocabulary, place)
    _check_images(group)
    if group.sampled_tokens == 0:
        raise Refusal(reasons.NO_SAMPLED_TOKENS, "no rollout holds a sampled token")


def _check_size(group: Group, rules: Rules) -> None:
    by_role = group.by_role()
    for role, numbers in (by_role or {"": []}).items():
        if not rules.min_rollouts <= len(numbers) <= rules.group_size:
            of_role = f" of the role {role}" if role else ""
            raise Refusal(
                reasons.GROUP_SIZE,
                f"{len(numbers)} rollouts{of_role}, allowed are {rules.min_rollouts} to {rules.group_size}",
            )
    _check_count(len(by_role), MAX_ROLES, "roles", "the group")
    _check_names(*(("a role", role) for role in by_role if role))


def _tokens_are_sound(group: Group, rules: Rules) -> bool:
    """Tell whether the tokens of all segments keep every rule of `_check_tokens`, looked at together: it is quicker."""
    segments = [segment for rollout in group.rollouts for segment in rollout.segments]
    lengths = [len(segment.token_ids) for segment in segments]
    if not segments or not all(
        length == len(segment.loss_mask) == len(segment.logprobs)
        for length, segment in zip(lengths, segments, strict=True)
    ):
        return False
    ids = np.concatenate([segment.token_ids for segment in segments])
    mask = np.concatenate([segment.loss_mask for segment in segments])
    logprobs = np.concatenate([segment.logprobs for segment in segments])
    covered = np.zeros(len(mask), dtype=np.bool_)
    begin, servers = 0, len(group.server_names)
    for length, segment in zip(lengths, segments, strict=True):
        end = 0
        for span in segment.version_spans:
            fits = end <= span.start < span.end <= length
            if not fits or not 0 <= span.version <= rules.learner_version or not 0 <= span.server < servers:
                return False
            end = span.end
            covered[begin + span.start : begin + end] = True
        if rules.max_tokens is not None and end > rules.max_tokens:
            return False
        begin += length
    known = rules.vocabulary is None or not len(ids) or int(ids.max()) < rules.vocabulary
    positive = not len(ids) or int(ids.min()) >= 0
    finite = bool(np.isfinite(logprobs).all())
    return known and positive and finite and bool((covered == mask).all()) and not bool((mask & (logprobs > 0)).any())


def _check_tokens(group: Group, rules: Rules) -> None:
    """Refuse a group for the first rule that the tokens of a segment break."""
    for number, rollout in enumerate(group.rollouts):
        for position, segment in enumerate(rollout.segments):
            place = f"rollout {number}, segment {position}"
            _check_arrays(segment, rules.vocabulary, place)
            _check_spans(segment, rules.learner_version, len(group.server_names), place)
            _check_length(segment, rules.max_tokens, place)
            _check_logprobs(segment, place)


def _check_images(group: Group) -> None:
    images = group.images or []
    _check_count(len(images), _MAX_IMAGES, "images", "the group")
    if len({image.hash for image in images}) < len(images):
        raise Refusal(reasons.BAD_IMAGE, "the group has an image twice; send each once")
    for number, image in enumerate(images):
        _check_names(("an image's hash", image.hash), *(("an image's array", name) for name in image.arrays))
        _check_count(len(image.arrays), _MAX_ARRAYS, "arrays", f"image {number}")
        if (size := sum(array.nbytes for array in image.arrays.values())) > MAX_BYTES:
            raise Refusal(reasons.BAD_IMAGE, f"image {number} has {size} bytes unpacked, allowed are {MAX_BYTES}")
    whole = sum(array.nbytes for image in images for array in image.arrays.values())
    if whole > _MAX_UNPACKED:
        raise Refusal(reasons.BAD_IMAGE, f"the images have {whole} bytes unpacked, allowed are {_MAX_UNPACKED}")
    for number, rollout in enumerate(group.rollouts):
        for position, segment in enumerate(rollout.segments):
            _check_places(segment, images, f"rollout {number}, segment {position}")


def _check_places(segment: Segment, images: list[Image], where: str) -> None:
    end = 0
    for place in segment.images or []:
        if place.image >= len(images):
            raise Refusal(reasons.BAD_IMAGE, f"{where}: {place} names an image, the group has {len(images)}")
        before, end = end, place.start + images[place.image].tokens
        if place.start < before or end > len(segment.token_ids):
            raise Refusal(reasons.BAD_IMAGE, f"{where}: {place} overlaps or leaves the {len(segment.token_ids)} tokens")
        if segment.loss_mask[place.start : end].any():
            raise Refusal(reasons.BAD_IMAGE, f"{where}: {place} covers sampled tokens")


def _check_metrics(rollout: Rollout, where: str) -> None:
    for name, value in (("reward", rollout.reward), *rollout.reward_components.items()):
        if value is not None and (wrong := _metric_fault(value)):
            raise Refusal(reasons.REWARD_NOT_FINITE, f"{where}: {name} {wrong}")
    for figures in (rollout.reward_components, rollout.metrics, rollout.timings):
        _check_count(len(figures), _MAX_METRICS, "figures of one kind", where)
        _check_names(*((f"{where}: a figure's name", name) for name in figures))
    _check_count(len(rollout.extra), _MAX_NOTES, "notes", where)
    _check_names(*((f"{where}: a note's name", name) for name in rollout.extra))
    for name, text in rollout.extra.items():
        if len(text) > _MAX_NOTE_CHARACTERS:
            raise Refusal(
                reasons.TOO_LARGE,
                f"{where}: note {name} has {len(text)} characters, allowed are {_MAX_NOTE_CHARACTERS}: shorten it",
            )
    for name, value in (*rollout.metrics.items(), *rollout.timings.items()):
        if wrong := _metric_fault(value):
            raise Refusal(reasons.METRIC_NOT_FINITE, f"{where}: metric {name} {wrong}")


def _metric_fault(value: float) -> str | None:
    if not math.isfinite(value):
        return f"is {value}"
    return f"is {value}, beyond {MAX_METRIC:g}: scale it down" if abs(value) > MAX_METRIC else None


def _check_count(count: int, max_items: int, what: str, where: str) -> None:
    if count > max_items:
        raise Refusal(reasons.TOO_MANY, f"{where}: {count} {what}, allowed are {max_items}")


def _check_names(*names: tuple[str, str]) -> None:
    for what, name in names:
        if len(name) > _MAX_NAME_CHARACTERS:
            raise Refusal(
                reasons.TOO_LARGE, f"{what} has {len(name)} characters, allowed are {_MAX_NAME_CHARACTERS}: shorten it"
            )


def _check_arrays(segment: Segment, vocabulary: int | None, where: str) -> None:
    length = len(segment.token_ids)
    if not length == len(segment.loss_mask) == len(segment.logprobs):
        raise Refusal(
            reasons.LENGTH_MISMATCH,
            f"{where}: {length} token ids, {len(segment.loss_mask)} mask values, {len(segment.logprobs)} log-probs",
        )
    if length and int(segment.token_ids.min()) < 0:
        raise Refusal(reasons.TOKEN_ID_NEGATIVE, f"{where}: token id {segment.token_ids.min()}")
    if length and vocabulary is not None and int(segment.token_ids.max()) >= vocabulary:
        raise Refusal(
            reasons.TOKEN_ID_UNKNOWN,
            f"{where}: token id {segment.token_ids.max()}, the learner's model knows {vocabulary}: use its tokenizer",
        )


def _check_spans(segment: Segment, learner_version: int, servers: int, where: str) -> None:
    length, end = len(segment.loss_mask), 0
    covered = np.zeros(length, dtype=np.bool_)
    for span in segment.version_spans:
        if not end <= span.start < span.end <= length:
            raise Refusal(reasons.SPAN_COVER, f"{where}: {span} overlaps, is empty or leaves the {length} tokens")
        if span.version < 0:
            raise Refusal(reasons.SPAN_VERSION_UNKNOWN, f"{where}: {span} has no version")
        if span.version > learner_version:
            raise Refusal(
                reasons.VERSION_FROM_FUTURE, f"{where}: {span} is newer than the learner, at version {learner_version}"
            )
        if not 0 <= span.server < servers:
            raise Refusal(
                reasons.SPAN_SERVER_UNKNOWN, f"{where}: {span} names server {span.server}, the group has {servers}"
            )
        covered[span.start : span.end] = True
        end = span.end
    if not np.array_equal(covered, segment.loss_mask):
        wrong = int(np.argmax(covered != segment.loss_mask))
        raise Refusal(reasons.SPAN_COVER, f"{where}: spans and loss_mask differ first at token {wrong}")


def _check_length(segment: Segment, max_tokens: int | None, where: str) -> None:
    end = segment.version_spans[-1].end if segment.version_spans else 0
    if max_tokens is not None and end > max_tokens:
        raise Refusal(
            reasons.SEGMENT_TOO_LONG,
            f"{where}: {end} tokens up to the last sampled one, the learner takes {max_tokens} (vllm.max_model_len or "
            f"learner.token_budget): start the worker with the learner's run file",
        )


def _check_experts(experts: RoutedExperts, length: int, where: str) -> None:
    end = 0
    for start, stop in experts.spans:
        if not end <= start < stop <= length:
            raise Refusal(
                reasons.EXPERTS_COVER,
                f"{where}: experts of tokens [{start}, {stop}) overlap, are of none or leave the {length} tokens",
            )
        end = stop
    tokens = sum(stop - start for start, stop in experts.spans)
    if tokens * experts.layers * experts.top_k != len(experts.ids):
        raise Refusal(
            reasons.EXPERTS_COVER,
            f"{where}: {len(experts.ids)} experts for {tokens} tokens, {experts.layers} layers and "
            f"{experts.top_k} choices in each",
        )


def _check_mask(segment: Segment, mask: SamplingMask, vocabulary: int | None, where: str) -> None:
    sampled = segment.token_ids[segment.loss_mask]
    counts = mask.counts.astype(np.int64)
    if len(counts) != len(sampled) or (counts < 1).any() or int(counts.sum()) != len(mask.ids):
        raise Refusal(
            reasons.MASK_COVER,
            f"{where}: a sampling mask of {len(mask.ids)} ids for {len(counts)} tokens, where each has one at least; "
            f"{len(sampled)} were sampled",
        )
    if not len(sampled):
        return
    if int(mask.ids.min()) < 0 or (vocabulary is not None and int(mask.ids.max()) >= vocabulary):
        raise Refusal(
            reasons.MASK_COVER,
            f"{where}: ids of a sampling mask are {mask.ids.min()} to {mask.ids.max()}, known are {vocabulary}",
        )
    found = np.add.reduceat(mask.ids == np.repeat(sampled, counts), np.cumsum(counts) - counts)
    if (found != 1).any():
        raise Refusal(reasons.MASK_COVER, f"{where}: a sampled token is not, or not once, in its sampling mask")


def _check_teacher_top(top: TeacherTop, tokens: int, vocabulary: int | None, where: str) -> None:
    _check_teacher(top.logprobs, tokens * top.k, where)
    if len(top.ids) != len(top.logprobs):
        raise Refusal(
            reasons.LENGTH_MISMATCH, f"{where}: {len(top.ids)} ids and {len(top.logprobs)} log-probs of the teacher"
        )
    if len(top.ids) and not 0 <= int(top.ids.min()) <= int(top.ids.max()) < (vocabulary or math.inf):
        raise Refusal(
            reasons.TOKEN_ID_UNKNOWN,
            f"{where}: ids of the teacher are {top.ids.min()} to {top.ids.max()}, known are {vocabulary}",
        )


def _check_teacher(teacher: npt.NDArray[np.float32], expected: int, where: str) -> None:
    if len(teacher) != expected:
        raise Refusal(
            reasons.LENGTH_MISMATCH, f"{where}: {len(teacher)} log-probs of the teacher, expected are {expected}"
        )
    if not np.isfinite(teacher).all():
        raise Refusal(reasons.LOGPROB_NOT_FINITE, f"{where}: a log-prob of the teacher is not finite")
    if (teacher > 0).any():
        raise Refusal(reasons.LOGPROB_POSITIVE, f"{where}: a log-prob of the teacher is {teacher.max()}, above 0")


def _check_logprobs(segment: Segment, where: str) -> None:
    sampled = segment.logprobs[segment.loss_mask]
    if missing := int(np.isnan(sampled).sum()):
        raise Refusal(reasons.LOGPROB_MISSING, f"{where}: {missing} sampled tokens without log-prob")
    if not np.isfinite(segment.logprobs).all():
        raise Refusal(reasons.LOGPROB_NOT_FINITE, f"{where}: a log-prob is infinite, or NaN outside the sampled tokens")
    if (sampled > 0).any():
        raise Refusal(reasons.LOGPROB_POSITIVE, f"{where}: a log-prob is {sampled.max()}, above 0")
