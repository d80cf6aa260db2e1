"""`slipstream summary`: what happened in a night, what it cost, and what is still wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.deploy import cli
from slipstream.deploy.commands import summary
from slipstream.deploy.commands.summary import RunSummary
from slipstream.protocol import history
from slipstream.protocol.collapse import CAUSE
from slipstream.protocol.messages import ServerState
from slipstream.protocol.status import FAILING, Cause, LearnerStatus, Stall, Status
from slipstream.rollout_queue.observe.history import History
from tests.kit.status import server, status, worker

STEP_S = 10.0


class Night:
    """A run with a status every second, of which its history keeps one in five; a step takes ten seconds."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.at = 1_000_000.0
        self.step, self.resumed, self.session, self.up_since = 0, 0, 1, self.at
        self.servers = {"vllm-0": (ServerState.SERVING, None), "vllm-1": (ServerState.SERVING, None)}
        self.workers: dict[str, dict[str, Any]] = {"worker-0": {"pid": 7}, "worker-1": {"pid": 8}}
        self.stalled = False
        self._kept = History(folder / history.FOLDER, 10**9)
        self._since: dict[str, float] = {}

    def goes_on(self, seconds: int, steps: bool = True, every_s: float = STEP_S, **fields: Any) -> None:
        for _ in range(seconds):
            self.at += 1
            if steps and self.at % every_s == 0:
                self.step += 1
            self._kept.add(self._status(**fields), self.at)

    def out(self, name: str, state: ServerState, reason: str) -> None:
        self.servers[name], self._since[name] = (state, reason), self.at

    def back(self, name: str) -> None:
        self.servers[name], self._since[name] = (ServerState.SERVING, None), self.at

    def _status(self, **fields: Any) -> Status:
        servers = [server(name, state, reason) for name, (state, reason) in self.servers.items()]
        for each in servers:
            each.since_s = self.at - self._since.get(each.name, self.at)
        workers = [worker(name, **{"seen_s_ago": 1.0, **of}) for name, of in self.workers.items()]
        metrics = {} if self.step == self.resumed else {"reward": self.step / 100}
        learner = LearnerStatus(session=self.session, step=self.step, metrics=metrics)
        of = {"servers": servers, "workers": workers, "learner": learner, "step": self.step, "total_steps": 500}
        return status(**{**of, "uptime_s": self.at - self.up_since, "stall": Stall(self.stalled, 0.0), **fields})

    def summary(self) -> RunSummary:
        self._kept.close()
        rewards = [{"step": step, "reward": step / 100, "tokens_trained": 50} for step in range(1, self.step + 1)]
        (self.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rewards))
        return summary.read(self.folder)


@pytest.fixture
def night(tmp_path: Path) -> Night:
    found = Night(tmp_path)
    found.goes_on(300)
    return found


def shown(found: RunSummary) -> list[str]:
    """The lines, without the time of day."""
    return [line.partition("  ")[2].partition("  ")[2] or line for line in str(summary.render(found)).splitlines()]


def test_a_quiet_night_is_five_lines(night: Night) -> None:
    night.goes_on(10, finished=True, tokens_sampled=2000)
    found = night.summary()
    assert not found.incidents
    assert found.lost_s == 0
    lines = str(summary.render(found)).splitlines()
    assert "finished, 31 of 500 steps in 5 min 5 s, " in lines[0]
    assert lines[1] == "reward 0.055 over its first 10 steps, 0.265 over its last"
    assert lines[2] == "2,000 tokens sampled, 78% of them trained, never stood still"
    assert lines[-1] == "all is as it should be"


def test_each_reward_function_and_role_is_named(night: Night) -> None:
    night.goes_on(1, finished=True)
    night.summary()
    file = night.folder / "metrics.jsonl"
    of = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [row | {"rewards/solver/mean": row["step"] / 10, "rewards/critic/mean": -1.0} for row in of]
    file.write_text("".join(json.dumps(row) + "\n" for row in lines))
    shown_lines = str(summary.render(summary.read(night.folder))).splitlines()
    assert shown_lines[2] == "solver 0.550 to 2.550; critic -1.000 to -1.000"


