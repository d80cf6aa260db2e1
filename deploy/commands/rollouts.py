"""`slipstream rollouts`: shows what the policy said, from the run directory or from the queue."""

from __future__ import annotations

import asyncio
import heapq
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from slipstream.deploy.commands.arguments import print_json
from slipstream.deploy.commands.ended import SUMMARY
from slipstream.learner.report.rollouts import printable
from slipstream.protocol.client import QueueClient, QueueError, Unreachable
from slipstream.protocol.config import ConfigError
from slipstream.protocol.rollouts import FILE_NAME, TURN_REWARD, RolloutView, TrainedRollouts
from slipstream.protocol.status import Status

EVALUATIONS = "evaluations.jsonl"

# Rollouts to ask the queue for if the choice among them is made here.
WINDOW = 100

# `follow` looks so often for more, seconds.
_LOOK_S = 0.25

ROLE_WIDTH = 11

MAX_VALUE = 400

# A longer call has its answer on the next line.
_SHORT_CALL = 50


@dataclass(frozen=True, slots=True)
class Wanted:
    """A choice of rollouts to show.

    Attributes:
        limit: Maximum number.
        step: Optimiser step that trained them; None for all steps.
        order: By time or by reward.
        evals: Whether to show those of evaluations, which only the queue has.
        role: The role that the policy played; None for all.
    """

    limit: int
    step: int | None = None
    order: Literal["newest", "worst", "best"] = "newest"
    evals: bool = False
    role: str | None = None

    def choose(self, rollouts: Iterable[RolloutView]) -> list[RolloutView]:
        """Choose from rollouts in the order in which they were written. Holds at most `limit` of them in memory."""
        candidates = (
            rollout
            for rollout in rollouts
            if self.step in (None, rollout.step, rollout.evaluation) and self.role in (None, rollout.role)
        )
        if self.order == "newest":
            return list(deque(candidates, maxlen=self.limit))[::-1]
        sign = 1 if self.order == "worst" else -1
        return heapq.nsmallest(self.limit, candidates, key=lambda rollout: sign * rollout.reward)


def find(
    run_dir: Path,
    wanted: Wanted,
    client: QueueClient,
    ask: bool = False,
    checked: Callable[[Status], Status] | None = None,
) -> list[RolloutView]:
    """Find rollouts in the run directory, or at the queue.

    Args:
        run_dir: The run directory.
        wanted: Which rollouts.
        client: The queue, asked if the run has made no step or `ask` is set.
        ask: Whether to ask the queue in any case.
        checked: Raises `ConfigError` for the status of a queue that serves another run, as `status.of_run`.

    Raises:
        ConfigError: There are no rollouts of the wanted step, or the queue serves another run.
        QueueError: The queue does not answer.
    """
    path, ask = run_dir / FILE_NAME, ask or wanted.evals
    if not ask and path.exists() and path.stat().st_size:  # the learner creates it empty
        found, where = wanted.choose(read_rollouts(path)), str(path)
    else:
        try:
            found, where = wanted.choose(asyncio.run(_ask(client, wanted, checked))), client.url
        except QueueError as error:
            kind = Unreachable if isinstance(error, Unreachable) else QueueError
            if wanted.evals:
                raise kind(
                    f"{error}; rollouts of evaluations are kept by the queue alone, and gone when the run has ended: "
                    f"their metrics are in {run_dir / EVALUATIONS}"
                ) from None
            raise kind(str(error) if ask else f"there is no rollout in {path} yet, and {error}") from None
    if wanted.role is not None and not found:
        raise ConfigError(f"--role {wanted.role}: no rollout of that role is kept at {where}; leave --role out")
    if wanted.step is not None and not found:
        raise ConfigError(f"--step {wanted.step}: no rollout of that step is kept at {where}; leave --step out")
    return found


def follow(run_dir: Path, has_ended: Callable[[], bool]) -> Iterator[RolloutView]:
    """Yield the rollouts that the learner writes from now on, until the run has ended.

    Args:
        has_ended: Tells whether it has; asked while nothing comes.
    """
    trained = TrainedRollouts(run_dir / FILE_NAME)
    trained.look()
    while True:
        yield from (found := trained.look())
        if not found:
            if has_ended():
                return
            time.sleep(_LOOK_S)


def print_lines(rollouts: Sequence[RolloutView]) -> None:
    """Print one JSON object a line."""
    for rollout in rollouts:
        print_json(rollout)


def print_text(rollouts: Sequence[RolloutView]) -> None:
    console = Console()
    for rollout in rollouts:
        console.print(render(rollout), "")
    if not rollouts:
        console.print("no rollout has been kept yet")


