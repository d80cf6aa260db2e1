"""The port through which workers sample: what they ask of an inference engine, and what it answers.

`client.InferenceClient` implements it for servers over HTTP. Nothing else in a worker knows the names of their fields.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from slipstream.protocol.config.sections import RolloutSection
from slipstream.protocol.config.sections.sampling import StructuredOutputs
from slipstream.protocol.messages import Server
from slipstream.rollout_worker.inference.experts import RecordedExperts
from slipstream.rollout_worker.vision.messages import Placed


@dataclass(frozen=True, slots=True)
class OwnParams:
    """Sampling parameters of one episode or turn.

    Attributes:
        temperature: In place of the run's; None for the run's.
        stop: Texts that end the turn besides the run's. They stay in the turn.
        form: What the turn is held to, in place of the run's.
    """

    temperature: float | None = None
    stop: Sequence[str] = ()
    form: StructuredOutputs | None = None


AS_THE_RUN = OwnParams()

# Fields of `rollout.generation_kwargs` that look at the tokens of a turn so far, or may: `extra_args` are for logits
# processors of the server's own.
_LOOK_BACK = ("structured_outputs", "thinking_token_budget", "bad_words", "repetition_detection", "extra_args")


def looks_back(rollout: RolloutSection, own: OwnParams) -> bool:
    """Return whether sampling depends on the tokens of the turn so far in other ways than by the policy.

    Such a turn cannot continue in a second request, which takes them for a part of the prompt: a grammar would restart,
    and a stop text over the seam would not be seen.
    """
    of_run = rollout.generation_kwargs
    return bool(
        own.form is not None
        or own.stop
        or rollout.stop
        or rollout.presence_penalty
        or rollout.frequency_penalty
        or any(of_run.get(name) for name in _LOOK_BACK)
    )


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A request for `n` continuations of one prompt.

    Attributes:
        id: By which `Engine.abort` knows it.
        token_ids: The prompt.
        max_tokens: Maximum tokens of each continuation.
        rollout: The run's sampling settings.
        stop_token_ids: Ids that end a turn.
        cache: Keeps keys and values of this run apart from others' on the server.
        n: Number of continuations.
        stream: Whether each continuation is yielded as soon as it is finished, not all at the end.
        own: Parameters in place of the run's.
        experts_from: First token of the prompt whose experts are wanted; None without `learner.router_replay`.
        images: Images in the prompt.
        exact: Whether each continuation has `max_tokens` tokens, whatever is sampled.
        begun: Tokens at the end of the prompt that an earlier request sampled for the same turn.
    """

    id: str
    token_ids: list[int]
    max_tokens: int
    rollout: RolloutSection
    stop_token_ids: list[int]
    cache: str
    n: int = 1
    stream: bool = False
    own: OwnParams = AS_THE_RUN
    experts_from: int | None = None
    images: Sequence[Placed] = ()
    exact: bool = False
    begun: int = 0


class SampledSpan(NamedTuple):
    """Tokens `[start, end)` were sampled by policy `version` on the server of this name."""

    version: int
    start: int
    end: int
    server: str

    def moved(self, by: int) -> SampledSpan:
        return SampledSpan(self.version, self.start + by, self.end + by, self.server)


@dataclass(slots=True)
class Masks:
    """Candidate ids of each sampled token: one flat array, and a count per token. As arrays they take 4 bytes an id,
    where a list would take 36."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    counts: array[int] = field(default_factory=lambda: array("H"))

    def add(self, ids: Sequence[int]) -> None:
        """Append a token's."""
        self.ids.extend(ids)
        self.counts.append(len(ids))

    def extend(self, other: Masks) -> None:
        self.ids.extend(other.ids)
        self.counts.extend(other.counts)


@dataclass(slots=True)
class Sampled:
    """Sampled tokens.

    Attributes:
        token_ids: int `[n]`.
        logprobs: float `[n]`, one per token.
        spans: Cover `[0, n)`.
        finish_reason: stop, length, or abort where the server aborted the request and the turn continues.
        experts: What servers recorded of the segment's tokens so far, in order.
        masks: What each token was sampled from; empty if that was not asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[SampledSpan] = field(default_factory=list)
    finish_reason: str = "abort"
    experts: list[RecordedExperts] = field(default_factory=list)
    masks: Masks = field(default_factory=Masks)

    def extend(self, other: Sampled) -> None:
        """Append tokens that were sampled after these."""
        start = len(self.token_ids)
        for span in other.spans:
            last = self.spans[-1] if self.spans else None
            if last is not None and (last.version, last.server) == (span.version, span.server):
                self.spans[-1] = last._replace(end=span.end + start)
            else:
                self.spans.append(span.moved(start))
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.finish_reason = other.finish_reason
        self.experts += other.experts
        self.masks.extend(other.masks)


class Known(NamedTuple):
    """What the registry says when an answer is checked.

    Attributes:
        run_id: Id of this run; tokens of another run are refused.
        newest_version: The newest version that the registry has named for any server.
    """

    run_id: str
    newest_version: int


class Continuation(Protocol):
    """A finished continuation as the engine answered it, not checked yet. `index`: its place among the request's."""

    @property
    def index(self) -> int: ...

    @property
    def token_ids(self) -> list[int]: ...

    def checked(self, known: Known) -> Sampled:
        """Return the tokens with their log-probs and versions.

        Raises:
            BadSample: They cannot be trained on.
            UnknownWeights: Some were sampled from weights that are no version of this run.
        """


class Engine(Protocol):
    """Samples tokens on servers."""

    def generate(self, server: Server, request: TurnRequest) -> AsyncGenerator[Continuation, None]:
        """Yield the continuations: each as soon as it is finished if `request.stream` is set, else all at the end.

        Raises:
            RequestRejected: The server refuses the request.
            ServerFailed: The server fails or does not answer.
            BadSample: The answer cannot be decoded.
            UnknownWeights: The server has lost its weights.
        """

    async def abort(self, url: str, request_ids: Sequence[str]) -> None:
        """Abort requests on the server at `url`: each answers with its tokens so far. Unknown ids are no error.

        Raises:
            ServerFailed, RequestRejected: The server does not abort them.
        """
