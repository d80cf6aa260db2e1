"""Whose weights a server holds, by what it says of itself, and whether they are still what was proven there (I5).

Pure decisions. `run_id`: of this learner's run, "" before it is known.
"""

from __future__ import annotations

from collections.abc import Container

from protocol.versions import parse
from weight_sync.server.answers import EngineState, serves_another_run


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
