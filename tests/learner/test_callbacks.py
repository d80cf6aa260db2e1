"""transformers' callbacks in this learner: what they are told, what they may ask for, and what ends the run."""

from __future__ import annotations

import io
import json
import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback

from slipstream.learner import callbacks
from slipstream.learner.callbacks import CallbackFailed, Callbacks, arguments, load
from slipstream.learner.evaluator import Evaluator
from slipstream.learner.report.progress import TerminalProgress
from slipstream.learner.run import build_trainer
from slipstream.protocol.config import ConfigError, LearnerSection
from slipstream.protocol.config import load as load_run_file
from tests.kit import LEARNER, config
from tests.kit.learner import FakeQueue, endless
from tests.learner.report.test_evaluations import Queue, evaluating
from tests.learner.report.test_summary import step_record
from tests.learner.test_loop import config_for, lines, milestones, train

EVENTS = (
    *("on_init_end", "on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save"),
    "on_train_end",
)


class Diary(TrainerCallback):
    """Writes down what it is told; asks for what `wishes` says, by event and step."""

    def __init__(self, **wishes: int) -> None:
        self.wishes = wishes
        self.told: list[Any] = []
        self.given: dict[str, Any] = {}

    def _note(self, event: str, args: Any, state: Any, control: Any, **given: Any) -> Any:
        self.told.append((event, state.global_step))
        self.given[event] = given
        self.args, self.state = args, state
        if event == "on_step_end":
            for wish, step in self.wishes.items():
                if step == state.global_step:
                    setattr(control, wish, True)
        return control


for _event in EVENTS:
    setattr(Diary, _event, lambda self, *at, _event=_event, **given: self._note(_event, *at, **given))


