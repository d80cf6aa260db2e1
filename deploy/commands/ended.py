"""Reads a run that is over from its files: how it ended, and what `slipstream status` says of it then."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console, Group, RenderableType
from rich.text import Text

from slipstream.deploy.commands.arguments import print_json
from slipstream.deploy.commands.status import ago, render, render_causes
from slipstream.deploy.run.run_directory import LAUNCHER_LOCK, QUEUE_LOCK
from slipstream.learner.report.rollouts import printable
from slipstream.protocol import checkpoints, history
from slipstream.protocol.collapse import CAUSE, REMEDY
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.status import Cause, Status
from slipstream.rollout_queue.ledger.records import RunState
from slipstream.rollout_queue.store import base, open_for_reading

SUMMARY, METRICS = "summary.json", "metrics.jsonl"

# A run that wrote something so lately may only be starting again, seconds: its queue was started by hand, or it has no
# lock here.
_JUST_NOW_S, _ELSEWHERE_S = 30.0, 600.0

_TAIL_BYTES = 256 * 1024


class Summary(msgspec.Struct):
    """The part of `summary.json` that is read here. Earlier releases wrote less."""

    steps: int = 0
    reward_first10: float | None = None
    reward_last10: float | None = None
    reward_over: int = 10
    ended_at: float | None = None
    nothing_learnt: str | None = None
    diagnosis: list[Cause] = []


class EndedRun(msgspec.Struct):
    """A run that is over.

    Attributes:
        end: `finished` after its last step; `given_up` because its first groups all failed; else `stopped`.
        ended_at: When it was last heard of, seconds since 1970.
        step: The newest that it made. `checkpoint_step`: that of the newest checkpoint.
        diagnosis: What kept it from learning when it ended.
        summary: As `summary.json` has it; None unless it finished.
        status: The newest status that its queue wrote; None if there is none.
    """

    run: str
    end: Literal["finished", "given_up", "stopped"]
    ended_at: float
    step: int
    total_steps: int
    checkpoint_step: int | None
    diagnosis: list[Cause] = []
    summary: dict[str, Any] | None = None
    status: Status | None = None

    def describe(self, now: float) -> str:
        """Describe the end in one line. `now`: seconds since 1970."""
        when = ago(max(0.0, now - self.ended_at))
        if self.end == "given_up":
            return f"ended {when}: given up, since its first groups all failed"
        if self.end == "finished":
            ends = ""
            if self.summary is not None:
                of = msgspec.convert(self.summary, Summary)
                if of.reward_first10 is not None and of.reward_last10 is not None:
                    ends = f", reward {history.Ends(of.reward_first10, of.reward_last10, of.reward_over)}"
            return f"ended {when}: {self.step} of {self.total_steps} steps made{ends}"
        kept = "no checkpoint" if self.checkpoint_step is None else f"a checkpoint of step {self.checkpoint_step}"
        destroyed = any(cause.about == CAUSE for cause in self.diagnosis)
        resume = f"continue with --resume {REMEDY}" if destroyed else "continue with --resume"
        after = f"after step {self.step} of {self.total_steps}, with {kept}" if self.step else "before its first step"
        return f"stopped {when} {after}; " + (resume if self.step else "start it again")


def find(config: RunConfig, now: float) -> EndedRun | None:
    """Read how the run ended. Returns None if nothing of it is here, or if it may still be under way.

    Args:
        now: Seconds since 1970.
    """
    run_dir = config.run_dir
    locks = [path for path in (run_dir / LAUNCHER_LOCK, run_dir / QUEUE_LOCK) if path.exists()]
    if any(map(_is_held, locks)):
        return None
    newest = history.newest_status(run_dir / history.FOLDER)
    summary, summary_fields = _summary(run_dir / SUMMARY)
    status = newest[1] if newest is not None else None
    step, step_at = _newest_step(run_dir / METRICS), modified(run_dir / METRICS)
    heard = [at for at in (step_at, newest[0] if newest is not None else None, summary and summary.ended_at) if at]
    if not heard:
        return None
    try:
        stored = open_for_reading(config).run_state()
    except ConfigError:  # the files say enough
        stored = RunState()
    step = max(step, status.step if status is not None else 0)
    # A run that was resumed after its end has the summary of that end until the next.
    finished = stored.finished or (summary is not None and summary.steps >= max(1, step))
    gave_up = status is not None and status.gave_up is not None
    ended = EndedRun(
        run=config.run.name,
        end="finished" if finished else "given_up" if gave_up else "stopped",
        ended_at=max(heard),
        step=max(step, summary.steps) if summary is not None and finished else step,
        total_steps=stored.total_steps or (status.total_steps if status is not None else 0) or config.learner.steps,
        checkpoint_step=max(checkpoints.complete(run_dir), default=None),
        diagnosis=causes_at_end(run_dir, status),
        summary=summary_fields if finished else None,
        status=status,
    )
    # One that has no lock here may be under way elsewhere.
    launched = run_dir / LAUNCHER_LOCK in locks
    quiet_s = 0.0 if launched else _JUST_NOW_S if locks else _ELSEWHERE_S
    return None if ended.end == "stopped" and now - ended.ended_at < quiet_s else ended


def launcher_runs(run_dir: Path) -> bool:
    """Tell whether a launcher holds the directory, so that the run is starting, under way, or ending."""
    lock = run_dir / LAUNCHER_LOCK
    return lock.exists() and _is_held(lock)


def causes_at_end(run_dir: Path, status: Status | None) -> list[Cause]:
    """Return what kept a run from learning when it ended: by its summary, else by its newest `status`."""
    summary, _ = _summary(run_dir / SUMMARY)
    if summary is None or summary.steps < _newest_step(run_dir / METRICS):
        return status.diagnosis if status is not None else []
    if summary.nothing_learnt is None:
        return summary.diagnosis
    # It names the first cause.
    return [Cause("run", summary.nothing_learnt, "bad"), *summary.diagnosis[1:]]


def render_ended(ended: EndedRun, now: float) -> RenderableType:
    """Render the end, what kept the run from learning, and the newest status that its queue wrote."""
    head = Text.assemble((f"run {printable(ended.run)}", "bold"), f"  {ended.describe(now)}")
    parts: list[RenderableType] = [head]
    if ended.diagnosis:
        parts.append(render_causes(ended.diagnosis))
    if ended.status is not None:
        last = msgspec.structs.replace(ended.status, diagnosis=[])
        parts += [Text("as its queue last saw it:", style="dim"), render(last)]
    return Group(*parts)


def show(ended: EndedRun, as_json: bool) -> None:
    """Print it, as one line of JSON if `as_json`."""
    if as_json:
        print_json(ended)
    else:
        Console().print(render_ended(ended, time.time()))


def _is_held(lock: Path) -> bool:
    """Tell whether a launcher or a queue holds its lock."""
    try:
        return base.is_held(lock)
    except OSError:  # copied from elsewhere, and not to be written to: nobody runs on it here
        return False


def _summary(path: Path) -> tuple[Summary | None, dict[str, Any] | None]:
    try:
        body = path.read_bytes()
        return msgspec.json.decode(body, type=Summary), msgspec.json.decode(body, type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return None, None


def _newest_step(path: Path) -> int:
    """Return the step of the last whole line of `metrics.jsonl`; 0 if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines: Sequence[bytes] = file.read().split(b"\n")[:-1]
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return msgspec.json.decode(line, type=_Step).step
        except msgspec.DecodeError:
            continue
    return 0


class _Step(msgspec.Struct):
    step: int


def modified(path: Path) -> float | None:
    """Return when a file was written last, seconds since 1970; None if it is empty or not there."""
    try:
        return path.stat().st_mtime if path.stat().st_size else None
    except OSError:
        return None
