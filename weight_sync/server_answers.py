"""What a server answers at our routes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineState:
    """What a server says of itself at `/slipstream/state`.

    boot: another after each start. label: of the weights that serve, "" where the engine does not answer. whole: the
    live model is not half loaded. alive: the engine answered, not only the server in front of it. pause_owner: "none",
    "person" or "publication". reason: why it does not generate any more.
    """

    boot: str
    label: str
    paused: bool
    whole: bool
    alive: bool
    pause_owner: str
    workers: int
    transport: str
    reason: str | None = None


@dataclass(frozen=True)
class Staged:
    """stage: "receiving", "building", "ready" or "failed", of the slowest worker; `seconds` by stage."""

    stage: str
    error: str | None
    seconds: dict[str, float]


@dataclass(frozen=True)
class Swap:
    """Seconds: `pause_s` without generation, of which `exchange_s` changed the model."""

    pause_s: float
    exchange_s: float