def print_followed(run_dir: Path, as_json: bool, is_over: Callable[[], bool]) -> None:
    """Print rollouts as the learner writes them, until the run ends. Raises `ConfigError` without a run directory.

    Args:
        is_over: Tells whether the run is, also where it was stopped and left no summary.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir.absolute()}: there is no such run; start it, or give the command where it started")
    summary = run_dir / SUMMARY
    before = summary.stat().st_mtime_ns if summary.exists() else None

    def has_ended() -> bool:
        return (summary.exists() and summary.stat().st_mtime_ns != before) or is_over()

    for rollout in follow(run_dir, has_ended):
        (print_lines if as_json else print_text)([rollout])


def render(rollout: RolloutView) -> RenderableType:
    """Render two lines of facts, then the messages, each short tool call with its answer on one line."""
    parts = ", ".join(f"{printable(name)} {_number(value)}" for name, value in rollout.reward_components.items())
    step = "not trained" if rollout.step is None else f"step {rollout.step}"
    if rollout.evaluation is not None:
        step = f"evaluation of step {rollout.evaluation}"
    role = [] if rollout.role is None else [("  ", ""), (printable(rollout.role), "bold")]
    head = Text.assemble(
        (step, "bold"), *role, "  reward ", (_number(rollout.reward), "bold"), f" ({parts})" if parts else ""
    )
    if rollout.advantage is not None:
        head.append(f"  advantage {rollout.advantage:+.2f}")
    facts = [_versions(rollout.versions)]
    if rollout.staleness is not None:
        facts.append(f"staleness {rollout.staleness}")
    failed = f", {rollout.tool_failures} failed" if rollout.tool_failures else ""
    facts += [
        _count(rollout.turns, "turn"),
        _count(rollout.tool_calls, "call") + failed,
        _count(rollout.sampled_tokens, "token"),
        f"ended by {rollout.finish_reason}",
        f"ticket {rollout.ticket_id}",
        printable(rollout.worker_id),
    ]
    facts_shown = [
        Text(", ".join(facts), style="dim"),
        *(_line(f"{name}: {text}") for name, text in rollout.extra.items()),
    ]
    if rollout.messages is None:
        return Group(
            head, *facts_shown, Text("  its messages were not kept: set worker.keep_messages = true", style="dim")
        )
    return Group(head, *facts_shown, *_conversation(rollout.messages))


def _conversation(messages: Sequence[dict[str, Any]]) -> Iterator[RenderableType]:
    calls: deque[_Call] = deque()
    for raw in messages:
        try:
            message = msgspec.convert({**raw, "content": _text_of(raw.get("content"))}, _Message)
        except msgspec.ValidationError:  # an agent's own message may have any form
            yield _line(json.dumps(raw, ensure_ascii=False, default=str))
            continue
        if message.role == "tool":
            # A malformed call also has an answer; the call itself is part of its turn's text.
            answers = bool(calls) and calls[0].function.name == message.name
            call = calls.popleft().text() if answers else message.name or ""
            if len(call) > _SHORT_CALL:
                yield Padding(Text(printable(call), style="cyan"), (0, 0, 0, 4))
                call = " "
            yield _line(f"{call} -> {message.content}")
            continue
        yield from (_line(f"{call.text()} (no answer)") for call in calls)
        calls = deque(message.tool_calls)
        at_turn = f"  reward {_number(reward)}" if isinstance(reward := raw.get(TURN_REWARD), int | float) else ""
        yield Text.assemble((f"  {printable(message.role)}", "bold"), at_turn)
        if message.content.strip() or not calls:
            yield Padding(Text(printable(message.content.strip()) or "(nothing)"), (0, 0, 0, 4))
    yield from (_line(f"{call.text()} (no answer)") for call in calls)


def _text_of(content: Any) -> Any:
    """Join a content's parts, each that is no text by its type, as in "[image] Which colour?"."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return "" if content is None else content
    return " ".join(map(_part, content))


def _part(part: dict[str, Any]) -> str:
    """Write a part of a message in a word: its text, or its type, and of an image its size."""
    if "text" in part:
        return str(part["text"])
    image = part.get("image")
    size = f" {image.get('width')} x {image.get('height')}" if isinstance(image, dict) else ""
    return f"[{part.get('type')}{size}]"


class _Function(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


class _Call(msgspec.Struct):
    function: _Function

    def text(self) -> str:
        """Write the call as Python would, long values cut."""
        written = (f"{name}={_value(value)}" for name, value in self.function.arguments.items())
        return f"{self.function.name}({', '.join(written)})"


class _Message(msgspec.Struct):
    role: str
    content: str = ""
    name: str | None = None
    tool_calls: list[_Call] = []


def _line(text: str) -> Text:
    """Render one line, cut at the terminal's width."""
    return Text(f"    {printable(' '.join(text.split()))}", style="cyan", no_wrap=True, overflow="ellipsis")


def _value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _versions(versions: tuple[int, int] | None) -> str:
    if versions is None:
        return "no version"
    oldest, newest = versions
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"


def read_rollouts(path: Path) -> Iterator[RolloutView]:
    """Read line by line. The last line may be half-written, so it is skipped if it cannot be read."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield msgspec.json.decode(line, type=RolloutView)
            except msgspec.DecodeError as error:
                if line.endswith(b"\n"):
                    raise ConfigError(f"{path}: line {number} is not a rollout: {error}") from None


async def _ask(client: QueueClient, wanted: Wanted, checked: Callable[[Status], Status] | None) -> list[RolloutView]:
    """Return rollouts in the order in which they came to the queue."""
    async with client:
        if checked is not None:
            checked(await client.status())
        if wanted.order == "worst" and wanted.step is None and wanted.role is None:
            return await client.rollouts(wanted.limit, worst=True, evals=wanted.evals)
        return (await client.rollouts(max(wanted.limit, WINDOW), evals=wanted.evals))[::-1]
