"""The rules that a group must keep, each with a reason code.

Nothing is filled in or repaired: a group that breaks a rule is rejected whole (F17).
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from protocol import codec, reasons
from protocol.messages import MAX_METRIC, SCHEMA_VERSION, Group, Rollout, Segment
from rollout_queue.ledger.records import EvalRow, GroupFacts, Refusal, TicketRecord

# A rollout of 1,024 segments, an answer in each, with all figures and notes that are allowed has some 26,000 values;
# one of a thousand turns in one segment some 6,000. Twenty of the largest fit into a group. Whatever a body's size, at
# the bound notes take some 30 MB to decode, and empty lists some 10 MB.
_ITEMS_OF_A_ROLLOUT = 2**15
_MAX_ITEMS = 2**19
# In a real group every fourth or fifth value is a list or map. Each empty one costs several times what a number does.
_ITEMS_OF_A_CONTAINER = 4
_DEEPEST = 32
_MAX_SERVERS = 1024
_MAX_SEGMENTS = 1024
_MAX_FIGURES = 256
_NAME_CHARACTERS = 256
_MAX_NOTES = 256
_NOTE_CHARACTERS = 4096


class _Stamp(msgspec.Struct):
    schema_version: int = SCHEMA_VERSION


class Rules(msgspec.Struct, frozen=True):
    """What a run allows. `group_size`: the ticket's; `learner_version`: no token is newer; `vocabulary`: ids are below
    it, None where it is unknown; `longest`: tokens of a segment up to its last sampled one, which are all that is
    trained on; `fewest`: rollouts of a group, since an advantage compares some."""

    group_size: int
    learner_version: int
    vocabulary: int | None = None
    longest: int | None = None
    fewest: int = 2


class Arrival(msgspec.Struct, frozen=True):
    """A valid group and what the ledger keeps of it."""

    group: Group
    facts: GroupFacts


def read(body: bytes, ticket: TicketRecord | EvalRow, rules: Rules) -> Arrival:
    """The group in a request's body; refused for the first rule that it breaks."""
    group = decode(body, rules.group_size)
    check(group, ticket, rules)
    return Arrival(group, GroupFacts.of(group, len(body)))