def test_what_stood_still_is_named_with_what_it_cost(night: Night) -> None:
    """A pause by a person for 77 s, in which no step was made."""
    night.out("vllm-1", ServerState.STALE, "paused by a person")
    night.goes_on(77, steps=False)
    night.back("vllm-1")
    night.goes_on(100)
    night.goes_on(1, finished=True)
    found = night.summary()
    (incident,) = found.incidents
    assert incident.about == "server vllm-1"
    assert 76 <= incident.seconds(0) <= 78
    assert 70 <= incident.lost_s <= 80
    (line,) = [line for line in shown(found) if "vllm-1" in line]
    assert line.startswith("server vllm-1: stale: paused by a person, 1 min 17 s, 1 min ")
    assert line.endswith(" without a step")


def test_a_standstill_that_nothing_explains_is_said_too(night: Night) -> None:
    night.goes_on(60, steps=False)
    night.goes_on(20)
    found = night.summary()
    assert [incident.text for incident in found.incidents] == ["no step, and nothing that was seen says why"]
    assert found.open == [
        "31 of 500 steps are made, with no checkpoint; if it was stopped, slipstream up --resume continues"
    ]
    night.goes_on(20, diagnosis=[Cause(CAUSE, "the update of step 30 destroyed the policy", "bad")])
    assert any("learner.learning_rate" in text and "--resume" in text for text in night.summary().open)


def test_a_clock_that_is_set_ahead_costs_no_time_and_is_named(night: Night) -> None:
    night.up_since += 3600  # the queue's own seconds continue
    night.at += 3600
    night.goes_on(60)
    night.out("vllm-1", ServerState.STALE, "paused by a person")
    night.goes_on(30)
    night.back("vllm-1")
    night.goes_on(20, finished=True)
    found = night.summary()
    assert found.lost_s == 0
    assert found.wall_s == pytest.approx(409, abs=6)
    about = {incident.about: incident for incident in found.incidents}
    assert about["the clock"].text.startswith("went ahead by 60 min: ")
    assert about["server vllm-1"].seconds(0) == pytest.approx(30, abs=6)
    assert any(line.startswith("the clock: went ahead by 60 min") for line in shown(found))


def test_a_run_that_was_stopped_for_an_hour_is_no_clock_that_was_set(night: Night) -> None:
    night.at += 3600
    night.up_since = night.at
    night.session = 2
    night.goes_on(60)
    assert "the clock" not in {incident.about for incident in night.summary().incidents}


def test_a_crash_that_cost_steps(night: Night) -> None:
    """The second of two starts is the one that made steps."""
    night.at += 40
    night.up_since = night.at
    night.goes_on(30, steps=False)
    night.at += 40
    night.session, night.step, night.resumed, night.up_since = 2, 25, 25, night.at
    night.goes_on(50)
    lines = shown(night.summary())
    (line,) = [line for line in lines if line.startswith("the run: ")]
    assert re.match(r"the run: was stopped, and continued, 2 times, .* [45] steps made again", line)
    assert not [line for line in lines if line.startswith(("the queue", "the learner: ended"))]
    assert night.summary().lost_s > 40


def test_a_server_that_ended_and_joined_again_is_told(night: Night) -> None:
    night.out("vllm-1", ServerState.JOINING, "it does not answer yet")
    night.goes_on(20)
    night.back("vllm-1")
    night.goes_on(20)
    (line,) = [line for line in shown(night.summary()) if line.startswith("server vllm-1")]
    assert re.match(r"server vllm-1: joining: it does not answer yet, (1\d|20) s", line)


def test_a_server_that_starts_with_the_run_is_not_told(night: Night) -> None:
    night.out("vllm-1", ServerState.JOINING, None)
    night.session, night.up_since = 2, night.at
    night.goes_on(20)
    night.back("vllm-1")
    night.goes_on(20)
    assert not [line for line in shown(night.summary()) if line.startswith("server vllm-1")]


def test_a_resume_is_told_from_its_step_when_it_is_seen_after_later_ones(night: Night) -> None:
    night.at += 40
    night.session, night.step, night.resumed = 2, 20, 20
    night.goes_on(50, every_s=1)
    (line,) = [line for line in shown(night.summary()) if line.startswith("the learner: ended")]
    assert re.match(
        r"the learner: ended after step (29|30), and continued from step 20, .* (9|10) steps made again", line
    )


