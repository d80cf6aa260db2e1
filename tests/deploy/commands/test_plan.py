"""`slipstream plan`: learns from what a run left behind, and says what would help."""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from slipstream.deploy.cli import app
from slipstream.deploy.commands import probe as commands_probe
from slipstream.deploy.planning import probe
from slipstream.deploy.planning.advice import Plan, plan, with_counts
from slipstream.deploy.planning.rates import Record, read_record
from slipstream.deploy.planning.serving import Curve
from slipstream.protocol import history
from slipstream.protocol.config import ConfigError, to_toml
from slipstream.protocol.history import PageData
from slipstream.protocol.status import Limit
from tests.kit.config import config
from tests.kit.learner import status

RUN = config(
    {
        "rollout": {"group_size": 4},
        "learner": {"groups_per_step": 4, "steps": 12},
        "worker": {"episodes": 16},
        "vllm": {"max_num_seqs": 16},
    }
)


def step(number: int, **fields: Any) -> dict[str, Any]:
    """Return a step of 5 s, of which the learner waited 4: 16 rollouts of 20 tokens."""
    return {
        "step": number,
        "rollouts": 16,
        "tokens_sampled": 320,
        "tokens_trained": 160,
        "completions/mean_length": 20.0,
        "rollout/turns_mean": 2.0,
        "frac_reward_zero_std": 0.5,
        "staleness_mean": 1.0,
        "staleness_max": 2,
        "step_time": 5.0,
        "wait_s": 4.0,
        **fields,
    }


def write(folder: Path, steps: list[dict[str, Any]], views: int = 4, **view: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(to_toml(RUN))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps) + '{"step": 99, "rew')
    views_of = [{"turns": 2, "sampled_tokens": 10 * (1 + n % 2), "evaluation": None, **view} for n in range(views)]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in views_of))
    server = {"transfer_s": 0.1, "pause_s": 0.01, "took_s": 0.2}
    lines = [{"step": n, "servers": {"vllm-0": {**server, "took_s": took_s}}} for n, took_s in enumerate((9.0, 0.2))]
    (folder / "publications.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    # The first step waits for the servers to start.
    return write(tmp_path / "run", [step(1, step_time=90.0, wait_s=89.0), *(step(n) for n in range(2, 14))])


def asked(*words: str | Path, width: int = 80) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, words)], env={"COLUMNS": str(width)})


def test_a_run_is_learnt_from_its_files(run_dir: Path) -> None:
    record: Record = read_record(run_dir)
    rates = record.rates
    assert record.measured.steps == 12
    assert record.measured.steps_per_s == pytest.approx(0.2)
    assert record.measured.learner_wait == pytest.approx(0.8)
    assert rates.step_s == pytest.approx(1.0)
    assert set(rates.zero_variance) == {0.5}
    # The rollouts that were kept are shorter than the mean; the publication that started the servers does not count.
    assert sorted({times.tokens for times in rates.episodes}) == pytest.approx([40 / 3, 80 / 3])
    assert [times.total_s for times in rates.publications] == [0.2]
    # 16 requests, 64 tokens a second.
    assert rates.curve.tokens_per_s(16) == pytest.approx(64)
    assert any("no times of tools" in note for note in record.notes)


def test_a_run_that_went_at_two_speeds_is_noted(tmp_path: Path) -> None:
    alike = write(tmp_path / "alike", [step(n, step_time=5.0 + n % 2) for n in range(20)])
    assert not any("first half" in note for note in read_record(alike).notes)
    slower = write(tmp_path / "slower", [step(n, step_time=5.0 if n < 10 else 10.0) for n in range(20)])
    noted = [note for note in read_record(slower).notes if "first half" in note]
    assert "64 tokens/s in the first half of its steps and 32 in the second" in noted[0]


def test_times_of_tools_rewards_and_turns_are_learnt(tmp_path: Path) -> None:
    """Ten requests of 50 ms a token; how that depends on their number is assumed, and said so."""
    times = {"rollout/generate_s": 1.0, "rollout/tools_s": 0.5, "rollout/reward_s": 0.25}
    steps = [step(number, tokens_sampled=1000, **times) for number in range(20)]
    run = write(tmp_path / "run", steps, timings={"generate": 1.0, "tools": 0.5, "reward": 0.25})
    record = read_record(run)
    assert record.rates.running == pytest.approx(10)
    assert record.rates.curve.token_s(10) == pytest.approx(0.05)
    assert {(times.tools_s, times.judge_s) for times in record.rates.episodes} == {(0.5, 0.25)}
    assert ["its servers ran about 10 requests each" in note for note in record.notes] == [True]


def test_the_plan_names_what_limits(run_dir: Path) -> None:
    rates = read_record(run_dir).rates
    made = plan(RUN, rates, steps=60)
    assert made.limit.part == "servers"
    assert made.advice.startswith("What helps most: one more vLLM server")
    assert [change.gain for change in made.changes] == sorted((change.gain for change in made.changes), reverse=True)
    slow = plan(RUN, replace(rates, step_s=30.0), steps=60)
    assert slow.limit.part == "learner"
    assert slow.prediction.steps_per_s == pytest.approx(1 / 30, rel=0.05)
    assert slow.advice == "None of these changes by itself brings more steps a second."
    assert plan(with_counts(RUN, servers=2), rates, steps=60).prediction.steps_per_s > made.prediction.steps_per_s


