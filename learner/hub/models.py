"""What becomes of each checkpoint's model: it gets its card, and goes to the hub if the run file says so."""

from __future__ import annotations

from pathlib import Path

from learner.checkpoints import checkpoint as checkpoints
from learner.checkpoints import model_card
from learner.checkpoints.model_card import Results
from learner.checkpoints.uploads import Uploads
from learner.report.progress import TerminalProgress
from protocol.config import RunConfig


class Models:
    """One session's checkpoints, as models for others. `uploads`: None where nothing is sent."""

    def __init__(self, config: RunConfig, progress: TerminalProgress, uploads: Uploads | None = None) -> None:
        self._config = config
        self._progress = progress
        if uploads is None and config.hub.push_to_hub:
            uploads = Uploads(config, progress.warn, progress.say)
        self._uploads = uploads
        self._warned = False

    def saved(self, model: Path, results: Results) -> None:
        """A checkpoint is complete, with its model in this folder."""
        try:
            model_card.write_model_card(model, self._config, results)
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._progress.warn(f"{model / model_card.MODEL_CARD} cannot be written: {error}")
        if self._uploads is not None and self._config.hub.hub_strategy == "every_save":
            self._uploads.push(model, results.step)

    def close(self) -> None:
        """At the run's end: send the last checkpoint's, if that alone goes, and wait for it."""
        if self._uploads is None:
            return
        newest = checkpoints.latest(self._config.run_dir)
        if self._config.hub.hub_strategy == "end" and newest is not None:
            self._uploads.push(newest.model_path, newest.info.step)
        if self._uploads.pending:
            with self._progress.phase("waiting for the upload to the hub"):
                self._uploads.wait(self._config.hub.hub_timeout_s)
