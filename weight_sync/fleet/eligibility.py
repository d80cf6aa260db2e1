"""Whether a vLLM server is one that a run can use: its flags, as it says them itself. Pure: who asks is elsewhere.

The probe of weight sync runs at temperature 1, so it is blind to log-probs of the wrong kind.

Whether a server was started with flags that the run can use: asked of every server, whoever started it.

Whose weights a server holds, by what it says of itself, and whether they are still what was proven there (I5).

Pure decisions. `run_id`: of this learner's run, "" before it is known.

Why this run may not use a server that answers: another name or another run has it, or its flags do not fit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Self

from protocol.config import RunConfig
from protocol.versions import SERVED_MODEL_NAME, parse
from weight_sync.server.answers import EngineState, ServerFacts, serves_another_run
from weight_sync.server.control import LOOK_TIMEOUT_S, ControlError, ServerControl
from weight_sync.transports.registry import TRANSPORTS, backend

# The release whose routes and internals weight sync was built and tried with.
TRIED_VERSION = "0.32.0"

LOGPROBS_MODE = "processed_logprobs"


@dataclass(frozen=True)
class Wanted:
    """What a run wants of its servers; None: it is not known, as where there is no run file. quantised: whether its
    probe allows for a server that rounds its weights."""

    dtype: str | None = None
    max_model_len: int | None = None
    transport: str = "auto"
    quantised: bool = True

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        allows = config.weight_sync.probe_tolerance != "auto" or config.served_quantised
        return cls(config.served_dtype, config.vllm.max_model_len, config.weight_sync.transport, allows)


@dataclass(frozen=True)
class Mismatch:
    """`what` is wrong, and the `flag` of vLLM's command line that mends it."""

    what: str
    flag: str


def judge(facts: ServerFacts, wanted: Wanted) -> list[Mismatch]:
    """What keeps a run from using the server, or would make its data wrong."""
    transport, length, dtype = wanted.transport, wanted.max_model_len, wanted.dtype
    known = {backend(name) for name in TRANSPORTS} if transport == "auto" else {backend(transport)}
    faults = {
        Mismatch("it generates no tokens from tokens", "--enable-scale-out"): not facts.scale_out,
        Mismatch(
            f"its log-probs are {facts.logprobs_mode}, not those of the distribution that it samples from, which is "
            f"wrong at any temperature but 1",
            f"--logprobs-mode {LOGPROBS_MODE}",
        ): facts.logprobs_mode not in (LOGPROBS_MODE, None),
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
        ): facts.served_name not in (SERVED_MODEL_NAME, None),
    }
    return [fault for fault, holds in faults.items() if holds]


def describe_mismatches(faults: Sequence[Mismatch]) -> str:
    """All of them, and the remedy."""
    return (
        f"{'; '.join(fault.what for fault in faults)}; start it with: slipstream vllm run.toml, or with: "
        f"{' '.join(fault.flag for fault in faults)}"
    )


class Suitability:
    """Of one server; each of its processes is asked once."""

    def __init__(self, control: ServerControl, wanted: Wanted) -> None:
        self._control = control
        self._wanted = wanted
        self._boot: str | None = None
        self._fault: str | None = None

    async def fault(self, boot: str) -> str | None:
        """Why the run cannot use the process of this `boot`, and the remedy; None: it can. One that does not say its
        flags is not used, and asked again."""
        if boot == self._boot:
            return self._fault
        url = self._control.url
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                faults = judge(await self._control.facts(), self._wanted)
        except (ControlError, TimeoutError) as error:
            why = str(error) or f"{url}/slipstream/facts: no answer within {LOOK_TIMEOUT_S:g} s"
            return f"it does not say with which flags it was started ({why}); start it with: slipstream vllm run.toml"
        self._boot, self._fault = boot, f"{url}: {describe_mismatches(faults)}" if faults else None
        return self._fault


def of_another_run(url: str, state: EngineState, run_id: str) -> str | None:
    """Why the server at `url` is not this run's to use: another's learner controls it. None: none does."""
    if not run_id or state.owner in ("", run_id):
        return None
    return serves_another_run(url, state.owner, state.owner_silent_s)


def what_became(state: EngineState, boot: str | None, ours: Container[str] | None, run_id: str) -> str | None:
    """What became of the weights that were proven there; None where the server may hold them. boot: of the last look,
    None before it; ours: labels that this learner may have put there, None before it has proven any."""
    if boot is not None and state.boot != boot:
        return "it restarted"
    if ours is None or state.label in ours:
        return None
    label = parse(state.label)
    if label is not None and label.run and label.run != run_id:
        return f"taken over by run {label.run}: it holds version {label.version} of that one"
    return f"it holds weights {state.label!r}, which this learner did not publish"


class Eligibility:
    """Of one server. `reason`: as of the last look, None where the run may use it; `is_news`: whether it is another one
    than at the look before."""

    def __init__(self, control: ServerControl, wanted: Wanted) -> None:
        self.reason: str | None = None
        self.is_news = False
        self._control = control
        self._suitability = Suitability(control, wanted)
        self._by: str | None = None

    async def look(self, state: EngineState, claimed: str | None) -> str | None:
        """The reason. claimed: why the server process cannot have its name, None if it can."""
        foreign = of_another_run(self._control.url, state, self._control.run_id)
        self.reason = claimed or foreign or await self._suitability.fault(state.boot)
        before = self._by
        # The text on another run says how long ago its learner looked, which is no news.
        self._by = state.owner if self.reason is not None and self.reason is foreign else self.reason
        self.is_news = self._by != before
        return self.reason
