"""A store is held against the run's checkpoints at the start: an empty, a foreign and an older one are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.protocol import checkpoints
from slipstream.protocol.config import ConfigError
from slipstream.rollout_queue.ledger.records import RunState
from slipstream.rollout_queue.store import check_beside_run
from tests.kit import config

OWN = {"step": 8, "version": 10, "run": "run-a"}
ANOTHERS = RunState(id="run-b", session=1, version=99, step=99)
BEHIND = RunState(id="run-a", session=2, version=9, step=7)
REMEDY = r"put the run's own store or a backup of it there, or begin a new ledger.*slipstream queue new run\.toml"


@pytest.mark.parametrize(
    ("saved", "store", "run", "refused"),
    [
        pytest.param(None, "sqlite", RunState(), None, id="a new run"),
        pytest.param(OWN, "sqlite", RunState(), "it is empty", id="a store that was lost"),
        pytest.param(OWN, "postgresql://h/d", RunState(), "postgresql://h/d: it is empty", id="another database"),
        pytest.param(OWN, ":memory:", RunState(), None, id="a store that keeps nothing"),
        pytest.param(OWN, "sqlite", RunState(id="run-b"), None, id="a ledger that was begun again"),
        pytest.param(OWN, "sqlite", RunState(id="run-a", session=2, version=10, step=8), None, id="a resume"),
        pytest.param(OWN, "sqlite", RunState(id="run-a", session=3, version=12, step=4), None, id="an earlier step"),
        pytest.param(OWN, "sqlite", ANOTHERS, "it is that of another run, run-b, not of run-a", id="another run's"),
        pytest.param(OWN, "sqlite", BEHIND, "lost what came after version 9, .* has version 10", id="an old backup"),
        pytest.param({"step": 8, "version": 10}, "sqlite", ANOTHERS, None, id="before ids"),
        pytest.param({"damaged": True}, "sqlite", RunState(id="run-a", session=1), None, id="for the learner to say"),
    ],
)
def test_a_store_that_does_not_know_of_the_newest_checkpoint_is_refused(
    tmp_path: Path, saved: dict[str, object] | None, store: str, run: RunState, refused: str | None
) -> None:
    run_config = config(run={"dir": str(tmp_path)}, queue={"store": store})
    if saved is not None:
        for step in (4, 8):
            folder = checkpoints.folder(run_config.run_dir) / checkpoints.name_of(step)
            folder.mkdir(parents=True)
            (folder / checkpoints.STATE).write_text(json.dumps({**saved, "step": step}))
    if refused is None:
        check_beside_run(run_config, run)
        return
    with pytest.raises(ConfigError, match=rf"{refused}, beside .*step-000008; {REMEDY}"):
        check_beside_run(run_config, run)


@pytest.mark.parametrize(
    ("left", "stored", "refused"),
    [
        ("metrics.jsonl", RunState(), True),
        ("record/part-000001.groups", RunState(), True),
        ("record/part-000001.groups", RunState(id="run-a", session=1, version=3), False),
        ("metrics.jsonl", RunState(id="run-b"), False),
        ("logs/worker-0.log", RunState(), False),
    ],
)
def test_an_empty_store_beside_what_steps_have_left_is_refused_without_a_checkpoint_too(
    tmp_path: Path, left: str, stored: RunState, refused: bool
) -> None:
    run_config = config(run={"dir": str(tmp_path)})
    file = run_config.run_dir / left
    file.parent.mkdir(parents=True)
    file.touch()
    check_beside_run(run_config, stored)
    file.write_text("{}")
    if not refused:
        check_beside_run(run_config, stored)
        return
    with pytest.raises(
        ConfigError, match=rf"store = sqlite: it is empty, beside .*{file.name}.*a backup.*move .* away"
    ):
        check_beside_run(run_config, stored)
    check_beside_run(config(run={"dir": str(tmp_path)}, queue={"store": ":memory:"}), stored)
