"""Trackers get each step once, under the names of `metrics.jsonl`, and can neither hold nor end a run."""

from __future__ import annotations

import inspect
import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.tracking import GeneralTracker
from msgspec import structs

from slipstream.learner.report.records import EARLIER
from slipstream.learner.report.trackers import TRACKERS, Tracker, wanted_trackers
from slipstream.learner.report.tracking import FILE_NAME, Background, Memory, Tracking, numbers, sent_settings, start_of
from slipstream.protocol.config import ConfigError, RunConfig, TrackingSection
from slipstream.protocol.config.sections import run
from slipstream.protocol.rollouts import RolloutView
from tests.kit import LEARNER, config
from tests.learner.report.test_summary import step_record

WORDS = [{"role": "user", "content": "2 by 3?"}, {"role": "assistant", "content": "6 *stars*"}]
VIEW = RolloutView("t", 0, 0, 0, "w", 0.5, {}, "stop", 1, 0, 0, 3, None, WORDS, step=1)


def run_of(folder: Path, *trackers: str, **tracking: Any) -> RunConfig:
    return config(LEARNER, run={"dir": str(folder), "name": "test"}, tracking={"report_to": list(trackers), **tracking})


def session(settings: RunConfig, after: int, *steps: int, newest: int = 0, reward: float = 0.5) -> list[str]:
    """Steps of one session that continues after a checkpoint; what it warns of."""
    warned: list[str] = []
    tracking = Tracking(settings, after, newest, warned.append)
    for step in steps:
        tracking.step(step, step_record(step, reward).flat(), [VIEW])
    tracking.close(60.0)
    return warned


def test_tensorboard_has_each_step_once_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    settings = run_of(tmp_path, "tensorboard", rollouts_every=1)
    assert session(settings, 0, 1, 2, 3) == []
    assert session(settings, 2, 3, 4, newest=3, reward=0.75) == []
    events = accumulator.EventAccumulator(str(tmp_path / "test" / "tensorboard"), {"scalars": 0, "tensors": 0})
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.75),
        (4, 0.75),
    ]
    assert set(events.Tags()["scalars"]) == set(numbers(step_record(1).flat())) - {"step"}
    (text, *_) = events.Tensors("rollouts/text_summary")[0].tensor_proto.string_val
    assert b"**reward 0.5**, ended by stop\n\n    user: 2 by 3?\n    assistant: 6 *stars*" in text


def test_trackio_has_each_step_once_and_goes_on_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="trackio is not installed: pip install 'slipstream-rl[trackio]'")
    settings = run_of(tmp_path, "trackio", rollouts_every=1)
    assert session(settings, 0, 1, 2, 3) == []
    assert session(settings, 2, 3, 4, newest=3) == []
    with sqlite3.connect(tmp_path / "trackio" / "slipstream.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    lines = [(name, step) for name, step, line in rows if "reward_std" in _text(line)]
    assert lines == [("test", 1), ("test", 2), ("test", 3), ("test", 4)]
    assert any("2 by 3?" in _text(line) for _, _, line in rows)


def _text(line: Any) -> str:
    return line.decode() if isinstance(line, bytes) else str(line)


def test_wandb_offline_writes_two_parts_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'slipstream-rl[wandb]'")
    settings = run_of(tmp_path, "wandb", rollouts_every=1)
    assert session(settings, 0, 1, 2, 3) == []
    assert session(settings, 2, 3, 4, newest=3) == []
    files = sorted((tmp_path / "test" / "wandb").glob("offline-run-*/run-*.wandb"))
    run = Memory.of(tmp_path / "test").ids["wandb"]
    assert [file.name for file in files] == [f"run-{run}.wandb"] * 2
    assert all(b"reward_std" in file.read_bytes() for file in files)


class Stand(GeneralTracker):  # type: ignore[misc]
    """Takes the place of each tracker's class; writes down what it is given."""

    requires_logging_directory = False
    main_process_only = False
    made: list[Stand]

    def __init__(self, *_: Any, **given: Any) -> None:
        super().__init__(_blank=True)
        self.given = given
        self.calls: list[Any] = []
        self.axes: dict[str, str] = {}
        self.made.append(self)

    def start(self) -> None:
        self.calls.append("start")

    @property
    def tracker(self) -> Any:
        return Run(self)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("settings", values))

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Write down what is shown at which step: of a tracker with axes of its own, by these."""
        axis = self.axes.get("eval/*" if "eval/step" in values else "*")
        self.calls.append((values.get(axis or "", step), {key: values[key] for key in values if key != "step"}))

    def finish(self) -> None:
        self.calls.append("finish")

    @property
    def steps(self) -> list[int]:
        return [call[0] for call in self.calls if isinstance(call[0], int)]


class Run:
    """The object behind a tracker, as far as we use it."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand

    info = property(lambda self: self)
    run_id = hash = id = "their-id"

    def set_name(self, name: str) -> None: ...

    def set_initial_iteration(self, step: int) -> None: ...

    def define_metric(self, name: str, step_metric: str) -> None:
        self.stand.axes[name] = step_metric


