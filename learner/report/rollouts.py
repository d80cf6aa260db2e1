"""Rollouts for people to read: `rollouts.jsonl` with some of each step, and one of them on the terminal.

The file is bounded, and forgets steps that a resume gives up, as the journals do. No torch.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from slipstream.learner.report.journal import append_whole
from slipstream.protocol.rollouts import END_CUT, TURN_REWARD, RolloutView

MAX_BYTES = 64 * 1024**2

# Characters that are shown of a message, an argument of a tool and a result of one.
MAX_TEXT = 1000

MAX_ARGUMENT = 60

MAX_RESULT = 200

# Escape sequences of a terminal; control characters; surrogates, which cannot be written; marks that reverse text.
_UNSAFE = re.compile(
    r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


class _Step(msgspec.Struct):
    step: int


class RolloutLog:
    """A file of `RolloutView` lines in the order of the steps. Opened at step c, it forgets what was written after c.

    Beyond `max_bytes` it drops its older half. Rollouts that cannot be written are left out, which `warn` is told once.
    """

    def __init__(
        self, path: Path, step: int, max_bytes: int = MAX_BYTES, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        self._warn: Callable[[str], None] | None = warn
        self._path = path
        self._max_bytes = max_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.truncate(_end_of(path, step))
            self._size = file.seek(0, os.SEEK_END)

    def append(self, views: Sequence[RolloutView]) -> None:
        """Append the rollouts of one step."""
        lines = b"".join(msgspec.json.encode(view) + b"\n" for view in views)
        try:
            append_whole(self._path, lines)
            self._size += len(lines)
            if self._size > self._max_bytes:
                self._halve()
        except OSError as error:
            if self._warn is not None:
                self._warn(f"{self._path} lacks rollouts, which cannot be written: {error.strerror}")
                self._warn = None

    def _halve(self) -> None:
        aside = self._path.with_suffix(".unfinished")
        with self._path.open("rb") as old, aside.open("wb") as new:
            old.seek(self._size - self._max_bytes // 2)
            old.readline()  # the rest of a line that begins before
            shutil.copyfileobj(old, new)
            self._size = new.tell()
        os.replace(aside, self._path)


def _end_of(path: Path, step: int) -> int:
    """Return the bytes of the lines up to `step`, without a line that a kill cut short and what follows it."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            try:
                if not line.endswith(b"\n") or msgspec.json.decode(line, type=_Step).step > step:
                    break
            except msgspec.DecodeError:
                break
            end += len(line)
    return end


def render_rollout(view: RolloutView) -> RenderableType:
    """Render a rollout: its metrics, then the conversation with each tool call in one line."""
    return Group(
        _headline(view),
        Text(_facts(view), style="dim"),
        *_notes(view),
        Padding(_conversation(view), (0, 0, 0, 2)),
    )


def printable(text: str) -> str:
    """Replace everything that a terminal would obey by U+FFFD. Use it on text of a policy, a tool or a task file."""
    return _UNSAFE.sub("\ufffd", text.replace("\r\n", "\n").expandtabs(4))


def _headline(view: RolloutView) -> Text:
    parts = ", ".join(f"{printable(name)} {_number(value)}" for name, value in view.reward_components.items())
    of_role = "" if view.role is None else f" ({printable(view.role)})"
    text = Text.assemble(
        ("rollout" if view.step is None else f"rollout of step {view.step}", "bold"),
        of_role,
        f": reward {_number(view.reward)}",
    )
    if parts:
        text.append(f" ({parts})")
    if view.advantage is not None:
        text.append(f", advantage {_number(view.advantage)}")
    return text


def _facts(view: RolloutView) -> str:
    facts = [f"row {view.index}", f"epoch {view.epoch}", f"ended by {view.finish_reason}", f"{view.turns} turns"]
    if view.tool_calls:
        facts.append(f"{view.tool_calls} tool calls, {view.tool_failures} failed")
    facts.append(f"{view.sampled_tokens} tokens")
    if view.versions is not None:
        oldest, newest = view.versions
        facts.append(f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}")
    if view.staleness is not None:
        facts.append(f"staleness {view.staleness}")
    return ", ".join([*facts, f"worker {printable(view.worker_id)}"])


def _notes(view: RolloutView) -> Iterator[Text]:
    """Yield the notes of the reward functions."""
    for name, text in view.extra.items():
        yield Text(f"  {printable(name)}: {_cut(text, MAX_RESULT)}", style="dim")


def _conversation(view: RolloutView) -> Text:
    if view.messages is None:
        return Text("its messages were not kept: set worker.keep_messages = true", style="dim")
    lines = list(_lines(view.messages))
    return Text("\n").join(lines) if lines else Text("no messages", style="dim")


def _lines(messages: list[dict[str, Any]]) -> Iterator[Text]:
    """Yield a line for each message with text, and one for each call with its result."""
    calls: list[tuple[object, str]] = []
    for message in messages:
        role, content = printable(str(message.get("role", "?"))), _text(message.get("content"))
        if role == "tool" and calls:
            named = next((i for i, (key, _) in enumerate(calls) if key == message.get("tool_call_id")), 0)
            yield Text(f"{calls.pop(named)[1]} -> {_cut(content, MAX_RESULT)}", style="cyan")
            continue
        at_turn = f" (reward {_number(reward)})" if isinstance(reward := message.get(TURN_REWARD), int | float) else ""
        if content.strip() or at_turn:
            yield Text.assemble((f"{role}{at_turn}: ", "bold"), _cut(content.strip(), MAX_TEXT))
        found = message.get("tool_calls")
        calls += [_call(call) for call in found] if isinstance(found, list) else []
    for _, call in calls:
        yield Text(f"{call} (no result)", style="cyan")


def _call(call: Any) -> tuple[object, str]:
    """Return a call's id (None if it has none), and its text."""
    if not isinstance(call, dict):
        return None, _cut(str(call), MAX_RESULT)
    function = call.get("function")
    function = function if isinstance(function, dict) else call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments)
    if isinstance(arguments, dict):
        shown = ", ".join(
            f"{_cut(name, MAX_ARGUMENT)}={_cut(_json(value), MAX_ARGUMENT)}" for name, value in arguments.items()
        )
    else:
        shown = "" if arguments is None else _cut(str(arguments), MAX_RESULT)
    return call.get("id"), f"{_cut(str(function.get('name', '?')), MAX_ARGUMENT)}({shown})"


def _text(content: Any) -> str:
    """Join the text of a content, which is a string, or a list of parts of which some are text."""
    if isinstance(content, list):
        content = " ".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _cut(text: str, most: int) -> str:
    text = printable(text)
    return text if len(text) <= most else text[:most] + END_CUT.format(len(text) - most)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
