"""`slipstream status` and `rollouts` of a run that is over: its files say how it ended."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from slipstream.deploy import cli
from slipstream.deploy.commands.ended import EndedRun, find, render_ended
from slipstream.deploy.run.run_directory import write_resolved
from slipstream.protocol import checkpoints, history
from slipstream.protocol.collapse import CAUSE
from slipstream.protocol.config import RunConfig, load
from slipstream.protocol.messages import ServerState
from slipstream.protocol.status import Cause, Status
from slipstream.rollout_queue.observe.history import History
from slipstream.rollout_queue.store.base import hold_lock_file
from tests.deploy.commands.test_report import rollout
from tests.kit.ports import free_port
from tests.kit.status import server, status

NOW, HOUR = 1_000_000.0, 3600.0

TOOL = Cause("tool search", "tool search fails in 9 of its newest 9 calls", "bad", 60.0)


@pytest.fixture
def config(run_file: Path) -> RunConfig:
    settings = load(run_file, ["--learner.steps", "9"])
    settings.run_dir.mkdir(parents=True)
    return settings


def test_a_run_that_is_over_is_not_followed(config: RunConfig, run_file: Path) -> None:
    stepped(config, 9)
    summed_up(config, 9)
    found = CliRunner().invoke(cli.app, ["rollouts", str(run_file), "--follow", "--learner.steps", "9"])
    assert "no new rollouts will come" in str(found.exception)


def stepped(config: RunConfig, steps: int, at: float = NOW - 3 * HOUR) -> None:
    """Leave what a learner writes of its steps; the last line is cut off."""
    path = config.run_dir / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, steps + 1)) + '{"step": 99')
    os.utime(path, (at, at))


def looked(config: RunConfig, at: float = NOW - 3 * HOUR, **fields: Any) -> None:
    """Leave what a queue writes of its status."""
    kept = History(config.run_dir / history.FOLDER, 10**9)
    kept.add(status(step=1), at - 60.0)
    kept.add(status(**fields), at)
    kept.close()


def summed_up(config: RunConfig, steps: int, **fields: Any) -> None:
    plain = {
        "steps": steps,
        "reward_first10": 0.25,
        "reward_last10": 0.75,
        "reward_over": 4,
        "ended_at": NOW - 3 * HOUR,
        **fields,
    }
    (config.run_dir / "summary.json").write_text(json.dumps(plain))


def saved(config: RunConfig, step: int) -> None:
    folder = checkpoints.folder(config.run_dir) / checkpoints.name_of(step)
    folder.mkdir(parents=True)
    (folder / checkpoints.STATE).touch()


def ended(config: RunConfig) -> EndedRun:
    found = find(config, NOW)
    assert found is not None
    return found


def shown(found: EndedRun) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render_ended(found, NOW))
    return capture.get()


def test_a_run_that_finished_says_so_with_its_rewards_and_what_kept_it_from_learning(config: RunConfig) -> None:
    stepped(config, 9)
    looked(config, step=9, total_steps=9, finished=True)
    causes = msgspec.to_builtins([Cause("rewards", "all are 0", "bad"), TOOL])
    summed_up(config, 9, nothing_learnt="nothing was learnt: the gradient was 0", diagnosis=causes)
    lines = shown(ended(config)).splitlines()
    assert lines[0].rstrip() == (
        "run small  ended 3 h ago: 9 of 9 steps made, reward 0.250 over its first 4 steps, 0.750 over its last"
    )
    assert [line.split("  ")[0] for line in lines[1:3]] == ["run", "tool search, for 60 s"]
    assert "nothing was learnt: the gradient was 0" in lines[1]
    assert "tool search fails in 9 of its newest 9 calls" in lines[2]
    assert any("step 9/9" in line for line in lines[3:])


def test_a_run_that_was_killed_names_its_last_step_and_checkpoint(config: RunConfig) -> None:
    stepped(config, 5)
    saved(config, 4)
    assert ended(config).describe(NOW) == (
        "stopped 3 h ago after step 5 of 9, with a checkpoint of step 4; continue with --resume"
    )
    looked(config, NOW - 2 * HOUR, step=6, total_steps=20, diagnosis=[TOOL])
    found = ended(config)
    assert found.describe(NOW).startswith("stopped 2 h ago after step 6 of 20")
    assert found.diagnosis == [TOOL]


def test_a_run_whose_policy_was_destroyed_is_to_be_resumed_with_a_lower_rate(config: RunConfig) -> None:
    looked(config, step=6, total_steps=20, diagnosis=[Cause(CAUSE, "the update of step 5 destroyed the policy", "bad")])
    assert "learner.learning_rate" in ended(config).describe(NOW)


def test_a_run_without_a_step_and_one_that_was_given_up(config: RunConfig) -> None:
    looked(config, step=0)
    assert ended(config).describe(NOW) == "stopped 3 h ago before its first step; start it again"
    looked(config, NOW - HOUR, gave_up="the first 16 groups failed")
    found = ended(config)
    assert (found.end, found.describe(NOW)) == (
        "given_up",
        "ended 60 min ago: given up, since its first groups all failed",
    )
    assert "GAVE UP: the first 16 groups failed" in shown(found)


def test_the_summary_of_an_earlier_end_is_not_that_of_a_run_that_went_on(config: RunConfig) -> None:
    summed_up(config, 4, nothing_learnt="nothing was learnt", ended_at=NOW - 9 * HOUR)
    stepped(config, 5)
    found = ended(config)
    assert (found.end, found.step, found.summary, found.diagnosis) == ("stopped", 5, None, [])


def test_files_that_are_broken_or_those_of_an_earlier_release_are_no_obstacle(config: RunConfig) -> None:
    stepped(config, 5)
    (config.run_dir / "summary.json").write_text('{"steps": 5}')
    (config.run_dir / "queue.db").write_text("not a database, and longer than its header would be" * 9)
    assert ended(config).describe(NOW) == "ended 3 h ago: 5 of 9 steps made"
    (config.run_dir / "summary.json").write_text('{"steps": ')
    assert ended(config).end == "stopped"


def test_a_run_that_may_be_under_way_has_not_ended(config: RunConfig) -> None:
    assert find(config, NOW) is None
    stepped(config, 5, NOW - 300.0)
    assert find(config, NOW) is None, "no lock is here: it may run elsewhere"
    for name in ("launcher.lock", "queue.lock"):
        with hold_lock_file(config.run_dir / name):
            assert find(config, NOW) is None
    assert ended(config).describe(NOW).startswith("stopped 5 min ago")
    stepped(config, 5, NOW - 9.0)
    assert ended(config).describe(NOW).startswith("stopped 9 s ago"), "its launcher starts nothing again"
    (config.run_dir / "launcher.lock").unlink()
    assert find(config, NOW) is None, "its queue may be starting again"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["slipstream", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code


def test_the_commands_read_the_files_where_the_queue_has_ended(
    config: RunConfig, run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stepped(config, 9)
    summed_up(config, 9)
    looked(config, step=9, total_steps=9, servers=[server("vllm-7", ServerState.SERVING)])
    run(monkeypatch, "status", run_file)
    assert "steps made, reward 0.250 over its first 4 steps" in " ".join(capsys.readouterr().out.split())
    run(monkeypatch, "status", run_file, "--json")
    told = msgspec.json.decode(capsys.readouterr().out, type=dict[str, Any])
    assert (told["end"], told["step"], told["ended_at"]) == ("finished", 9, NOW - 3 * HOUR)
    assert msgspec.convert(told["status"], Status).step == 9
    (config.run_dir / "rollouts.jsonl").write_text(json.dumps(rollout(7, step=3)) + "\n")
    run(monkeypatch, "rollouts", run_file)
    out = capsys.readouterr().out
    assert out.startswith("run small ended ")
    assert "ticket 7.0" in out
    run(monkeypatch, "rollouts", run_file, "--json")
    assert msgspec.json.decode(capsys.readouterr().out)["ticket_id"] == "7.0"
    run(monkeypatch, "servers", "list", run_file)
    out = capsys.readouterr().out
    assert "as its queue last saw them:" in out
    assert "vllm-7" in out
    run(monkeypatch, "servers", "list", run_file, "--json")
    assert msgspec.json.decode(capsys.readouterr().out)["name"] == "vllm-7"
    monkeypatch.setattr(sys, "argv", ["slipstream", "rollouts", str(run_file), "--eval"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert "; rollouts of evaluations were in its queue alone; evaluations.jsonl has" in capsys.readouterr().err


def test_a_watch_of_a_run_that_is_over_shows_its_end_at_once(
    config: RunConfig, run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stepped(config, 9)
    summed_up(config, 9)
    monkeypatch.setattr("slipstream.deploy.commands.status._MAX_AWAY_S", 1e9)
    run(monkeypatch, "status", run_file, "--watch")
    assert "9 of 100 steps made, reward 0.250" in " ".join(capsys.readouterr().out.split())


def test_a_launcher_without_a_queue_is_starting_or_ending(config: RunConfig, run_file: Path) -> None:
    stepped(config, 5)
    with hold_lock_file(config.run_dir / "launcher.lock"):
        found = CliRunner().invoke(cli.app, ["status", str(run_file)])
    assert "run small is starting or ending: its launcher runs, and no queue answers at" in str(found.exception)


def test_a_running_run_is_asked_at_the_port_that_it_was_started_with(config: RunConfig, run_file: Path) -> None:
    """Its file has another: the port came on the command line."""
    started, given = free_port(), free_port()
    write_resolved(load(run_file, ["--queue.port", str(started)]))

    def asked(*arguments: str) -> str:
        return str(CliRunner().invoke(cli.app, [*arguments]).exception)

    with hold_lock_file(config.run_dir / "launcher.lock"):
        assert f"http://127.0.0.1:{started}" in asked("status", str(run_file))
        assert f"http://127.0.0.1:{started}" in asked("servers", "list", str(run_file))
        assert f"http://127.0.0.1:{given}" in asked("status", str(run_file), "--queue.port", str(given))
    assert f"http://127.0.0.1:{config.queue.port}" in asked("status", str(run_file))


def test_servers_of_a_run_that_left_nothing_of_them_are_refused_in_one_line(config: RunConfig, run_file: Path) -> None:
    found = CliRunner().invoke(cli.app, ["servers", "list", str(run_file)])
    assert "no queue answers at http://127.0.0.1:" in str(found.exception)
    stepped(config, 9)
    summed_up(config, 9)
    found = CliRunner().invoke(cli.app, ["servers", "list", str(run_file)])
    assert "; it left no state of its servers" in str(found.exception)