def test_events_come_in_transformers_order(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log's history has the newest steps alone."""
    monkeypatch.setattr(callbacks, "MAX_LOGGED", 2)
    diary = Diary()
    train(config_for(model_path, tmp_path, steps=3), FakeQueue(endless()), callbacks=[diary])
    steps = [
        [("on_step_begin", n - 1), ("on_step_end", n), ("on_log", n), *([("on_save", n)] if n in (2, 3) else [])]
        for n in (1, 2, 3)
    ]
    assert diary.told == [
        ("on_init_end", 0),
        ("on_train_begin", 0),
        *(event for of_step in steps for event in of_step),
        ("on_train_end", 3),
    ]
    assert diary.given["on_log"]["logs"]["reward"] == 0.5
    assert (diary.state.max_steps, [entry["step"] for entry in diary.state.log_history]) == (3, [2, 3])
    assert diary.state.is_world_process_zero
    assert diary.given["on_step_end"]["model"].config.vocab_size > 0
    assert diary.given["on_step_end"]["processing_class"].decode([1]) is not None
    assert diary.given["on_step_end"]["lr_scheduler"].get_last_lr()[0] == pytest.approx(1e-3)


def test_a_callback_ends_the_run_early_with_publication_and_checkpoint(model_path: Path, tmp_path: Path) -> None:
    queue = FakeQueue(endless(), version=0)
    diary = Diary(should_training_stop=2)
    train(config_for(model_path, tmp_path, checkpoint_every=0), queue, callbacks=[diary])
    assert [line["step"] for line in lines(tmp_path / "test" / "metrics.jsonl")] == [1, 2]
    ended = [entry for entry in milestones(queue) if entry[0] != "release"]  # of the groups that were leased ahead
    assert ended[-5:] == [("publish", 2), "proven", ("checkpointed", 2), "finished", "closed"]
    assert diary.told[-1] == ("on_train_end", 2)
    assert (tmp_path / "test" / "summary.json").exists()


@pytest.mark.parametrize(("first", "says"), [(True, "before the first step"), (False, "after step 1")])
def test_the_terminal_tells_where_a_callback_ended_it_and_sums_up_steps_alone(
    first: bool, says: str, model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    diary = Diary(should_training_stop=1)
    if first:
        diary.on_train_begin = lambda args, state, control, **_: setattr(control, "should_training_stop", True)  # type: ignore[attr-defined]
    with caplog.at_level("INFO", logger="slipstream.learner.report.progress"):
        train(config_for(model_path, tmp_path), FakeQueue(endless()), callbacks=[diary])
    said = [record.getMessage() for record in caplog.records]
    assert f"ending {says}: a callback asked for it" in said
    assert any(line.startswith("groups: ") for line in said) != first


def test_a_run_that_a_callback_ended_goes_on_with_resume(model_path: Path, tmp_path: Path) -> None:
    config = config_for(model_path, tmp_path)
    train(config, FakeQueue(endless()), callbacks=[Diary(should_training_stop=2)])
    train(config, FakeQueue(endless(), version=2), resume=True)
    assert [line["step"] for line in lines(tmp_path / "test" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_callback_asks_for_a_checkpoint_once(model_path: Path, tmp_path: Path) -> None:
    queue = FakeQueue(endless())
    train(config_for(model_path, tmp_path, checkpoint_every=0), queue, callbacks=[Diary(should_save=1)])
    assert [entry[1] for entry in queue.log if entry[0] == "checkpointed"] == [1, 4]


def test_a_resumed_session_begins_at_its_step(model_path: Path, tmp_path: Path) -> None:
    train(config_for(model_path, tmp_path, steps=2), FakeQueue(endless()))
    diary = Diary()
    train(config_for(model_path, tmp_path), FakeQueue(endless(), version=2), resume=True, callbacks=[diary])
    assert diary.told[0] == ("on_init_end", 2)


def test_a_callback_asks_for_an_evaluation_and_hears_of_it(model_path: Path, tmp_path: Path) -> None:
    queue, diary = Queue(endless()), Diary(should_evaluate=1)
    train(evaluating(model_path, tmp_path, every=3), queue, callbacks=[diary])
    assert [request.step for request in queue.asked] == [1, 3]
    assert [event for event, _ in diary.told].count("on_evaluate") == 2
    assert diary.given["on_evaluate"]["metrics"]["eval_reward"] == pytest.approx(0.3)


def test_a_run_that_a_callback_ends_is_evaluated_at_its_end(model_path: Path, tmp_path: Path) -> None:
    queue, diary = Queue(endless()), Diary(should_training_stop=3)
    train(evaluating(model_path, tmp_path, every=0, at_end=True), queue, callbacks=[diary])
    assert [(request.step, request.version) for request in queue.asked] == [(3, 3)]
    assert diary.told[-2:] == [("on_evaluate", 3), ("on_train_end", 3)]


def test_an_evaluation_that_cannot_be_is_told_once(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    evaluator = Evaluator(config(LEARNER), None, 1, None, TerminalProgress(4, console=console))  # type: ignore[arg-type]
    for step in (1, 2):
        evaluator.ask_if_due(step, step, wanted=True)
    assert console.file.getvalue().count("asks for an evaluation of step 1, and this run has none") == 1  # type: ignore[attr-defined]
    assert "step 2" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_i7_who_waits_for_a_callback_says_so(model_path: Path, tmp_path: Path) -> None:
    said: list[str] = []

    @contextmanager
    def waiting(what: str) -> Iterator[None]:
        said.append(what)
        yield

    settings = config_for(model_path, tmp_path)
    Callbacks([Diary()], settings, build_trainer(settings, None), 0, waiting=waiting).begin()
    assert said == ["callback Diary.on_init_end", "callback Diary.on_train_begin"]


class Raises(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        math.sqrt(-1.0 - state.global_step)


def test_a_callback_that_raises_ends_the_run_with_file_and_line(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(CallbackFailed) as failed:
        train(config_for(model_path, tmp_path), FakeQueue(endless()), callbacks=[Raises()])
    line = Raises.on_step_end.__code__.co_firstlineno + 1
    text = str(failed.value)
    assert text.startswith("callback Raises.on_step_end raised ValueError: ")
    assert f"({__file__}:{line}); fix it, or remove it from learner.callbacks, and continue with --resume" in text
    assert [line["step"] for line in lines(tmp_path / "test" / "metrics.jsonl")] == [1], "the step was made"


class Exits(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        sys.exit(0)


def test_a_callback_that_calls_sys_exit_is_a_failing_one_and_no_run_that_is_done(
    model_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(CallbackFailed) as failed:
        train(config_for(model_path, tmp_path), FakeQueue(endless()), callbacks=[Exits()])
    line = Exits.on_step_end.__code__.co_firstlineno + 1
    text = str(failed.value)
    assert text.startswith(f"callback Exits.on_step_end called sys.exit(0) ({__file__}:{line}); to end the run")
    assert text.endswith("set control.should_training_stop = True there, and continue with --resume")


class Waits(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_in_a_callback_is_not_the_callback_s_fault(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        train(config_for(model_path, tmp_path), FakeQueue(endless()), callbacks=[Waits()])
    assert ended.value.code == 128 + signal.SIGTERM


class AsksForWhatIsNotThere(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(args.per_device_train_batch_size)


class ReadsNoJson(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        json.loads("{")


@pytest.mark.parametrize("kind", [AsksForWhatIsNotThere, ReadsNoJson])
def test_the_line_is_the_user_s_where_our_code_or_python_s_raises(
    model_path: Path, tmp_path: Path, kind: type[TrainerCallback]
) -> None:
    with pytest.raises(CallbackFailed) as failed:
        train(config_for(model_path, tmp_path), FakeQueue(endless()), callbacks=[kind()])
    assert f"({__file__}:{kind.on_step_end.__code__.co_firstlineno + 1}); fix it" in str(failed.value)


def test_transformers_early_stopping_follows_the_evaluations_reward(model_path: Path, tmp_path: Path) -> None:
    settings = config_for(model_path, tmp_path)
    settings = settings.model_copy(update={"eval": settings.eval.model_copy(update={"every": 1})})
    callbacks = Callbacks(
        [EarlyStoppingCallback(early_stopping_patience=2)], settings, build_trainer(settings, None), 0
    )
    callbacks.begin()
    stopped = []
    for step, reward in enumerate([0.5, 0.6, 0.6, 0.55, 0.7], start=1):
        callbacks.evaluated([{"eval/step": step, "eval/reward": reward}])
        stopped.append(callbacks.stopped)
    assert stopped == [False, False, False, True, True]


def test_transformers_printer_prints_each_step(
    model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config_for(model_path, tmp_path, steps=2), FakeQueue(endless()), callbacks=[PrinterCallback()])
    assert capsys.readouterr().out.count("'reward': '0.5'") == 2


def test_evaluations_have_transformers_names(model_path: Path, tmp_path: Path) -> None:
    diary = Diary()
    settings = config_for(model_path, tmp_path)
    callbacks = Callbacks([diary], settings, build_trainer(settings, None), 0)
    record = step_record(1)
    object.__setattr__(record, "evaluations", [{"eval/step": 1, "eval/reward": 0.25, "eval/rewards/sum/mean": 0.5}])
    callbacks.stepped(record)
    assert diary.given["on_evaluate"]["metrics"] == {"eval_step": 1, "eval_reward": 0.25, "eval_rewards/sum/mean": 0.5}
    assert (diary.state.best_metric, diary.state.best_global_step) == (0.25, 1)


def test_arguments_have_what_a_run_can_answer_and_say_so_of_the_rest() -> None:
    args = arguments(config(LEARNER, learner={"learning_rate": 2e-5}), {"learner.learning_rate": 2e-5})
    assert (args.learning_rate, args.run_name, args.logging_steps) == (2e-5, "run", 1)
    assert args.to_dict()["max_steps"] == 100
    assert "settings" not in args.to_sanitized_dict()
    with pytest.raises(AttributeError, match=r"args.per_device_train_batch_size: .*args.settings has"):
        _ = args.per_device_train_batch_size


FILE = """
from transformers import TrainerCallback
class Mine(TrainerCallback):
    pass
class Needs(TrainerCallback):
    def __init__(self, patience): pass
one, several = Mine(), [Mine(), Mine]
number = 3
class Holder:
    callbacks = several
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE, encoding="utf-8")
    return path


@pytest.mark.parametrize(("name", "count"), [("one", 1), ("Mine", 1), ("several", 2), ("Holder", 2)])
def test_objects_classes_lists_and_holders_are_loaded(file: Path, name: str, count: int) -> None:
    loaded = load([f"{file}:{name}"])
    assert [type(callback).__name__ for callback in loaded] == ["Mine"] * count


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("number", "it is a int; give an object of a class that extends transformers.TrainerCallback"),
        ("absent", "defines no 'absent'; define it there"),
        ("Needs", r"Needs\(\) raised TypeError: .*patience.*; give an object"),
    ],
)
def test_what_is_no_callback_is_refused(file: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"learner.callbacks = .*mine.py:{name}: .*{says}"):
        load([f"{file}:{name}"])


def test_a_file_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import no_such_module", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"learner.callbacks = .*bad.py:x: .*cannot be imported: ModuleNotFoundError"):
        load([f"{tmp_path}/bad.py:x"])


def test_the_path_is_taken_from_the_run_file_s_folder_and_the_file_has_to_be_there(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        '[model]\npath = "org/model"\n[task]\npath = "task.py:task"\n[learner]\ncallbacks = ["cb.py:mine"]\n',
        encoding="utf-8",
    )
    assert load_run_file(run_file).learner.callbacks == [f"{tmp_path}/cb.py:mine"]
    with pytest.raises(ConfigError, match=r"learner.callbacks = .*cb.py:mine: there is no file .*cb.py"):
        load_run_file(run_file, needs=["callbacks"])


def test_what_names_no_file_is_refused() -> None:
    with pytest.raises(ValueError, match="String should match pattern"):
        LearnerSection(callbacks=["mine"])


def test_a_trl_script_gives_the_callbacks_of_its_trainer_and_is_not_run_beyond_train(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from transformers import TrainerCallback\n"
        "from slipstream.trl import GRPOTrainer\n"
        "class Mine(TrainerCallback):\n    pass\n"
        "def reward(completions, **_):\n    return [0.0] * len(completions)\n"
        "trainer = GRPOTrainer('org/model', reward, None, [{'prompt': 'a'}], callbacks=[Mine()])\n"
        "trainer.add_callback(Mine)\n"
        "trainer.train()\n"
        "raise RuntimeError('beyond')\n",
        encoding="utf-8",
    )
    assert [type(callback).__name__ for callback in load([f"{script}:trainer"])] == ["Mine", "Mine"]
