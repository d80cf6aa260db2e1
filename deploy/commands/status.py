"""`slipstream status`: renders the queue's status for the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from slipstream.learner.report.rollouts import printable
from slipstream.protocol.client import QueueClient, Unreachable
from slipstream.protocol.config import ConfigError
from slipstream.protocol.messages import ServerState
from slipstream.protocol.status import (
    Cause,
    ConnectionStatus,
    RowsStatus,
    ServerStatus,
    Status,
    describe_evaluation,
    episodes_at,
    recurrence,
)

_NOTICES_SHOWN = 8

_WORKERS_SHOWN = 16

# From none to the most of a histogram.
_BARS = " ▁▂▃▄▅▆▇█"

# A queue that starts again is away for so long at most, seconds.
_MAX_AWAY_S = 60.0

# Shares of time below this are not shown.
_MIN_SHOWN_SHARE = 0.05


async def show(client: QueueClient, checked: Callable[[Status], Status]) -> None:
    """Print the status once.

    Args:
        checked: Returns a status of the run that is meant, as `of_run`.

    Raises:
        ConfigError: The queue serves another run.
    """
    async with client:
        Console().print(render(checked(await client.status())))


async def watch(client: QueueClient, checked: Callable[[Status], Status], is_over: Callable[[], bool]) -> None:
    """Redraw the status every second; into a file or pipe, print one after the other.

    Args:
        client: Asks once; a queue that is away may be starting again.
        checked: As of `show`.
        is_over: Tells, of a queue that is away, whether its run is.

    Raises:
        ConfigError: The queue serves another run.
        Unreachable: The run is over, or the queue was away for `_MAX_AWAY_S`.
    """
    console, heard_at = Console(), time.monotonic()
    # `auto_refresh` would draw from another thread.
    live = Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext()
    async with client:
        with live as screen:
            while True:
                try:
                    shown = render(checked(await client.status()))
                except Unreachable:
                    if is_over() or time.monotonic() - heard_at > _MAX_AWAY_S:
                        raise
                else:
                    heard_at = time.monotonic()
                    if screen is None:
                        console.print(shown, end="\n\n")
                    else:
                        screen.update(shown, refresh=True)
                await asyncio.sleep(1.0)


def of_run(status: Status, run: str, url: str, missing: Path | None = None) -> Status:
    """Return the status. Raises `ConfigError` if it is not of the run that is meant: another has its port now.

    Args:
        missing: The run directory, where it would be on this machine and is not.
    """
    if status.run == run and missing is not None:
        raise ConfigError(
            f"run {run} has not been started: there is no folder {missing.absolute()}. The queue at {url} serves "
            f"another run of that name: to see that, add --run.dir, or --queue {url}"
        )
    if status.run != run:
        raise ConfigError(
            f"the queue at {url} serves run {printable(status.run)}, not {run}: give that run's file, or --queue"
        )
    return status


def render(status: Status) -> RenderableType:
    """Render headline with alarm, causes, notices, metrics and waits; then workers, servers and dropped groups."""
    parts: list[RenderableType] = [_headline(status)]
    if status.diagnosis and status.gave_up is None:
        parts.append(render_causes(status.diagnosis))
    if status.notices:
        parts.append(_notices(status))
    parts.append(_metrics(status))
    parts.append(_workers(status) if status.workers else Text("no workers"))
    if len(status.workers) > _WORKERS_SHOWN:
        parts.append(Text(_all_workers(status)))
    parts.append(_servers(status) if status.servers else Text("no servers"))
    parts += [
        _text(f"{what}: " + ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items())))
        for what, counts in (("dropped", status.drops), ("rejected", status.rejections))
        if counts
    ]
    if status.workers:
        parts.append(Text(_open(status)))
    if hung := sum(worker.hung_calls for worker in status.workers):
        parts.append(Text(f"hung: {hung} calls of user code are still running after their time-out"))
    if status.connections.refused:
        parts.append(Text(_refused(status.connections), style="yellow"))
    return Group(*parts)


def _headline(status: Status) -> Text:
    text = Text.assemble((f"run {status.run}", "bold"), f"  step {status.step}/{status.total_steps}")
    text.append(f"  version {status.version}, served {_or_dash(status.served_version)}")
    if status.learner.reward_mean is not None:
        text.append(f"  reward {status.learner.reward_mean:.3f}")
    if status.finished:
        text.append("  finished", style="green")
    if status.gave_up is not None:
        text.append(f"\nGAVE UP: {printable(status.gave_up)}", style="bold red")
    elif status.stall.stalled:
        text.append(
            f"\nSTALLED for {status.stall.since_s:.0f} s: {printable(status.stall.why or '')}", style="bold red"
        )
    return text


def render_causes(causes: Sequence[Cause]) -> Table:
    """Render what keeps a run from learning, with the time for which it has been seen."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for cause in causes:
        style = "bold red" if cause.severity == "bad" else "yellow"
        seen = f", for {ago(cause.since_s).removesuffix(' ago')}" if cause.since_s else ""
        table.add_row(Text(f"{printable(cause.about)}{seen}", style=style), _text(cause.text + recurrence(cause)))
    return table


