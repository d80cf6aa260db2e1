"""A run file that is right, for each test to make wrong in one way."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.rollout_queue.ledger.records import RunState
from slipstream.rollout_queue.store.changes import Changes
from slipstream.rollout_queue.store.sqlite import SqliteStore
from slipstream.rollout_queue.store.sqlite_file import FILE_NAME
from tests.deploy.stage import Stage
from tests.kit.fake_vllm.tokenizer import save_model_folder
from tests.kit.ports import free_port

TASK = '''
from slipstream.rollout_worker.task.task import Task

print("a task file may print")


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: the first one.
        b: the second one.
    """
    return a * b


def untyped(a, b):
    """Multiply two integers."""
    return a * b


def accuracy(completions, **columns):
    return [0.0] * len(completions)


rows = [{"prompt": [{"role": "user", "content": "Multiply 2 by 3."}]}]
task = Task(dataset=rows, tools=[multiply], rewards=[accuracy])
'''

RUN_FILE = """
[run]
name = "small"
dir = "{folder}/run directories"

[model]
path = "./model"

[task]
path = "task.py:task"

[queue]
port = {queue_port}

[vllm]
port = {vllm_port}
"""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights: enough for everything but the learner and vLLM."""
    return save_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run_file(tmp_path: Path, model_folder: Path) -> Path:
    """In a folder whose name has spaces; the run directory will be `run_directory(run_file)`."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "model").symlink_to(model_folder)
    (folder / "task.py").write_text(TASK, encoding="utf-8")
    path = folder / "run.toml"
    path.write_text(
        RUN_FILE.format(folder=folder, queue_port=free_port(), vllm_port=free_port()),
        encoding="utf-8",
    )
    return path


@pytest.fixture
def stage(tmp_path: Path, run_file: Path) -> Iterator[Stage]:
    folder = tmp_path / "a stage"
    folder.mkdir()
    stage = Stage(folder, run_file)
    yield stage
    if stage.process and stage.process.poll() is None:
        stage.process.kill()
    for pid in stage.alive():
        with contextlib.suppress(ProcessLookupError):  # it may end between the look and the kill
            os.kill(pid, signal.SIGKILL)


def run_directory(run_file: Path) -> Path:
    return run_file.parent / "run directories" / "small"


def save_ledger(run_file: Path, step: int = 1, finished: bool = False) -> None:
    """Write the store that a queue leaves which has seen a checkpoint of `step`."""
    store = SqliteStore(run_directory(run_file) / FILE_NAME)
    store.acquire()
    run = RunState(version=step, step=step, session=1, checkpoint_step=step, id="run-1", finished=finished)
    store.commit(Changes(run=run))
    store.close()


def save_checkpoint(run_file: Path, step: int = 1) -> None:
    """Write the file that makes a checkpoint complete, without its contents."""
    folder = run_directory(run_file) / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(f'{{"step": {step}, "version": {step}}}', encoding="utf-8")
