"""Answers of an inference server to the publisher and to workers, at the routes that Slipstream adds to it.

The server builds them, and `parse` reads them. They travel as JSON. A field with a default may be missing, as from an
older server.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from slipstream.protocol.codec import DecodeError

M = TypeVar("M", bound=msgspec.Struct)

# `EngineState.reason` of a server whose engine may only be in a long step, and the two that its processes show it by.
NO_ANSWER = "the engine does not answer"
COMPUTES = f"{NO_ANSWER}, and its processes compute"
STOPPED = f"{NO_ANSWER}: one of its processes is stopped (SIGSTOP)"
MAY_ANSWER = (NO_ANSWER, COMPUTES, STOPPED)

# Names a publication as the owner of a pause.
OWNER = "publication"


class EngineState(msgspec.Struct, frozen=True):
    """State of a server.

    Attributes:
        boot: Id of this start of the engine; another text after each start.
        label: Label of the weights that serve, "" if the engine does not answer.
        paused: Whether generation stands still.
        whole: Whether the live model is loaded whole.
        alive: Whether the engine answered, not only the API process in front of it.
        pause_owner: "none", "person" or "publication".
        workers: Number of the server's workers, over all kinds of parallelism.
        transport: The server's name of its weight transfer, "none" without one.
        reason: Why it will not generate again, None while it may.
        owner: Id of the run whose learner controls it, "" without one.
        owner_silent_s: Seconds since that learner called.
        stuck: Why it generates nothing now though nobody who may has paused it, None where it may generate.
        step_s: Seconds of the engine's longest step lately, as of its newest answer to the API process.
        generated: Tokens that it has sampled since its start.
    """

    boot: str
    label: str
    paused: bool
    whole: bool
    alive: bool
    pause_owner: Literal["none", "person", "publication"]
    workers: int
    transport: str
    reason: str | None = None
    owner: str = ""
    owner_silent_s: float = 0.0
    stuck: str | None = None
    step_s: float = 0.0
    generated: int = 0


class ServerFacts(msgspec.Struct, frozen=True):
    """The flags of a server that decide whether a run can use it. A field is None if it is not known.

    Attributes:
        version: The engine's release.
        served_name: Name of the model that requests must use.
        logprobs_mode: Which log-probs it answers, such as "processed_logprobs".
        dtype: Type that it computes in, such as "bfloat16", without "torch.".
        max_model_len: Longest sequence, in tokens.
        transport: The server's name of its weight transfer.
        scale_out: Whether it generates from token ids.
        quantization: Name of the method, None without one.
        engines: Number of data-parallel engines.
        max_logprobs: How many log-probs of a token it tells at most; -1 for any number.
    """

    version: str | None = None
    served_name: str | None = None
    logprobs_mode: str | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    transport: str | None = None
    scale_out: bool = False
    quantization: str | None = None
    engines: int | None = 1
    max_logprobs: int | None = None


class Staged(msgspec.Struct, frozen=True):
    """Progress of an update on the slowest worker.

    Attributes:
        stage: The stage that this worker is in.
        error: Why it failed.
        seconds: Seconds that each finished stage took.
    """

    stage: Literal["failed", "receiving", "building", "ready"]
    error: str | None
    seconds: dict[str, float]


class Swap(msgspec.Struct, frozen=True):
    """Times of a swap: `pause_s` seconds without generation, of which `exchange_s` changed the model."""

    pause_s: float
    exchange_s: float


class Dropped(msgspec.Struct, frozen=True):
    """Whether an open update was dropped; there may have been none."""

    dropped: bool


class Lease(msgspec.Struct, frozen=True):
    """A pause that `owner` holds for `seconds` at least."""

    owner: str
    seconds: float


class Scores(msgspec.Struct, frozen=True):
    """Log-probs in nats at temperature 1: by engine and sequence, T-1 values of each sequence [T]."""

    engines: list[list[list[float]]]


class LayerFindings(msgspec.Struct, frozen=True):
    """Comparison of the live layers with the weights that arrived.

    Attributes:
        checked: Number of tensors compared.
        wrong: Names of the tensors that differ.
        unread: Names of the layers whose content cannot be read.
    """

    checked: int
    wrong: list[str]
    unread: list[str] = []


class AdaptersState(msgspec.Struct, frozen=True):
    """Adapters of a server.

    Attributes:
        enabled: Whether it takes adapters.
        max_rank: Highest rank that it takes.
        served: Name of the adapter that requests are told to ask for; None before the first.
        loaded: Names of the loaded ones.
    """

    enabled: bool
    max_rank: int = 0
    served: str | None = None
    loaded: list[str] = []


class AdapterReceived(msgspec.Struct, frozen=True):
    """Number of bytes of an adapter's file that have arrived."""

    received: int


class AdapterLoaded(msgspec.Struct, frozen=True):
    """Seconds that loading an adapter took, 0 where it was loaded already."""

    load_s: float


class AdapterServed(msgspec.Struct, frozen=True):
    """Number of old adapters whose files were removed when another one began to serve."""

    removed: int


class Done(msgspec.Struct, frozen=True):
    """The request was carried out, and there is nothing to say about it."""


def parse(kind: type[M], answer: Any) -> M:
    """Read a server's answer, decoded from JSON. Raises `DecodeError`, which quotes the answer."""
    try:
        return msgspec.convert(answer, kind)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise DecodeError(f"the answer {answer!r:.200} is no {kind.__name__}: {error}") from error


def to_json(answer: msgspec.Struct) -> dict[str, Any]:
    """Return an answer as what `json.dumps` takes."""
    encoded: dict[str, Any] = msgspec.to_builtins(answer)
    return encoded