def _notices(status: Status) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for notice in status.notices[-_NOTICES_SHOWN:]:
        others = f" and {notice.count - 1:,} others" if notice.count > 1 else ""
        who = f" at {notice.who}{others}" if notice.who else ""
        table.add_row(
            Text(f"! {ago(notice.since_s)}", style="yellow"),
            _text(f"{notice.kind}{who}: {notice.text}{recurrence(notice)}"),
        )
    return table


def _metrics(status: Status) -> Table:
    groups, stale, rates = status.groups, status.staleness, status.rates
    table = Table(box=None, pad_edge=False, show_header=False)
    if status.limit is not None:
        table.add_row("limit", _text(status.limit.text))
    if status.scaling is not None:
        gains = (f"{what} {gain:+.0%}" for what, gain in status.scaling.one_more.items())
        table.add_row("one more", f"{', '.join(gains)} steps a second")
    table.add_row(
        "groups",
        f"{groups.outstanding} of at most {groups.limit} = "
        f"{groups.tickets} at workers + {groups.ready} ready + {groups.leased} with the learner",
    )
    table.add_row("work ahead", f"{status.depth:.2f} optimiser steps, aims at {status.depth_target:.2f}")
    kept = f", {groups.kept_bytes / 1e6:.1f} MB kept for a resume" if groups.kept_bytes else ""
    table.add_row("stored", f"{groups.bytes / 1e6:.1f} MB of {groups.capacity_bytes / 1e6:.0f} MB{kept}")
    table.add_row(
        "staleness",
        f"{stale.mean:.2f} versions on average = {stale.in_flight_mean:.2f} while played + {stale.in_queue_mean:.2f} "
        f"in the queue; highest {stale.max}, ever {stale.max_ever}, bound {status.max_staleness}",
    )
    table.add_row(
        "per second",
        f"{rates.steps:.2f} steps, {rates.groups:.1f} groups, {rates.tokens_sampled:.0f} tokens sampled, "
        f"{rates.tokens_trained:.0f} trained",
    )
    if status.taught_nothing:
        drops = ", ".join(f"{reason} {_short(tokens)}" for reason, tokens in sorted(status.tokens_dropped.items()))
        of_all, of_late = _percent(status.taught_nothing), _percent(status.taught_nothing_of_late)
        text = f"{of_all} of the sampled tokens taught nothing ({drops}); {of_late} in the last minute"
        table.add_row("untrained", _text(text))
    if status.rows is not None:
        table.add_row("rows", _rows(status.rows))
    if policy := _policy(status.learner.metrics):
        table.add_row("policy", policy)
    for evaluation in _evaluations(status):
        table.add_row("evaluation", _text(evaluation))
    learner, workers = _percent(status.learner_wait_share), _percent(status.worker_wait_share)
    table.add_row("time idle", f"learner {learner}, workers {workers}")
    waits = [
        f"{wait.who} for {wait.what}, {'up to ' if wait.count > 1 else ''}{wait.since_s:.1f} s" for wait in status.waits
    ]
    table.add_row("now waiting", _text("\n".join(waits) or "nobody"))
    return table


def _policy(metrics: Mapping[str, float]) -> str:
    """Describe the newest step: distance of the policy to the one that sampled, and how busy its device was. Empty if
    neither is known."""
    parts = []
    ratios = [metrics.get(f"sampler/ratio_p{percent}") for percent in (1, 50, 99)]
    if None not in ratios:
        low, middle, high = ratios
        parts.append(f"ratio to the sampler {middle:.3g}, {low:.3g} to {high:.3g} for 98 % of the tokens")
    if (ess := metrics.get("ess")) is not None:
        parts.append(f"effective sample size {ess:.0%}")
    if (mfu := metrics.get("mfu")) is not None:
        parts.append(f"FLOPs utilisation {mfu:.0%}")
    return ", ".join(parts)


