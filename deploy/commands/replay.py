"""`slipstream replay`: where its record is, and where its figures go."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from transformers.utils import logging as transformers_logging

from deploy.run.process_keeper import RunFailed
from learner.ranks.stopping import LearnerFailed
from learner.replay import Request, replay
from learner.report.progress import TerminalProgress
from protocol.config import ConfigError, RunConfig
from protocol.trained_record import RECORD_FOLDER


def run(config: RunConfig, record: Path | None, out: Path | None, from_step: int | None, steps: int | None) -> None:
    """Replay `record`, the run's own by default, into `out`, a new folder of the run directory by default. Raises
    `ConfigError`, `RunFailed`."""
    record = record or config.run_dir / RECORD_FOLDER
    if not record.exists():
        raise ConfigError(f"{record}: there is no record; a run keeps one with queue.record = true")
    transformers_logging.disable_progress_bar()
    request = Request(record, out or _new_folder(config.run_dir), from_step, steps)
    with TerminalProgress(config.learner.steps, config.learner.groups_per_step) as progress:
        try:
            replay(config, request, progress)
        except LearnerFailed as error:
            raise RunFailed(str(error)) from error


def _new_folder(run_dir: Path) -> Path:
    """The first of replay-1, replay-2 and so on that is not there yet."""
    return next(path for number in count(1) if not (path := run_dir / f"replay-{number}").exists())
