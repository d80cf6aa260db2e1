"""A step's rollouts as trackers show them: a table where they have tables, a text where they have texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate.tracking import GeneralTracker

from learner.report.rollout_text import printable
from protocol.rollouts import RolloutView

NAME = "rollouts"
COLUMNS = ["step", "prompt", "completion", "reward", "advantage", "finish_reason", "staleness"]


def rows(views: Sequence[RolloutView]) -> list[list[Any]]:
    """One for each rollout, in the order of `COLUMNS`."""
    return [
        [view.step, *_texts(view), view.reward, view.advantage, view.finish_reason, view.staleness] for view in views
    ]


def send(tracker: GeneralTracker, views: Sequence[RolloutView], step: int) -> None:
    """To a tracker that can show them; to another, nothing."""
    if hasattr(tracker, "log_table"):
        tracker.log_table(NAME, columns=COLUMNS, data=rows(views), step=step)
    elif tracker.name == "tensorboard":
        tracker.log({NAME: "\n\n".join(_markdown(row) for row in rows(views))}, step=step)
    elif tracker.name == "trackio":
        import pandas
        import trackio

        table = pandas.DataFrame(rows(views), columns=COLUMNS)
        tracker.log({NAME: trackio.Table(dataframe=table)}, step=step)


def _texts(view: RolloutView) -> tuple[str, str]:
    """Prompt and completion: what comes before the policy's first turn, and the rest."""
    messages = view.messages or []
    first = next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    return _text(messages[:first]), _text(messages[first:])


def _text(messages: Sequence[dict[str, Any]]) -> str:
    return printable("\n".join(f"{message.get('role', '?')}: {_said(message)}" for message in messages))


def _said(message: dict[str, Any]) -> str:
    parts = [message.get("content"), message.get("tool_calls")]
    return " ".join(str(part) for part in parts if part)


def _markdown(row: Sequence[Any]) -> str:
    """The texts as code, of which markdown makes nothing."""
    _, prompt, completion, reward, _, finish_reason, _ = row
    body = f"{prompt}\n{completion}".replace("\n", "\n    ")
    return f"**reward {reward:.3g}**, ended by {finish_reason}\n\n    {body}"
