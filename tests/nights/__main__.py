"""Hurts a run again and again, by a schedule that its seed draws, and audits it: `python -m tests.nights --minutes 20`.

A fault comes every half minute, with `--fake` every few seconds: it hurts a fleet of fake servers and is for each
commit. Prints what became of each fault, then the table of faults with the first line that named each and its seconds,
then the audit. Exit code 1 if a rule was broken; the schedule is written beside, can be played again with
`--schedule FILE`, and with `--shrink` is reduced to the faults that break the rule.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from tests.nights import examples
from tests.nights import schedule as schedules
from tests.nights.faults import possible, quick
from tests.nights.night import Outcome, Told, play


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fake", action="store_true", help="fake servers, which start in seconds")
    parser.add_argument("--example", choices=examples.BY_NAME, default="multiply")
    parser.add_argument("--every", type=float, help="seconds between faults; default 30, with --fake 5")
    parser.add_argument("--soak", action="store_true", help="no faults: what grows in a run that is left alone?")
    parser.add_argument("--only", nargs="+", help="parts of the names of faults")
    parser.add_argument("--quick", action="store_true", help="only faults that a run is over in seconds")
    parser.add_argument("--schedule", type=Path, help="play this file in place of what the seed draws")
    parser.add_argument("--shrink", action="store_true", help="if a rule is broken, find the faults that break it")
    parser.add_argument("--out", type=Path, help="write the outcome there, as JSON")
    parser.add_argument("--keep", type=Path, help="copy the run's directory there, and all that was heard")
    arguments = parser.parse_args()
    example = examples.BY_NAME[arguments.example]
    if arguments.fake and arguments.example != "multiply":
        parser.error("--fake plays the example multiply only")
    every_s = arguments.every or (5.0 if arguments.fake else 30.0)
    faults = [
        fault
        for fault in (quick if arguments.quick else possible)("fake" if arguments.fake else "real")
        if example.bears(fault) and (not arguments.only or any(part in fault.name for part in arguments.only))
    ]
    schedule = (
        schedules.load(arguments.schedule)
        if arguments.schedule
        else schedules.draw(arguments.seed, 60 * arguments.minutes, every_s, faults)
    )
    if not arguments.fake:
        build = [sys.executable, str(example.folder / "build_model.py"), "--out", str(example.model)]
        subprocess.run(build, check=True)

    def say(text: str) -> None:
        print(text, flush=True)

    quiet_s = 0.0
    if arguments.soak:
        schedule, quiet_s = [], 60 * arguments.minutes
    outcome = play(schedule, arguments.seed, arguments.fake, every_s, example, say, arguments.keep, quiet_s)
    report(outcome)
    if arguments.out:
        arguments.out.write_text(json.dumps(outcome.as_dict(), indent=1), encoding="utf-8")
    if outcome.broken:
        file = Path(f"night-{arguments.seed}.schedule")
        schedules.save(schedule, file)
        print(f"the schedule is in {file}; play it again with: --schedule {file}")
        if arguments.shrink:
            kinds = {kind_of(text) for text in outcome.broken}

            def fails(part: list[schedules.Strike]) -> bool:
                again = play(schedules.closer(part, every_s), arguments.seed, arguments.fake, every_s, example, say)
                return bool(kinds & {kind_of(text) for text in again.broken})

            schedules.save(schedules.shrink(schedule, fails), file.with_suffix(".shrunk"))
            print(f"what breaks it is in {file.with_suffix('.shrunk')}:\n{file.with_suffix('.shrunk').read_text()}")
    return int(bool(outcome.broken))


def kind_of(text: str) -> str:
    """What is the same in two texts about one rule."""
    return "".join(letter for letter in text if letter.isalpha())


def report(outcome: Outcome) -> None:
    by_fault: dict[str, list[Told]] = defaultdict(list)
    for told in outcome.strikes:
        by_fault[told.strike.fault].append(told)
    table = Table("fault", "done", "told", "median s", "worst s", "step after, worst s", "a first line", width=200)
    for name, of in sorted(by_fault.items()):
        done = [told for told in of if told.skipped is None]
        times = [told.after_s for told in done if told.after_s is not None]
        steps = [told.step_after_s for told in done if told.step_after_s is not None]
        line = next((told.line for told in done if told.line), "")
        table.add_row(
            name,
            str(len(done)),
            str(len(times)) if done and done[0].strike.of.says else "borne",
            f"{median(times):.1f}" if times else "",
            f"{max(times):.1f}" if times else "",
            f"{max(steps):.1f}" if steps else "",
            line[:110],
        )
    console = Console(width=200)
    console.print(table)
    done = [told for told in outcome.strikes if told.skipped is None]
    times = sorted(told.after_s for told in done if told.after_s is not None)
    print(
        f"seed {outcome.seed}: {len(done)} faults in {outcome.seconds:.0f} s, {outcome.steps} steps, {outcome.starts} "
        f"starts; first true line after {median(times) if times else 0:.1f} s (median), "
        f"{times[-1] if times else 0:.1f} s (worst)"
    )
    print(
        f"labels: {outcome.labels.tokens} tokens of {outcome.labels.versions} versions, with "
        f"{outcome.labels.mid_turn_swaps} swaps in the middle of a turn, at most "
        f"{outcome.labels.worst:.2g} nats off, {outcome.labels.mean:.2g} in the mean; "
        f"reward {outcome.reward[0]:.3f} to {outcome.reward[1]:.3f}"
    )
    print(f"growth: {json.dumps(outcome.growth)}; logs: {json.dumps(outcome.log_bytes)}")
    for name, trends in sorted(outcome.trends.items()):
        parts = [
            f"{what} {of.first_half / unit:+.1f} then {of.second_half / unit:+.1f}{' MB' if unit > 1 else ''}"
            f"{' (grows)' if of.leaks else ''}"
            for what, of in trends.items()
            for unit in [1e6 if what == "memory" else 1.0]
        ]
        print(f"  {name}, an hour in the halves of its longest life: {', '.join(parts)}")
    for text in outcome.broken:
        print(f"BROKEN: {text}")


if __name__ == "__main__":
    sys.exit(main())
