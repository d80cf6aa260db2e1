"""`slipstream demos`: writes the good rollouts of a run as conversations to learn from.

The record of a run (`queue.record`) has every rollout that was trained; without one, `rollouts.jsonl` has some of each
step. Conversations are taken as the worker kept them, so those of which a part was left out are counted and skipped.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.deploy.commands.report import run_dir_of
from slipstream.protocol.config import ConfigError
from slipstream.protocol.rollouts import CUT, FILE_NAME, TURN_REWARD, read_messages
from slipstream.protocol.trained_record import RECORD_FOLDER, RecordError, read_record

# Rollouts that the policy has ended itself.
_ENDED = ("stop", "turn_limit")

CUT_SHORT, UNENDED, NOT_KEPT, IMAGES, TEXT, CONTINUED = (
    "not kept whole",
    "ran out of tokens or time",
    "without messages (worker.keep_messages = false)",
    "with images",
    "with a prompt of text",
    "with an answer that the prompt begins",
)


@dataclass(frozen=True, slots=True)
class Kept:
    """A rollout as the run kept it."""

    reward: float
    finish_reason: str
    turns: int
    messages: list[dict[str, Any]] | None


def demos(
    from_run: Annotated[Path, typer.Option("--from-run", metavar="RUN", help="the run's directory, or its run file")],
    min_reward: Annotated[float, typer.Option(help="lowest reward of a rollout")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="file to write")] = Path("demos.jsonl"),
) -> None:
    """Write the good rollouts of a run as a file for `slipstream sft`."""
    if math.isnan(min_reward):
        raise ConfigError("--min-reward nan: every reward would pass; give a number")
    if out.exists():
        raise ConfigError(f"--out {out}: there is such a file already; choose another, or delete it")
    run_dir = run_dir_of(from_run)
    skipped: Counter[str] = Counter()
    lines: dict[str, None] = {}
    best, looked_at = None, 0
    for rollout in kept(run_dir):
        looked_at += 1
        best = rollout.reward if best is None else max(best, rollout.reward)
        if rollout.reward < min_reward:
            continue
        found = conversation_of(rollout)
        if isinstance(found, str):
            skipped[found] += 1
        else:
            lines[json.dumps(found, ensure_ascii=False)] = None
    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.most_common())
    why = f"; skipped: {reasons}" if skipped else ""
    if not lines:
        highest = "" if best is None else f", the best reward is {best:g}"
        raise ConfigError(f"--min-reward {min_reward:g}: none of the {looked_at} rollouts in {run_dir}{highest}{why}")
    unfinished = out.with_name(f"{out.name}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        unfinished.replace(out)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise ConfigError(f"--out {out}: it cannot be written: {error.strerror}; choose another") from None
    typer.echo(f"{out}: {len(lines)} conversations of {looked_at} rollouts, each once{why}")


def kept(run_dir: Path) -> Iterator[Kept]:
    """Yield the trained rollouts of a run's record, or else of its `rollouts.jsonl`. Raises `ConfigError`."""
    from slipstream.deploy.commands.rollouts import read_rollouts

    record, file = run_dir / RECORD_FOLDER, run_dir / FILE_NAME
    if record.is_dir():
        try:
            for step in read_record(record).steps:
                for group in (place.group() for place in step.trained):
                    for rollout in group.rollouts:
                        messages = read_messages(rollout.messages)
                        yield Kept(rollout.reward, rollout.finish_reason, rollout.turns, messages)
        except RecordError as error:
            raise ConfigError(str(error)) from error
        return
    if not file.is_file():
        raise ConfigError(f"{run_dir}: there is neither {RECORD_FOLDER} nor {FILE_NAME}; give the directory of a run")
    for view in read_rollouts(file):
        yield Kept(view.reward, view.finish_reason, view.turns, view.messages)


def conversation_of(rollout: Kept) -> dict[str, Any] | str:
    """Return a rollout as a row of prompt, completion and reward, or the reason for which it is none.

    The policy's are the last `turns` messages of the assistant: a prompt may hold such messages too.
    """
    messages = [
        {name: value for name, value in message.items() if name != TURN_REWARD} for message in rollout.messages or ()
    ]
    if not messages:
        return NOT_KEPT
    if rollout.finish_reason not in _ENDED:
        return UNENDED
    if any(message.get("role") == "note" for message in messages) or any(map(_is_cut, messages)):
        return CUT_SHORT
    if messages[0].get("role") == "prompt":
        return TEXT
    if any(isinstance(part, dict) and "text" not in part for each in messages for part in _parts(each)):
        return IMAGES
    spoken = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    if not 0 < rollout.turns <= len(spoken):
        return CUT_SHORT
    first, last = spoken[-rollout.turns], spoken[-1]
    if first and messages[first - 1].get("role") == "assistant":
        return CONTINUED
    return {"prompt": messages[:first], "completion": messages[first : last + 1], "reward": rollout.reward}


def _parts(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_cut(value: Any) -> bool:
    """Say whether a text in a message is not whole."""
    if isinstance(value, str):
        return CUT.search(value) is not None
    each = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_is_cut, each))
