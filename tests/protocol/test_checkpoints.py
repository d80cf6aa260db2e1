from __future__ import annotations

from pathlib import Path

from slipstream.protocol import checkpoints
from slipstream.protocol.checkpoints import Best


def made(run_dir: Path, *steps: int) -> None:
    for step in steps:
        path = checkpoints.folder(run_dir) / checkpoints.name_of(step)
        path.mkdir(parents=True)
        (path / checkpoints.STATE).write_text("{}")


def test_step_1_000_000_comes_after_step_999_999(tmp_path: Path) -> None:
    """Their names sort the other way."""
    made(tmp_path, 1_000_000, 999_999, 50)
    assert sorted(path.name for path in checkpoints.folder(tmp_path).iterdir())[-1] == "step-999999"
    assert list(checkpoints.complete(tmp_path)) == [50, 999_999, 1_000_000]


def test_what_is_no_complete_checkpoint_does_not_count(tmp_path: Path) -> None:
    assert checkpoints.complete(tmp_path) == {}
    made(tmp_path, 3)
    (checkpoints.folder(tmp_path) / "step-000005").mkdir()
    for name in ("step-x", "step-000004-copy", ".unfinished-step-000006", ".discarded-step-000001"):
        other = checkpoints.folder(tmp_path) / name
        other.mkdir()
        (other / checkpoints.STATE).write_text("{}")
    assert list(checkpoints.complete(tmp_path)) == [3]


def test_the_best_is_what_was_written_as_long_as_it_is_there(tmp_path: Path) -> None:
    made(tmp_path, 3)
    assert checkpoints.best(tmp_path) is None
    checkpoints.write_best(tmp_path, Best(3, 0.5))
    assert checkpoints.best(tmp_path) == Best(3, 0.5)
    checkpoints.write_best(tmp_path, Best(9, 0.75))
    assert checkpoints.best(tmp_path) is None, "its checkpoint is gone"
    (checkpoints.folder(tmp_path) / "best.json").write_text("{")
    assert checkpoints.best(tmp_path) is None
