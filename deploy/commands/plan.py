"""`slipstream plan`: how fast a run will go, what limits it, and which change helps most."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.deploy.commands import probe
from slipstream.deploy.commands.arguments import print_json
from slipstream.deploy.commands.plan_page import page_data, view
from slipstream.deploy.commands.report import save
from slipstream.deploy.planning.advice import differences, plan, with_counts
from slipstream.deploy.planning.calibration import calibrated
from slipstream.deploy.planning.rates import read_record, server_count
from slipstream.deploy.servers.vllm_server import on_cpu
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.history import PlannedChange

# A terminal below this width shows two settings of one change in two lines, and shorter bars.
_WIDE = 100


def run(
    config: RunConfig,
    learnt_from: Path | None,
    servers: int | None,
    workers: int | None,
    steps: int,
    as_json: bool,
    out: Path | None,
    probes: bool,
) -> None:
    """Plan a run, print the plan, and draw it in a file if `out` names one.

    Args:
        probes: Whether to measure a server first; what it finds stays next to the record.

    Raises:
        ConfigError: There is no record to learn from, the run would never make a step, no server can be measured, or
            the file cannot be written.
    """
    source = learnt_from or config.run_dir
    planned = with_counts(config, servers, workers)
    if probes:
        probe.measure(read_record(source), source, server_count(planned))
    record = read_record(source)
    try:
        shared = record.config if on_cpu() else None
        changed = tuple(differences(planned, record.config))
        notes, limit = (*changed, *record.notes), None if changed else record.limit
        found = plan(planned, calibrated(record), steps, notes, measured_with=shared, limit=limit)
    except RuntimeError as error:
        raise ConfigError(
            f"the run would never make a step: {error}; look at queue.max_staleness and the slots"
        ) from None
    shown = view(found, planned, record, str(source))
    if out is not None:
        save(page_data(found, planned, shown), out)
    if as_json:
        print_json(found)
        return
    console = Console()
    console.print(Text(shown.title, style="bold"))
    console.print()
    table = Table("", "predicted", "in the record", box=None, pad_edge=False, header_style="dim")
    for column in table.columns[1:]:
        column.justify = "right"
    for figure in shown.figures:
        table.add_row(*map(Text, figure))
    console.print(table)
    console.print()
    console.print(Text(found.limit.text, style="bold"))
    console.print()
    console.print(_changes(shown.changes, console.width))
    console.print()
    console.print(Text(shown.advice, style="bold"))
    for note in shown.notes:
        console.print(Text(f"Note: {note}", style="dim"))
    if out is not None:
        console.print(Text(f"{out}: the plan drawn; open it in a browser"))


def _changes(changes: list[PlannedChange], width: int) -> Table:
    """Draw what each change brings. The longest bar is the greatest gain, or loss."""
    table = Table("change", "", "gain", "steps/s", "staleness", box=None, pad_edge=False, header_style="dim")
    for column in table.columns[2:]:
        column.justify = "right"
    longest, most = (20 if width >= _WIDE else 10), max(1.0, *(abs(change.gain) for change in changes))
    for change in changes:
        cells = max(1, round(longest * abs(change.gain) / most)) if change.gain else 0
        bar = Text("█" * cells, style="green" if change.gain > 0 else "red")
        text = change.text if width >= _WIDE else change.text.replace(" and ", "\nand ")
        table.add_row(Text(text), bar, change.shown_gain, change.steps_per_s, change.staleness)
    return table
