"""`slipstream replay`: trains again from a run's record, and writes the metrics into a new folder."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from transformers.utils import logging as transformers_logging

from slipstream.deploy.commands.sft import mixed_in
from slipstream.deploy.run.process_keeper import RunFailed
from slipstream.learner.ranks.stopping import LearnerFailed
from slipstream.learner.replay import Request, replay
from slipstream.learner.report.progress import TerminalProgress
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.trained_record import RECORD_FOLDER


def run(config: RunConfig, record: Path | None, out: Path | None, from_step: int | None, steps: int | None) -> None:
    """Replay a record.

    Args:
        config: The run file.
        record: Folder of the record, or one file of it; None for the run's own.
        out: New folder for the metrics; None for one in the run directory.
        from_step: Step whose checkpoint the replay begins after; 0 for the initial model.
        steps: Maximum number of steps.

    Raises:
        ConfigError: There is no record, or it cannot be replayed.
        RunFailed: The learner failed.
    """
    record = record or config.run_dir / RECORD_FOLDER
    if not record.exists():
        raise ConfigError(f"{record}: there is no record; a run keeps one with queue.record = true")
    transformers_logging.disable_progress_bar()
    request = Request(record, out or _new_folder(config.run_dir), from_step, steps)
    demonstrations = mixed_in(config)
    with TerminalProgress(config.learner.steps, config.learner.groups_per_step) as progress:
        try:
            replay(config, request, progress, demonstrations)
        except LearnerFailed as error:
            raise RunFailed(str(error)) from error


def _new_folder(run_dir: Path) -> Path:
    """Return the first of replay-1, replay-2 and so on that does not exist."""
    return next(path for number in count(1) if not (path := run_dir / f"replay-{number}").exists())
