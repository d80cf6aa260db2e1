"""`slipstream report`: everything that a run left behind, in one file that needs nothing else."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.deploy.commands import report
from slipstream.protocol import history
from slipstream.protocol.config import ConfigError
from slipstream.protocol.history import PageData
from slipstream.protocol.status import LearnerStatus, Limit
from slipstream.rollout_queue.observe.history import History
from tests.kit.status import status

HOSTILE = "</script><script>alert(1)</script><!-- \x1b[31m \u2028"


def rollout(number: int, text: str = "hi", **fields: Any) -> dict[str, Any]:
    counts = dict.fromkeys(("turns", "tool_calls", "tool_failures", "sampled_tokens"), 1)
    messages = [{"role": "user", "content": text}]
    known = {"ticket_id": f"{number}.0", "index": number, "epoch": 0, "number": 0, "worker_id": "w", "reward": 0.5}
    return {
        **known,
        **counts,
        "reward_components": {},
        "finish_reason": "stop",
        "versions": [1, 2],
        "messages": messages,
        **fields,
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "night"
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text('[run]\nname = "night"\n[queue]\nmax_staleness = 2\n')
    lines = [{"step": step, "reward": step / 10, "kl": None, "groups_dropped": {"a": 1}} for step in range(1, 6)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "rew')
    views = [rollout(number, HOSTILE) for number in range(4)]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(view) + "\n" for view in views) + '{"tick')
    (folder / "evaluations.jsonl").write_text(
        '{"step": 4, "version": 4, "group_size": 2, "reward": 0.25, "best@2": 1}\n'
    )
    kept = History(folder / history.FOLDER, 10**9)
    for step in range(5):
        learner = LearnerStatus(session=1, step=step, metrics={"reward": 0.0})
        limit = Limit("servers", "The vLLM servers limit the run.") if step == 3 else None
        kept.add(status(uptime_s=step, step=step, learner=learner, limit=limit), 1000.0 + 10 * step)
    kept.close()
    return folder


def data_of(path: Path) -> PageData:
    found = re.search(r'id="data" data-encoding="gzip">([^<]*)</script>', path.read_text())
    assert found is not None
    return msgspec.json.decode(gzip.decompress(base64.b64decode(found[1])), type=PageData)


def test_the_command_says_what_the_file_holds_in_words_or_as_json(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.html"
    report.report(run_dir, out=out)
    assert capsys.readouterr().out.startswith(f"{out}: 5 steps, 4 rollouts, 5 states, ")
    report.report(run_dir, out=out, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told == {"file": str(out), "steps": 5, "rollouts": 4, "states": 5, "bytes": out.stat().st_size}


def test_a_report_holds_what_the_run_left_behind(run_dir: Path, tmp_path: Path) -> None:
    report.write(run_dir, tmp_path / "r.html")
    found = data_of(tmp_path / "r.html")
    assert (found.run, found.live, found.max_staleness, found.now) == ("night", False, 2, 1040.0)
    assert found.steps["reward"] == [0.1, 0.2, 0.3, 0.4, 0.5], "the learner's own, and not what the queue saw"
    assert found.steps["at"] == [1010.0, 1020.0, 1030.0, 1040.0, 1040.0]
    assert [at for at, _ in found.statuses] == [1000.0 + 10 * step for step in range(5)]
    assert found.statuses[3][1].step == 3
    assert found.time["step"] == [0, 1, 2, 3, 4]
    assert [view.messages for view in found.rollouts] == [[{"role": "user", "content": HOSTILE}]] * 4
    assert found.evaluations[0].reward == 0.25
    assert found.status is not None
    assert found.status.limit == found.statuses[3][1].limit, "the newest that its queue knew"
    assert found.events[0].text == "the queue started"


def test_a_report_ends_with_what_the_summary_says_kept_the_run_from_learning(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "summary.json").write_text('{"steps": 5, "nothing_learnt": "nothing was learnt: the gradient was 0"}')
    found = report.write(run_dir, tmp_path / "r.html")
    assert found.status is not None
    for status_at_end in (found.status, found.statuses[-1][1]):
        assert [cause.text for cause in status_at_end.diagnosis] == ["nothing was learnt: the gradient was 0"]
    assert found.statuses[0][1].diagnosis == []


def test_a_report_is_one_file_that_runs_no_other_script(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    report.write(run_dir, out)
    html = out.read_text()
    assert "page/" not in re.sub(r"<script>.*?</script>|<style>.*?</style>", "", html, flags=re.S)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    assert "default-src 'none'" in policy
    allowed = set(re.findall(r"'sha256-([^']*)'", policy))
    scripts = re.findall(r"<script>(.*?)</script>", html, flags=re.S)
    assert {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts} == allowed
    assert len(scripts) > 5
    assert "alert(1)" not in html, "what a policy says lies packed in the data"


def test_a_run_beside_another(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text('{"step": 1, "reward": 0.9}\n')
    data = report.write(run_dir, tmp_path / "r.html", other)
    assert data.compare == {"run": "other", "time": {}, "steps": {"step": [1.0], "reward": [0.9], "at": [None]}}


def test_a_step_that_the_queue_did_not_see_by_itself_lies_between_its_neighbours() -> None:
    times = report._StepTimes({"step": [2.0, 2.0, 4.0], "at": [100.0, 110.0, 140.0]})
    assert [times.of(step) for step in (1, 2, 3, 4, 9)] == [100.0, 100.0, 125.0, 140.0, 140.0]
    assert report._StepTimes({}).of(1) is None


def test_no_step_lies_in_a_stop_of_the_run() -> None:
    """Steps 5 and 6 were made before the stop and again after it, as the run was resumed from step 4."""
    rows = [(2.0, 10.0), (6.0, 20.0), (4.0, 9000.0), (8.0, 9010.0)]
    times = report._StepTimes({"step": [step for step, _ in rows], "at": [at for _, at in rows]})
    assert [times.of(step) for step in (2, 3, 4, 6, 8)] == [10.0, 4505.0, 9000.0, 9005.0, 9010.0]


def test_a_long_run_is_thinned_out_evenly(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MAX_ROLLOUTS", 100)
    (run_dir / "rollouts.jsonl").write_text("".join(json.dumps(rollout(number)) + "\n" for number in range(1000)))
    numbers = [view.index for view in report.read_run(run_dir).rollouts]
    assert numbers == list(range(0, 1000, 16))


def test_bad_input_what_is_no_run_directory_is_named(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty: holds neither metrics\.jsonl nor history/: give the dir"):
        report.write(tmp_path / "empty", tmp_path / "r.html")
    with pytest.raises(ConfigError, match=r"nowhere: there is no such directory"):
        report.report(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"r\.html: cannot be written: .*choose another place with -o"):
        report.write(run_dir, tmp_path / "nowhere" / "r.html")
    before = (run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: the page is written as a file that ends in \.html"):
        report.write(run_dir, run_dir / "metrics.jsonl")
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    with pytest.raises(ConfigError, match="it is the run itself; name another one"):
        report.report(run_dir, run_dir)


def test_what_no_run_writes_is_left_out_of_a_report(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_dir / "run.toml").write_text("run = 5")
    (run_dir / "metrics.jsonl").write_text('{"step": 77, "reward": ' + "9" * 400 + "}\n")
    found = report.read_run(run_dir)
    assert (found.run, found.max_staleness) == (run_dir.name, 4)
    assert found.steps["step"][-1] == 77
    monkeypatch.setattr(report, "MAX_TEXT", 1000)
    long = {**rollout(1), "messages": [{"role": "assistant", "content": "x" * 400}]}
    (run_dir / "rollouts.jsonl").write_text((json.dumps(long) + "\n") * 50)
    assert 0 < len(report.read_run(run_dir).rollouts) <= 3