def decode(body: bytes, group_size: int) -> Group:
    """The group in a request's body; refused if it is not one (TOO_DEEP, TOO_MANY, SCHEMA_VERSION, UNDECODABLE).

    What passes here, the learner can decode: how deep a decoder gets depends on who calls it.
    """
    most = min(_MAX_ITEMS, _ITEMS_OF_A_ROLLOUT * group_size)
    try:
        shape = codec.shape(body, codec.Shape(most, most // _ITEMS_OF_A_CONTAINER, _DEEPEST))
        if shape.depth > _DEEPEST:
            raise Refusal(reasons.TOO_DEEP, f"the group nests deeper than the {_DEEPEST} levels that are allowed")
        if shape.items > most or shape.containers > most // _ITEMS_OF_A_CONTAINER:
            raise Refusal(
                reasons.TOO_MANY,
                f"the group holds more than the {most} values that are allowed, or more than "
                f"{most // _ITEMS_OF_A_CONTAINER} lists and maps: let its episodes have fewer segments, turns or notes",
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


def check(group: Group, ticket: TicketRecord | EvalRow, rules: Rules) -> None:
    """Refuses a group for the first rule that it breaks."""
    if (group.ticket_id, group.index) != (ticket.id, ticket.index) or group.epoch < 0:
        raise Refusal(
            reasons.TICKET_MISMATCH,
            f"ticket {ticket.id} is for row {ticket.index}, the group names ticket {group.ticket_id}, row "
            f"{group.index}, epoch {group.epoch}",
        )
    if not rules.fewest <= len(group.rollouts) <= rules.group_size:
        raise Refusal(
            reasons.GROUP_SIZE, f"{len(group.rollouts)} rollouts, allowed are {rules.fewest} to {rules.group_size}"
        )
    _check_count(len(group.server_names), _MAX_SERVERS, "servers", "the group")
    _check_names(("worker_id", group.worker_id), *(("a server's name", name) for name in group.server_names))
    _check_count(len(group.reward_weights), _MAX_FIGURES, "reward weights", "the group")
    _check_names(*(("a reward weight's name", name) for name in group.reward_weights))
    for name, weight in group.reward_weights.items():
        if wrong := _wrong_figure(weight):
            raise Refusal(reasons.REWARD_NOT_FINITE, f"the weight of reward {name} {wrong}")
    if group.worker_id != ticket.worker_id:
        raise Refusal(
            reasons.WORKER_MISMATCH, f"ticket {ticket.id} is worker {ticket.worker_id}'s, the group {group.worker_id}'s"
        )
    for number, rollout in enumerate(group.rollouts):
        where = f"rollout {number}"
        _check_count(len(rollout.segments), _MAX_SEGMENTS, "segments", where)
        _check_figures(rollout, where)
        for position, segment in enumerate(rollout.segments):
            place = f"{where}, segment {position}"
            _check_arrays(segment, rules.vocabulary, place)
            _check_spans(segment, rules.learner_version, len(group.server_names), place)
            _check_length(segment, rules.longest, place)
            _check_logprobs(segment, place)
    if group.sampled_tokens == 0:
        raise Refusal(reasons.NO_SAMPLED_TOKENS, "no rollout holds a sampled token")


def _check_figures(rollout: Rollout, where: str) -> None:
    for name, value in (("reward", rollout.reward), *rollout.reward_components.items()):
        if value is not None and (wrong := _wrong_figure(value)):
            raise Refusal(reasons.REWARD_NOT_FINITE, f"{where}: {name} {wrong}")
    for figures in (rollout.reward_components, rollout.metrics, rollout.timings):
        _check_count(len(figures), _MAX_FIGURES, "figures of one kind", where)
        _check_names(*((f"{where}: a figure's name", name) for name in figures))
    _check_count(len(rollout.extra), _MAX_NOTES, "notes", where)
    _check_names(*((f"{where}: a note's name", name) for name in rollout.extra))
    for name, text in rollout.extra.items():
        if len(text) > _NOTE_CHARACTERS:
            raise Refusal(
                reasons.TOO_LARGE,
                f"{where}: note {name} has {len(text)} characters, allowed are {_NOTE_CHARACTERS}: shorten it",
            )
    for name, value in (*rollout.metrics.items(), *rollout.timings.items()):
        if wrong := _wrong_figure(value):
            raise Refusal(reasons.METRIC_NOT_FINITE, f"{where}: metric {name} {wrong}")


def _wrong_figure(value: float) -> str | None:
    if not math.isfinite(value):
        return f"is {value}"
    return f"is {value}, beyond {MAX_METRIC:g}: scale it down" if abs(value) > MAX_METRIC else None


def _check_count(count: int, most: int, what: str, where: str) -> None:
    if count > most:
        raise Refusal(reasons.TOO_MANY, f"{where}: {count} {what}, allowed are {most}")


def _check_names(*names: tuple[str, str]) -> None:
    for what, name in names:
        if len(name) > _NAME_CHARACTERS:
            raise Refusal(
                reasons.TOO_LARGE, f"{what} has {len(name)} characters, allowed are {_NAME_CHARACTERS}: shorten it"
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


def _check_length(segment: Segment, longest: int | None, where: str) -> None:
    end = segment.version_spans[-1].end if segment.version_spans else 0
    if longest is not None and end > longest:
        raise Refusal(
            reasons.SEGMENT_TOO_LONG,
            f"{where}: {end} tokens up to the last sampled one, the learner takes {longest} (vllm.max_model_len or "
            f"learner.token_budget): start the worker with the learner's run file",
        )


def _check_logprobs(segment: Segment, where: str) -> None:
    sampled = segment.logprobs[segment.loss_mask]
    if missing := int(np.isnan(sampled).sum()):
        raise Refusal(reasons.LOGPROB_MISSING, f"{where}: {missing} sampled tokens without log-prob")
    if not np.isfinite(segment.logprobs).all():
        raise Refusal(reasons.LOGPROB_NOT_FINITE, f"{where}: a log-prob is infinite, or NaN outside the sampled tokens")
    if (sampled > 0).any():
        raise Refusal(reasons.LOGPROB_POSITIVE, f"{where}: a log-prob is {sampled.max()}, above 0")
