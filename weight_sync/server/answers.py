"""What a server answers at our routes."""

from __future__ import annotations

from dataclasses import dataclass

from protocol import access


def serves_another_run(server: str, run: str, silent_s: float) -> str:
    """Why a run may not use `server`: it is that of `run`, an id, whose learner called `silent_s` seconds ago."""
    return (
        f"{server} serves run {run}, whose learner looked {silent_s:.0f} s ago: one server serves one run; stop that "
        f"run, or give this one a server of its own"
    )


@dataclass(frozen=True)
class EngineState:
    """What a server says of itself at `/slipstream/state`.

    boot: another after each start. label: of the weights that serve, "" where the engine does not answer. whole: the
    live model is not half loaded. alive: the engine answered, not only the server in front of it. pause_owner: "none",
    "person" or "publication". reason: why it does not generate any more. owner: the id of the run whose learner
    controls it, "" without one; owner_silent_s: seconds since that one called.
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
    owner: str = ""
    owner_silent_s: float = 0.0


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


def hint(path: str, status: int, text: str) -> str:
    """What to do about a refusal, after its text; "" where that says it all."""
    if status == 403 and access.TOKEN_VARIABLE in text:
        return ""  # the guard's
    if status == 401:
        return "; set SLIPSTREAM_TOKEN to the server's"
    if status == 404:
        return "; the server needs VLLM_SERVER_DEV_MODE=1: start it with slipstream vllm run.toml"
    if status == 403 and path.startswith("/inference"):
        return "; the server needs --enable-scale-out: start it with slipstream vllm run.toml"
    return ""