def _rows(rows: RowsStatus) -> str:
    """Describe the rows that were tried, with a bar for each part of the range of their mean rewards."""
    text = f"{rows.tried:,} of {rows.rows:,} tried, {rows.teaching:,} of them teach"
    if not rows.histogram:
        return text
    most = max(rows.histogram)
    bars = "".join(_BARS[-(-count * (len(_BARS) - 1) // most)] for count in rows.histogram)
    return f"{text}; by mean reward {rows.lowest:.3g} |{bars}| {rows.highest:.3g}"


def _evaluations(status: Status) -> list[str]:
    """Return a line for each open evaluation, and one for the newest that has ended."""
    ended = [evaluation for evaluation in status.evaluations if evaluation.ended is not None]
    lines = [describe_evaluation(ended[-1]).removeprefix("evaluation ")] if ended else []
    for evaluation in status.evaluations:
        if evaluation.ended is None:
            failed = f", {evaluation.failed} failed" if evaluation.failed else ""
            rows = "its" if evaluation.rows is None else evaluation.rows
            line = (
                f"of step {evaluation.step}: {evaluation.done} of {rows} rows done{failed}, {evaluation.seconds:.0f} s"
            )
            lines.append(f"{line}; waits for {evaluation.waits_for}" if evaluation.waits_for else line)
    return lines


def _workers(status: Status) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("worker", overflow="ellipsis", min_width=12)  # cut if the terminal is narrow
    for column in ("slots", "done/failed", "tokens", "tools/failed", "idle", "seen"):
        table.add_column(column, no_wrap=True)
    for w in status.workers[:_WORKERS_SHOWN]:
        table.add_row(
            _text(w.worker_id),
            f"{w.episodes_generating}/{w.capacity}",
            f"{w.episodes_done}/{w.episodes_failed}",
            _short(w.tokens_sampled),
            f"{w.tool_calls}/{w.tool_failures}",
            _percent(w.wait_share),
            ago(w.seen_s_ago) if w.does not in ("refused", "left") else w.does,
        )
    return table


def _all_workers(status: Status) -> str:
    """Count all workers by what they do; `--json` has each."""
    does = Counter(worker.does.replace("_", " ") for worker in status.workers)
    return f"{len(status.workers):,} workers: " + ", ".join(f"{count:,} {what}" for what, count in does.most_common())


def _refused(connections: ConnectionStatus) -> str:
    since, newest = ago(connections.refused_since_s or 0.0), ago(connections.refused_s_ago or 0.0)
    return (
        f"busy: {connections.refused:,} requests of workers were refused, the first {since}, the newest {newest}: the "
        f"queue takes {connections.max_workers:,} workers (queue.max_workers)"
    )


def _open(status: Status) -> str:
    """Count the open episodes of all workers by what they are doing."""
    at = episodes_at(status.workers)
    places = ", ".join(f"{count} {place.replace('_', ' ')}" for place, count in at.items())
    full = max((w.full_share for w in status.workers), default=0.0)
    why = f"; slots idle at worker.open_episodes: {_percent(full)}" if full >= _MIN_SHOWN_SHARE else ""
    return f"{sum(at.values())} episodes open: {places}{why}"


def print_servers(servers: Sequence[ServerStatus]) -> None:
    Console().print(_server_table(servers) if servers else Text("no servers"))


def _servers(status: Status) -> Table:
    return _server_table(status.servers)


def _server_table(servers: Sequence[ServerStatus]) -> Table:
    table = Table("server", "state", "version", "behind", "for", "weights by", "", box=None, pad_edge=False)
    for server in servers:
        parts = (server.waits_for and f"waits for {server.waits_for}", server.reason, server.slow)
        what = "; ".join(part for part in parts if part)
        table.add_row(
            _text(server.name),
            "slow" if server.slow and server.state is ServerState.SERVING else str(server.state),
            _or_dash(server.version),
            _or_dash(server.lag),
            ago(server.since_s).removesuffix(" ago"),
            _text(server.transport or "-"),
            _text(what or server.url),
        )
    return table


def _text(text: str) -> Text:
    """Remove control characters: names and reasons come from other processes, and a terminal would obey them."""
    return Text(printable(text))


def _short(count: int) -> str:
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= 10 * unit:
            return f"{count / unit:.0f} {name}"
    return str(count)


def ago(seconds: float) -> str:
    """Say how long ago something was, in its largest unit."""
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{seconds:.0f} s ago"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