def test_a_run_that_is_planned_as_it_goes_is_limited_by_what_its_status_says(run_dir: Path) -> None:
    """A changed one by what the same rule says of its simulation."""
    folder = run_dir / history.FOLDER
    folder.mkdir()
    said = Limit("publication", "Publication limits the run: as measured.")
    entry = history.Entry(1.0, status(step=13, limit=said))
    with gzip.open(history.Part.named(folder, 1).path, "wb") as file:
        file.write(msgspec.json.encode(entry) + b"\n")
    assert said.text in asked(run_dir / "run.toml", "--from", run_dir, width=200).output
    changed = asked(run_dir / "run.toml", "--from", run_dir, "--servers", "2", width=200)
    assert changed.exit_code == 0
    assert said.text not in changed.output


def test_the_command_draws_it_or_prints_json(run_dir: Path) -> None:
    drawn = asked(run_dir / "run.toml", "--from", run_dir)
    assert drawn.exit_code == 0, drawn.output
    assert "one more vLLM server" in drawn.output
    assert "The vLLM servers limit the run" in drawn.output
    printed = asked(run_dir / "run.toml", "--from", run_dir, "--json", "--servers", "2", "--workers", "3")
    found = msgspec.json.decode(printed.output, type=Plan)
    assert (found.servers, found.workers, found.steps) == (2, 3, 100)


def test_a_plan_is_fitted_to_its_record_and_a_probe_comes_first(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(record: Record, folder: Path, servers: int) -> Curve:
        assert servers == 1
        curve = Curve.line(0.06, 0.004)  # twice as fast as in the run
        probe.save(curve, folder)
        return curve

    monkeypatch.setattr(commands_probe, "measure", measure)
    printed = asked(run_dir / "run.toml", "--from", run_dir, "--probe", "--json")
    found = msgspec.json.decode(printed.output, type=Plan)
    assert found.prediction.tokens_per_s == pytest.approx(read_record(run_dir).measured.tokens_per_s, rel=0.1)
    assert not any("is assumed" in note for note in found.notes)


@pytest.mark.parametrize("width", [80, 120])
def test_the_plan_is_read_without_sideways_scrolling(run_dir: Path, width: int) -> None:
    drawn = asked(run_dir / "run.toml", "--from", run_dir, width=width)
    assert drawn.exit_code == 0, drawn.output
    lines = [line.rstrip() for line in drawn.output.splitlines()]
    assert max(map(len, lines)) <= width
    assert "\u2026" not in drawn.output, "nothing is cut"
    assert any(line.startswith("one more vLLM server") and "\u2588" * (width // 10) in line for line in lines)


def test_the_plan_is_drawn_from_the_same_figures(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.html"
    drawn = asked(run_dir / "run.toml", "--from", run_dir, "--servers", "2", "-o", out, width=500)
    assert drawn.exit_code == 0, drawn.output
    packed = re.search(r'id="data" data-encoding="gzip">([^<]*)</script>', out.read_text())
    assert packed is not None
    page = msgspec.json.decode(gzip.decompress(base64.b64decode(packed[1])), type=PageData)
    assert page.plan is not None
    assert page.status is not None
    assert page.status.limit is not None
    assert page.plan.title.startswith("2 vLLM servers on this machine's cores, 1 worker: 100 steps simulated")
    texts = [change.text for change in page.plan.changes]
    assert {"vllm.count = 1", "each vLLM server on its own machine"} <= set(texts)
    assert "planned with vLLM servers = 2 (record: 1)" in page.plan.notes
    terminal = " ".join(drawn.output.split())
    for name, predicted, measured in page.plan.figures:
        assert " ".join(f"{name} {predicted} {measured}".split()) in terminal
    for text in (page.plan.title, page.plan.advice, page.status.limit.text, *(one.text for one in page.plan.changes)):
        assert text in terminal
    nowhere = asked(run_dir / "run.toml", "--from", run_dir, "-o", tmp_path / "nowhere" / "plan.html")
    assert isinstance(nowhere.exception, ConfigError)
    assert "choose another place with -o" in str(nowhere.exception)


def test_a_record_with_what_no_run_writes_is_named(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [step(number, tokens_prompt="many") for number in range(9)])
    with pytest.raises(ConfigError, match="hold what no run writes"):
        read_record(run)


@pytest.mark.parametrize("steps", [[], [step(1)]])
def test_a_run_without_two_steps_teaches_nothing(tmp_path: Path, steps: list[dict[str, Any]]) -> None:
    run = write(tmp_path / "run", steps)
    with pytest.raises(ConfigError, match="few steps first"):
        read_record(run)
    with pytest.raises(ConfigError, match=r"there is no such directory; .* --from"):
        read_record(tmp_path / "nothing")
    assert isinstance(asked(run / "run.toml", "--from", tmp_path / "nothing").exception, ConfigError)
