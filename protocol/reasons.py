"""Defines every reason code: for refusals, rejections, drops, masks and failures.

Codes are stable: metrics use them as labels, counters as keys, and clients branch on them. Each stands only here.
"""

from __future__ import annotations

# Why the queue refuses a request.
STORE_FAILED = "store_failed"
NOT_READY = "not_ready"
STANDS_BY = "stands_by"
UNAUTHORIZED = "unauthorized"
WRONG_ROLE = "wrong_role"
UNDECODABLE = "decode"
TOO_LARGE = "too_large"
MAX_TICKETS = "max_tickets"
WORKER_MISMATCH = "worker_mismatch"
SERVER_MISMATCH = "server_mismatch"
TICKET_UNKNOWN = "ticket_unknown"
TICKET_ENDED = "ticket_ended"
FULL = "full"
BUSY = "busy"
RUN_FINISHED = "run_finished"
RUN_EXISTS = "run_exists"
SESSION_SUPERSEDED = "session_superseded"
LEASE_LAPSED = "lease_lapsed"
NOT_LEASED = "not_leased"
ACK_AMBIGUOUS = "ack_ambiguous"
STEP_MISSING = "step_missing"
STEP_UNKNOWN = "step_unknown"
VERSION_CONFLICT = "version_conflict"
VERSION_MISSING = "version_missing"
OUT_OF_RANGE = "out_of_range"
SERVER_UNKNOWN = "server_unknown"
TRANSITION_FORBIDDEN = "transition_forbidden"
FINGERPRINT = "fingerprint"
UNREGISTERED = "unregistered"
SESSION_AWAITED = "session_awaited"
GAVE_UP = "gave_up"
ORIGIN = "origin"
EVALUATIONS_OPEN = "evaluations_open"

# Why the queue rejects a submitted group; also UNDECODABLE and TOO_LARGE.
SCHEMA_VERSION = "schema_version"
BAD_IMAGE = "bad_image"
TICKET_MISMATCH = "ticket_mismatch"
GROUP_SIZE = "group_size"
NO_SAMPLED_TOKENS = "no_sampled_tokens"
REWARD_NOT_FINITE = "reward_not_finite"
METRIC_NOT_FINITE = "metric_not_finite"
LENGTH_MISMATCH = "length_mismatch"
TOKEN_ID_NEGATIVE = "token_id_negative"
TOKEN_ID_UNKNOWN = "token_id_unknown"
TOO_DEEP = "too_deep"
TOO_MANY = "too_many"
LOGPROB_MISSING = "logprob_missing"
LOGPROB_NOT_FINITE = "logprob_not_finite"
LOGPROB_POSITIVE = "logprob_positive"
SPAN_COVER = "span_cover"
EXPERTS_COVER = "experts_cover"
MASK_COVER = "mask_cover"
SPAN_VERSION_UNKNOWN = "span_version_unknown"
SPAN_SERVER_UNKNOWN = "span_server_unknown"
VERSION_FROM_FUTURE = "version_from_future"
UNVERIFIED_SERVER = "unverified_server"

# Why a ticket ends untrained or is issued again; also RUN_FINISHED, and what `failed` and `rejected` return.
EXPIRED = "expired"
DAMAGED = "damaged"
OUTLIVED = "outlived"
ROLLED_BACK = "rolled_back"
OVERAGE = "overage"
ZERO_VARIANCE = "zero_variance"
NO_TOKENS = "no_tokens"
NO_TEACHER = "no_teacher"
SEGMENT_TOO_LONG = "segment_too_long"
STEP_NOT_FINITE = "step_not_finite"
OUT_OF_MEMORY = "out_of_memory"
OTHER = "other"
DEADLINE = "deadline"

# Why a sampled token does not train; also OVERAGE.
NO_CONTEXT = "no_context"
TRUNCATED = "truncated"

# Why a tool call fails; also TIMEOUT.
TOOL_MALFORMED = "malformed_call"
TOOL_UNKNOWN = "unknown_tool"
TOOL_ARGUMENTS = "bad_arguments"
TOOL_RAISED = "raised"

# Why an episode or a ticket failed at the worker.
ROW = "row"
PROMPT = "prompt"
REWARD = "reward"
NO_REWARD = "no_reward"
REWARD_RETRIED = "reward_retried"
ENVIRONMENT = "environment"
AGENT = "agent"
NO_TURN = "no_turn"
ROLE_ALONE = "role_alone"
TEACHER = "teacher"
TIMEOUT = "timeout"
SERVER = "server"
REQUEST_REJECTED = "rejected"
INTERNAL = "internal"
LOST = "lost"
WORKER_STOPPED = "worker_stopped"
TICKET_KIND = "ticket_kind"

# Why an answer of a server cannot be trained on.
UNREADABLE = "unreadable"
FINISH_REASON = "finish_reason"
MISSING_LOGPROBS = "missing_logprobs"
BAD_LOGPROBS = "bad_logprobs"
MISSING_VERSIONS = "missing_versions"
BAD_VERSIONS = "bad_versions"
BAD_EXPERTS = "bad_experts"
BAD_MASK = "bad_mask"


_ours = frozenset(value for name, value in globals().items() if name.isupper())


def is_ours(reason: str) -> bool:
    """Tell whether a reason is made of these codes, not one that a client made up."""
    return reason.removeprefix(failed("")).removeprefix(rejected("")) in _ours


def failed(reason: str) -> str:
    """Return the reason of a ticket that a worker gave back for `reason`."""
    return f"failed:{reason}"


def rejected(reason: str) -> str:
    """Return the reason of a ticket whose group was rejected for `reason`."""
    return f"rejected:{reason}"


def refused(reason: str) -> str:
    """Return the name of a worker's count of groups that the queue refused for `reason`."""
    return f"refused:{reason}"


def http(status: int) -> str:
    """Return the reason of an HTTP error without a code of ours, such as an unknown route."""
    return f"http_{status}"
