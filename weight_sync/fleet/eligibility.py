"""Decides from a server's answers whether this run may use it: by flags, owner and the weights that it holds (I5).

Every server is asked, whoever started it. Flags matter beyond the proof: that runs at temperature 1, where log-probs of
the wrong kind look right. `Eligibility` asks; everything else is pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Self

from slipstream.protocol.config import RunConfig
from slipstream.protocol.config.sections.sampling import keeps_mask, mask_logprobs
from slipstream.protocol.engine import EngineState, ServerFacts
from slipstream.protocol.versions import SERVED_MODEL_NAME, parse
from slipstream.weight_sync.server.answers import serves_another_run
from slipstream.weight_sync.server.control import LOOK_TIMEOUT_S, ServerControl
from slipstream.weight_sync.server.engine import ControlError
from slipstream.weight_sync.transports.registry import TRANSPORTS, backend

# The release whose routes and internals weight sync was built and tried with.
TRIED_VERSION = "0.32.0"
LOGPROBS_MODE = "processed_logprobs"


@dataclass(frozen=True)
class Wanted:
    """A run's requirements of its servers. A field is None if it is not known, as without a run file.

    Attributes:
        quantised: Whether the proof's tolerance allows for a server that rounds its weights.
        logprobs: How many log-probs of a token workers ask for; 0 for that of the sampled one.
        workers: Whether Slipstream's workers sample from it, and not only other programs.
    """

    dtype: str | None = None
    max_model_len: int | None = None
    transport: str = "auto"
    quantised: bool = True
    logprobs: int = 0
    workers: bool = True

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Read the requirements from a run file."""
        allows = config.weight_sync.probe_tolerance != "auto" or config.served_quantised
        rollout = config.rollout
        asked = mask_logprobs(rollout.top_k) if keeps_mask(rollout) else 0
        return cls(config.served_dtype, config.vllm.max_model_len, config.weight_sync.transport, allows, asked)


@dataclass(frozen=True)
class Mismatch:
    """One fault of a server, and the `flag` of vLLM's command line that fixes it."""

    what: str
    flag: str


def judge(facts: ServerFacts, wanted: Wanted) -> list[Mismatch]:
    """Find the flags of a server that keep the run from using it, or would make its data wrong."""
    transport, length, dtype = wanted.transport, wanted.max_model_len, wanted.dtype
    known = {backend(name) for name in TRANSPORTS} if transport == "auto" else {backend(transport)}
    found = {
        Mismatch("it generates no tokens from tokens", "--enable-scale-out"): wanted.workers and not facts.scale_out,
        Mismatch(
            f"its log-probs are {facts.logprobs_mode}, not those of the distribution that it samples from, which is "
            f"wrong at any temperature but 1",
            f"--logprobs-mode {LOGPROBS_MODE}",
        ): wanted.workers and facts.logprobs_mode not in (LOGPROBS_MODE, None),
        Mismatch(
            f"its dtype is {facts.dtype}, and model.dtype = {dtype}: its weights would never equal the learner's",
            f"--dtype {dtype}",
        ): dtype is not None and facts.dtype not in (dtype, None),
        Mismatch(
            f"its context is {facts.max_model_len} tokens, less than vllm.max_model_len = {length}: it would refuse "
            f"long episodes",
            f"--max-model-len {length}",
        ): length is not None and facts.max_model_len is not None and facts.max_model_len < length,
        Mismatch(
            f"it tells at most {facts.max_logprobs} log-probs of a token, and rollout.top_k needs {wanted.logprobs}: "
            f"it would refuse every request",
            f"--max-logprobs {wanted.logprobs}",
        ): facts.max_logprobs is not None and 0 <= facts.max_logprobs < wanted.logprobs,
        Mismatch(
            f"its weight transfer is {facts.transport or 'off'}, and weight_sync.transport = {transport}: it would "
            f"never get new weights",
            f'--weight-transfer-config \'{{"backend": "{backend("gloo" if transport == "auto" else transport)}"}}\'',
        ): facts.transport not in known,
        Mismatch(
            f"it is quantised ({facts.quantization}), so that its log-probs differ from the learner's by more than "
            f"weight_sync.probe_tolerance = auto allows: measure by how much, and set it, such as 1.0",
            "(without --quantization)",
        ): facts.quantization is not None and not wanted.quantised,
        Mismatch(
            f"it serves the model as {facts.served_name!r}, and requests name {SERVED_MODEL_NAME!r}",
            f"--served-model-name {SERVED_MODEL_NAME}",
        ): wanted.workers and facts.served_name not in (SERVED_MODEL_NAME, None),
    }
    return [mismatch for mismatch, holds in found.items() if holds]


def describe_mismatches(mismatches: Sequence[Mismatch]) -> str:
    """Join all mismatches, and the remedy, into one text."""
    return (
        f"{'; '.join(one.what for one in mismatches)}; start it with: slipstream vllm run.toml, or with: "
        f"{' '.join(one.flag for one in mismatches)}"
    )


def of_another_run(url: str, state: EngineState, run_id: str) -> str | None:
    """Return a text if the learner of another run controls the server at `url`; None if none does.

    Args:
        run_id: This run's id, "" before it is known.
    """
    if not run_id or state.owner in ("", run_id):
        return None
    return serves_another_run(url, state.owner, state.owner_silent_s)


def find_lost_weights(state: EngineState, boot: str | None, ours: Container[str] | None, run_id: str) -> str | None:
    """Return how the weights proven on a server were lost; None where the server may still hold them.

    Args:
        state: The server's answer just now.
        boot: Its boot at the last look, None before.
        ours: Labels that this learner may have put there, None before it has proven any.
        run_id: This run's id.
    """
    if boot is not None and state.boot != boot:
        return "it restarted"
    if ours is None or state.label in ours:
        return None
    label = parse(state.label)
    if label is not None and label.run and label.run != run_id:
        return f"taken over by run {label.run}: it holds version {label.version} of that one"
    return f"it holds weights {state.label!r}, which this learner did not publish"


@dataclass(frozen=True)
class Ineligible:
    """Why a run may not use a server. `cause` stays the same while `reason` only counts the seconds."""

    reason: str
    cause: str


class Eligibility:
    """Finds out whether the run may use one server. Each process of the server is asked for its flags once."""

    def __init__(self, control: ServerControl, wanted: Wanted) -> None:
        self._control = control
        self._wanted = wanted
        self._boot: str | None = None
        self._mismatches: str | None = None

    async def look(self, state: EngineState, claimed: str | None) -> Ineligible | None:
        """Return why the run may not use the server, None if it may.

        Args:
            state: The server's answer just now.
            claimed: Why the server process cannot have its name, None if it can.
        """
        foreign = of_another_run(self._control.url, state, self._control.run_id)
        reason = claimed or foreign or await self._find_mismatches(state.boot)
        return None if reason is None else Ineligible(reason, state.owner if reason is foreign else reason)

    async def _find_mismatches(self, boot: str) -> str | None:
        """Return why the flags of the process `boot` do not fit, and the remedy. One that does not say them is not
        used, and is asked again."""
        if boot == self._boot:
            return self._mismatches
        url = self._control.url
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                found = judge(await self._control.facts(), self._wanted)
        except (ControlError, TimeoutError) as error:
            why = str(error) or f"{url}/slipstream/facts: no answer within {LOOK_TIMEOUT_S:g} s"
            return f"it does not say with which flags it was started ({why}); start it with: slipstream vllm run.toml"
        self._boot, self._mismatches = boot, f"{url}: {describe_mismatches(found)}" if found else None
        return self._mismatches