@pytest.fixture
def stands(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Stand]]:
    monkeypatch.setattr(Tracker, "is_installed", lambda tracker: True)

    def put(tracker: str) -> list[Stand]:
        made: list[Stand] = []
        kind = type("Stand", (Stand,), {"name": tracker, "made": made})
        monkeypatch.setattr(type(TRACKERS[tracker]), "kind", lambda self: kind)
        return made

    return put


@pytest.mark.parametrize("tracker", TRACKERS)
def test_each_tracker_gets_each_step_once_over_a_resume(
    tracker: str, tmp_path: Path, stands: Callable[[str], list[Stand]]
) -> None:
    """The first session dies at step 5, after its checkpoint of step 2; the second dies at step 3."""
    made, settings = stands(tracker), run_of(tmp_path, tracker)
    assert session(settings, 0, 1, 2, 3, 4, 5) == []
    assert session(settings, 2, 3, newest=5) == []
    assert session(settings, 2, 3, 4, 5, 6, newest=3) == []
    sent = [stand.steps for stand in made]
    if TRACKERS[tracker].replaces_steps:
        assert sent == [[1, 2, 3, 4, 5], [3], [3, 4, 5, 6]]
        assert [stand.given.get("purge_step") for stand in made] == [None, 3, 3]
    else:
        assert sent == [[1, 2, 3, 4, 5], [], [6]]
    assert [any(call[0] == "settings" for call in stand.calls) for stand in made] == [True, False, False]
    assert all(stand.calls[0] == "start" and stand.calls[-1] == "finish" for stand in made)


SHOW_ROLLOUTS = [name for name, each in TRACKERS.items() if type(each).log_rollouts is not Tracker.log_rollouts]


