"""`slipstream plan`: how fast a run will go, what limits it, and which change helps most."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.commands.arguments import print_json
from deploy.planning.advice import MIN_GAIN, Plan, plan, with_counts
from deploy.planning.rates import Measured, Record, read_record
from deploy.planning.simulation import Prediction
from protocol.config import ConfigError, RunConfig


def run(
    config: RunConfig, learnt_from: Path | None, servers: int | None, workers: int | None, steps: int, as_json: bool
) -> None:
    """Plan a run and print the plan. Raises `ConfigError` if there is no record to learn from."""
    record = read_record(learnt_from or config.run_dir)
    planned = with_counts(config, servers, workers)
    try:
        found = plan(planned, record.rates, steps, record.notes)
    except RuntimeError as error:
        raise ConfigError(
            f"the run would never make a step: {error}; look at queue.max_staleness and the slots"
        ) from None
    if as_json:
        print_json(found)
        return
    console = Console()
    console.print(
        Text.assemble(
            (f"vLLM servers: {found.servers}, workers: {found.workers}", "bold"),
            f": {found.steps} steps simulated on the rates of {learnt_from or config.run_dir} "
            f"({record.measured.steps} steps)",
        )
    )
    console.print(_facts(found.prediction, record))
    console.print(_changes(found))
    limit = "No part by itself limits it" if found.limit is None else f"What limits: {found.limit}"
    console.print(Text(f"{limit}. {found.advice}", style="bold"))
    for note in found.notes:
        console.print(Text(f"Note: {note}", style="dim"))


def _facts(found: Prediction, record: Record) -> Table:
    """Draw what is predicted beside what the record measured."""
    table = Table("", "predicted", "in the record", box=None, pad_edge=False, header_style="dim")
    for column in table.columns[1:]:
        column.justify = "right"
    measured = record.measured
    for text, name, form in (
        ("steps a second", "steps_per_s", ".3f"),
        ("tokens sampled a second", "tokens_per_s", ",.0f"),
        ("tokens trained a second", "trained_tokens_per_s", ",.0f"),
        ("staleness, mean", "staleness_mean", ".2f"),
        ("staleness, greatest", "staleness_max", "d"),
        ("the learner waits for groups", "learner_wait", ".0%"),
        ("workers' slots wait for tickets", "worker_wait", ".0%"),
        ("servers without a request", "server_idle", ".0%"),
        ("requests on a server", "running", ".0f"),
    ):
        table.add_row(text, _shown(found, name, form), _shown(measured, name, form))
    for reason, count in found.drops.items():
        table.add_row(f"groups dropped: {reason}", f"{count}", "")
    return table


def _shown(of: Prediction | Measured, name: str, form: str) -> str:
    value = getattr(of, name, None)
    return "" if value is None else format(value, form)


def _changes(found: Plan) -> Table:
    table = Table("change", "steps/s", "gain", "", "staleness", box=None, pad_edge=False, header_style="dim")
    for change in found.changes:
        told = abs(change.gain) >= MIN_GAIN
        bar = Text("█" * min(20, round(abs(change.gain) * 20)), style="green" if change.gain > 0 else "red")
        gain = f"{change.gain:+.0%}" if told else "none"
        made = change.prediction
        table.add_row(Text(change.text), f"{made.steps_per_s:.3f}", gain, bar, f"{made.staleness_mean:.2f}")
    return table
