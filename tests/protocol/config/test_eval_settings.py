"""[eval]: when an evaluation is due, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from slipstream.protocol.config import ConfigError, EvalSection, load
from slipstream.protocol.status import Evaluation, evaluation_metrics
from tests.kit import config


@pytest.mark.parametrize(
    ("settings", "due"),
    [
        ({"every": 5}, [5, 10]),
        ({"every": 5, "at_start": True}, [0, 5, 10]),
        ({"every": 5, "at_end": True}, [5, 10, 12]),
        ({"every": 6, "at_end": True}, [6, 12]),
        ({"at_start": True}, [0]),
        ({}, []),
    ],
)
def test_when_an_evaluation_is_due(settings: Any, due: list[int]) -> None:
    section = EvalSection(**settings)
    assert [step for step in range(13) if section.is_due(step, steps=12)] == due


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"every": 5, "temperature": 0.001}, "eval.temperature = 0.001: vLLM would sample at 0.01"),
        ({"every": 5, "temperature": 0, "group_size": 4}, "all episodes of a row would be the same"),
        ({"rows": 32}, "eval.rows = 32 has no effect, as there is no evaluation: set eval.every"),
        ({"every": 5, "group_size": 0}, "greater than or equal to 1"),
        ({"every": -1}, "greater than or equal to 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        config(eval=settings)


def test_settings_may_stay_where_the_evaluations_are_turned_off(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        '[run]\nname = "x"\n[model]\npath = "m"\n[task]\npath = "t.py:task"\n'
        "[eval]\nat_start = true\nat_end = true\nrows = 32\ntemperature = 0\n",
        encoding="utf-8",
    )
    turned_off = load(run_file, ["--eval.at_start", "false", "--eval.at_end", "false"])
    assert turned_off.eval.unread == ["rows", "temperature"]
    assert load(run_file).eval.unread == []


@pytest.mark.parametrize(("rows", "wanted"), [("0", "at least 1"), ("2.5", "a whole number")])
def test_a_number_of_rows_that_cannot_be_is_told_once(tmp_path: Path, rows: str, wanted: str) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text('[run]\nname = "x"\n[model]\npath = "m"\n[task]\npath = "t.py:task"\n', encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load(run_file, ["--eval.every", "5", "--eval.rows", rows])
    (line,) = [line for line in str(error.value).splitlines() if "eval.rows" in line]
    assert f"must be {wanted}, or 'all'" in line


def test_figures_have_the_names_of_trl_and_only_what_is_known() -> None:
    found = evaluation_metrics(Evaluation(5, 5, 1, rows=2, done=2, reward=0.5, rewards={"right": 0.5}, mean_length=9.0))
    assert found["eval/reward"] == 0.5
    assert found["eval/rewards/right/mean"] == 0.5
    assert found["eval/completions/mean_length"] == 9.0
    assert found["eval/step"] == 5
    assert "eval/reward_std" not in found
    assert not any("@" in name for name in found)