@pytest.mark.parametrize("tracker", SHOW_ROLLOUTS)
def test_rollouts_name_their_role_where_there_are_several(
    tracker: str, tmp_path: Path, stands: Callable[[str], list[Stand]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, settings = stands(tracker), run_of(tmp_path, tracker, rollouts_every=1)
    tables: list[Any] = []
    table = SimpleNamespace(Table=lambda dataframe: tables.append(dataframe.to_dict("list")))
    monkeypatch.setitem(sys.modules, "trackio", table)
    monkeypatch.setattr(
        Stand,
        "log_table",
        lambda self, name, columns, data, step=None: tables.append(
            dict(zip(columns, zip(*data, strict=True), strict=True))
        ),
        raising=False,
    )
    tracking = Tracking(settings, 0, 0, pytest.fail)
    tracking.step(1, {}, [VIEW])
    tracking.step(2, {}, [structs.replace(VIEW, role=role) for role in ("solver", "critic")])
    tracking.close(60.0)
    if tracker == "tensorboard":
        first, second = (call[1]["rollouts"] for call in made[0].calls if "rollouts" in call[1])
        assert "of `" not in first
        assert "**reward 0.5** of `solver`, ended by stop" in second
    else:
        assert "role" not in tables[0]
        assert list(tables[1]["role"]) == ["solver", "critic"]
        assert list(tables[1]["step"]) == [1, 1]


@pytest.mark.parametrize(
    ("tracker", "argument"),
    [
        ("wandb", "id"),
        ("comet_ml", "experiment_key"),
        ("swanlab", "id"),
        ("mlflow", "run_id"),
        ("aim", "run_hash"),
        ("clearml", "continue_last_task"),
    ],
)
def test_a_resumed_session_names_the_run_of_the_first(
    tracker: str, argument: str, tmp_path: Path, stands: Callable[[str], list[Stand]]
) -> None:
    made, settings = stands(tracker), run_of(tmp_path, tracker)
    session(settings, 0, 1)
    session(settings, 1, 2)
    first, second = (stand.given.get(argument) for stand in made)
    assert second
    assert first in (second, None)
    assert json.loads((tmp_path / "test" / FILE_NAME).read_bytes())["ids"][tracker] == second
    session(settings, 0, 1)
    assert made[2].given.get(argument) != second, "a run that begins again is another one"


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_s_class_takes_what_we_give_it(tracker: str, tmp_path: Path) -> None:
    given = TRACKERS[tracker].arguments(start_of(run_of(tmp_path), tracker, 3, Memory({tracker: "x"})))
    inspect.signature(TRACKERS[tracker].kind().__init__).bind(None, **given)


def test_a_tracker_that_is_new_to_a_resumed_run_gets_its_settings_and_all_steps_from_there(
    tmp_path: Path, stands: Callable[[str], list[Stand]]
) -> None:
    old, new = stands("wandb"), stands("aim")
    session(run_of(tmp_path, "wandb"), 0, 1, 2, 3)
    session(run_of(tmp_path, "wandb", "aim"), 2, 3, 4, newest=3)
    assert [stand.steps for stand in old] == [[1, 2, 3], [4]]
    assert [stand.steps for stand in new] == [[3, 4]]
    assert new[0].calls[1][0] == "settings"


def test_what_the_curve_imports_is_whole_before_a_tracker_gets_a_step(
    tmp_path: Path, stands: Callable[[str], list[Stand]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the example trackio lost a whole step to a half-imported matplotlib, which another thread was importing."""
    loaded: list[bool] = []
    stands("wandb")
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)

    def note(self: Stand) -> None:
        loaded.append(hasattr(sys.modules.get("matplotlib.figure"), "Figure"))

    monkeypatch.setattr(Stand, "start", note)
    session(run_of(tmp_path, "wandb"), 0, 1)
    assert loaded == [True]


def test_the_run_file_takes_the_trackers_that_there_are() -> None:
    assert tuple(TRACKERS) == run.TRACKERS
    assert all(tracker.packages for tracker in TRACKERS.values())


def test_trackers_are_listed_without_accelerate() -> None:
    code = (
        "import sys\n"
        "from slipstream.learner.report.trackers import wanted_trackers\n"
        "from slipstream.protocol.config import TrackingSection\n"
        "assert wanted_trackers(TrackingSection()) == []\n"
        "assert not {'accelerate', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_tracker_s_own_options_go_to_its_start(tmp_path: Path, stands: Callable[[str], list[Stand]]) -> None:
    made = stands("wandb")
    settings = run_of(
        tmp_path, "wandb", project="sums", run_name="third", options={"wandb": {"entity": "team", "dir": "x"}}
    )
    session(settings, 0, 1)
    given = made[0].given
    assert (given["run_name"], given["name"], given["entity"], given["dir"]) == ("sums", "third", "team", "x")


@pytest.mark.parametrize("tracker", TRACKERS)
def test_evaluations_that_end_by_one_step_are_each_sent_at_their_own(
    tracker: str, tmp_path: Path, stands: Callable[[str], list[Stand]]
) -> None:
    """Three end by step 5 and two after it: no tracker gets two values of one name for one step."""
    made = stands(tracker)
    tracking = Tracking(run_of(tmp_path, tracker), 0, 0, pytest.fail)
    earlier = [{"eval/step": 0, "eval/reward": 0.25}, {"eval/step": 2, "eval/reward": 0.5}]
    tracking.step(5, {"step": 5, "reward": 0.1, "eval/step": 4, "eval/reward": 0.75, EARLIER: earlier}, [])
    for step in (5, 6):
        tracking.evaluation({"eval/step": step, "eval/reward": 1.0})
    tracking.close()
    sent = {name: [call[0] for call in made[0].calls if name in call[1]] for name in ("reward", "eval/reward")}
    assert sent == {"reward": [5], "eval/reward": [0, 2, 4, 5, 6]}


def test_wandb_keeps_each_evaluation_as_a_row_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'slipstream-rl[wandb]'")
    tracking = Tracking(run_of(tmp_path, "wandb"), 0, 0, pytest.fail)
    for step in (1, 2, 3):
        tracking.step(step, {"step": step, "reward": 0.5}, [])
    for step in (1, 3):
        tracking.evaluation({"eval/step": step, "eval/reward": 0.0625 * step})
    tracking.close()
    (file,) = (tmp_path / "test" / "wandb").glob("offline-run-*/run-*.wandb")
    written = file.read_bytes()
    assert b"0.0625" in written
    assert b"0.1875" in written


def test_what_is_no_finite_number_is_not_sent_and_reasons_stand_by_themselves() -> None:
    line = {"reward": 0.5, "entropy": None, "loss": float("nan"), "groups_dropped": {"overage": 2}, "name": "x"}
    assert numbers(line) == {"reward": 0.5, "groups_dropped/overage": 2}


def test_settings_that_are_sent_hold_no_token_and_no_address() -> None:
    told = sent_settings(
        config(LEARNER, queue={"token": "secret"}, tracking={"options": {"comet_ml": {"api_key": "k"}}})
    )
    assert told["learner.groups_per_step"] == 2
    assert not [name for name in told if "token" in name.split(".")[1].split("_") and "secret" in str(told[name])]
    assert "secret" not in json.dumps(told)
    assert not [name for name in told if name.startswith(("tracking", "vllm", "task"))]


def test_mlflow_gets_names_that_it_takes(tmp_path: Path, stands: Callable[[str], list[Stand]]) -> None:
    made = stands("mlflow")
    tracking = Tracking(run_of(tmp_path, "mlflow"), 0, 0, pytest.fail)
    tracking.evaluation({"eval/step": 1, "eval/best@4": 0.5})
    tracking.close()
    assert made[0].calls[-2] == (1, {"eval/step": 1, "eval/best_4": 0.5})


class Broken(Stand):
    """Fails where `at` says."""

    name, made = "wandb", []
    at = "start"

    def start(self) -> None:
        if self.at == "start":
            raise OSError("no network\nsecond line")

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        if self.at == "log" and values["step"] != 2:
            raise SystemExit(3)
        super().log(values, step)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        if self.at == "settings":
            raise ValueError("odd value")

    def finish(self) -> None:
        if self.at == "finish":
            raise RuntimeError("offline")


@pytest.mark.parametrize(
    ("at", "says", "lost"),
    [
        ("start", "OSError: no network; the run continues", 4),
        ("log", "SystemExit: 3; the run continues", 2),
        ("settings", "ValueError: odd value; the run continues", 1),
        ("finish", "RuntimeError: offline; the run continues", 0),
    ],
)
def test_a_tracker_that_fails_warns_once_and_counts_what_it_lacks(
    at: str, says: str, lost: int, tmp_path: Path, stands: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stands("wandb")
    monkeypatch.setattr(type(TRACKERS["wandb"]), "kind", lambda self: Broken)
    monkeypatch.setattr(Broken, "at", at)
    first, *rest = session(run_of(tmp_path, "wandb"), 0, 1, 2, 3)
    assert first.startswith(f"tracker wandb: {says}")
    assert rest == ([f"tracker wandb lacks {lost} of the run's lines; metrics.jsonl has them all"] if lost else [])


def test_a_tracker_that_hangs_holds_nobody_and_loses_what_does_not_fit() -> None:
    warned: list[str] = []
    asked, answers = threading.Event(), threading.Event()

    def hang(tracker: GeneralTracker) -> None:
        asked.set()
        answers.wait(30)

    background = Background("wandb", lambda: Stand.__new__(Stand), warned.append, most=2)
    background.put(hang)
    assert asked.wait(30)
    for _ in range(5):
        background.put(hang)
    assert background.lost == 3
    background.close(0.01)
    assert "it has not answered while 2 lines came" in warned[0]
    assert warned[1:] == ["tracker wandb did not end within 0.01 s; it may lack 2 of the run's lines"]
    answers.set()


def test_ids_that_cannot_be_kept_are_told(tmp_path: Path, stands: Callable[[str], list[Stand]]) -> None:
    made = stands("wandb")
    (tmp_path / "test" / f".unfinished-{FILE_NAME}").mkdir(parents=True)
    (warned,) = session(run_of(tmp_path, "wandb"), 0, 1)
    assert "ids cannot be kept" in warned
    assert made[0].steps == [1]


def test_without_trackers_nothing_is_started_or_written(tmp_path: Path) -> None:
    before = threading.active_count()
    tracking = Tracking(run_of(tmp_path), 0, 0, pytest.fail)
    tracking.step(1, {}, [])
    assert threading.active_count() == before
    assert not (tmp_path / "test").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [("wandb", r"pip install 'slipstream-rl\[wandb\]'"), ("mlflow", "pip install 'mlflow'")],
)
def test_a_missing_package_is_refused_with_the_line_that_installs_it(
    name: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tracker, "is_installed", lambda tracker: False)
    with pytest.raises(ConfigError, match=f"tracking.report_to = {name}: {name} is not installed; .*{says}"):
        wanted_trackers(TrackingSection(report_to=[name]))
    with pytest.raises(ConfigError, match=r"all: none of tensorboard, wandb, .* is installed"):
        wanted_trackers(TrackingSection(report_to="all"))  # type: ignore[arg-type]


def test_all_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tracker, "is_installed", lambda tracker: tracker.name in ("aim", "wandb"))
    assert wanted_trackers(TrackingSection(report_to="all")) == ["wandb", "aim"]  # type: ignore[arg-type]


def test_a_folder_that_is_called_wandb_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb itself leaves one where it runs."""
    (tmp_path / "nowhere").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(type(TRACKERS["wandb"]), "packages", ("nowhere",))
    assert not TRACKERS["wandb"].is_installed()