def test_what_comes_back_again_and_again_is_one_line_and_what_lasts_is_wrong(night: Night) -> None:
    for number in range(3):
        night.workers["worker-1"]["pid"] = 100 + number
        night.goes_on(30)
    night.workers["worker-0"]["seen_s_ago"] = 30.0
    night.out("vllm-0", ServerState.QUARANTINED, "its log-probs are another model's")
    night.goes_on(20)
    night.goes_on(5, finished=True)
    found = night.summary()
    lines = shown(found)
    assert any(
        "worker worker-1: its process had ended without a word, and was started again, 3 times" in line
        for line in lines
    )
    assert found.open == [
        "worker worker-0: not heard from: it was killed, hangs, or cannot reach the queue",
        "server vllm-0: quarantined: its log-probs are another model's",
    ]
    assert any(line.startswith("server vllm-0: quarantined") and line.endswith("and still") for line in lines)


def test_what_lasts_is_told_with_its_remedy(night: Night) -> None:
    reason = f"{'its log-probs are those of another model, ' * 5}by 3 nats. Restart the server"
    night.out("vllm-0", ServerState.QUARANTINED, reason)
    night.goes_on(20)
    night.goes_on(5, finished=True)
    assert night.summary().open == [f"server vllm-0: quarantined: {reason}"]


def test_twenty_kinds_are_ten_lines(night: Night) -> None:
    for number in range(20):
        night.servers[f"other-{number}"] = ServerState.SERVING, None
        night.goes_on(2)
        night.out(f"other-{number}", ServerState.DOWN, "it does not answer")
        night.goes_on(number + 6)
        night.back(f"other-{number}")
    night.goes_on(5)
    lines = shown(night.summary())
    assert sum("it does not answer" in line for line in lines) == 8
    assert "and 12 others that cost less: slipstream report" in "\n".join(lines)


def test_the_command_prints_it_and_json_has_all(night: Night) -> None:
    night.out("vllm-1", ServerState.DOWN, "\x1b[31mred")
    night.goes_on(30)
    night.summary()
    printed = CliRunner().invoke(cli.app, ["summary", str(night.folder)])
    assert printed.exit_code == 0
    assert "\x1b" not in printed.output
    as_json = json.loads(CliRunner().invoke(cli.app, ["summary", str(night.folder), "--json"]).output)
    assert as_json["incidents"][0]["about"] == "server vllm-1"
    missing = CliRunner().invoke(cli.app, ["summary", str(night.folder / "none")])
    assert "give the directory of a run" in str(missing.exception)


def test_why_a_run_was_given_up_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    why = "reward wrong returned 1 rewards for 8 completions"
    fails = Cause(f"{FAILING}: reward", f"all groups failed: {why}", "bad", since_s=9.0)
    failed = {"gave_up": f"the first 16 groups failed: {why}", "diagnosis": [fails]}
    at_once = Night(tmp_path / "at_once")
    at_once.goes_on(30, steps=False, **failed)
    assert at_once.summary().open == [f"the run was given up: {failed['gave_up']}"]
    summary.tell(at_once.folder)
    assert capsys.readouterr().err == "", "it made no step: the error that ended it says the same"
    later = Night(tmp_path / "later")
    later.goes_on(300)
    later.goes_on(30, steps=False, **failed)
    assert later.summary().steps == 30
    summary.tell(later.folder)
    assert "30 of 500 steps" in capsys.readouterr().err


def test_a_run_does_not_fail_by_its_summary(
    night: Night, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    night.summary()
    summary.tell(night.folder / "none")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(summary, "read_run", lambda folder: 1 / 0)
    summary.tell(night.folder)
    assert "no summary of" in capsys.readouterr().err


def test_a_run_that_was_stopped_and_resumed_did_not_stand_still_meanwhile(night: Night) -> None:
    night.at += 3600
    night.up_since = night.at
    night.goes_on(12, steps=False)
    night.session += 1
    night.goes_on(120)
    found = night.summary()
    assert [(of.about, of.text) for of in found.incidents] == [("the run", "was stopped, and continued")]
    assert found.lost_s < 60
