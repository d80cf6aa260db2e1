"""Writes the model card of each checkpoint, and uploads models to the hub if the run file says so.

Uploads run during the training: whatever the hub does neither blocks nor ends the run. Nothing here imports torch, as
the checks before a run ask whether an upload could work.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants, get_token

from slipstream.learner.checkpoints import model_card
from slipstream.learner.checkpoints.model_card import Results
from slipstream.learner.checkpoints.upload_process import Child, Request, Sender, SendError
from slipstream.protocol import checkpoints
from slipstream.protocol.config import ConfigError, HubSection, RunConfig

if TYPE_CHECKING:
    from slipstream.learner.report.progress import TerminalProgress

_STAGE = ".hub"


def require(hub: HubSection) -> None:
    """Raise `ConfigError` if uploads are forbidden or no token is there. Does not connect to the hub."""
    if not hub.push_to_hub:
        return
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("hub.push_to_hub = true: HF_HUB_OFFLINE forbids it; unset that, or set it to false")
    if get_token() is None:
        raise ConfigError(
            "hub.push_to_hub = true: there is no token for the hub; set HF_TOKEN to one that may write, or log in "
            "with: hf auth login"
        )


class Models:
    """Prepares one session's checkpoints for others."""

    def __init__(self, config: RunConfig, progress: TerminalProgress) -> None:
        self._config = config
        self._progress = progress
        self._uploads = Uploads(config, progress.warn, progress.say) if config.hub.push_to_hub else None
        self._warned = False

    def saved(self, model: Path, results: Results) -> None:
        """Handle a complete checkpoint, whose model is in folder `model`."""
        try:
            model_card.write_model_card(model, self._config, results)
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._progress.warn(f"{model / model_card.MODEL_CARD} cannot be written: {error}")
        if self._uploads is not None and self._config.hub.hub_strategy == "every_save":
            self._uploads.push(model, results.step)

    def close(self) -> None:
        """Send the last checkpoint's model at the end of the run, if only that is sent, and waits for it."""
        if self._uploads is None:
            return
        found = checkpoints.complete(self._config.run_dir)
        if self._config.hub.hub_strategy == "end" and found:
            newest = max(found)
            self._uploads.push(found[newest] / checkpoints.MODEL, newest)
        if self._uploads.pending:
            with self._progress.phase("waiting for the upload to the hub"):
                self._uploads.wait(self._config.hub.hub_timeout_s)


@dataclass(frozen=True)
class _Upload:
    folder: Path
    step: int


class Uploads:
    """Sends one model at a time; the newest waits behind it, and one that waits when another comes is left out.

    Each model is linked into a folder of the run directory at once, so its checkpoint may be deleted meanwhile.

    Args:
        warn: Shows a line to a person; called from any thread, as is `say`.
    """

    def __init__(
        self,
        config: RunConfig,
        warn: Callable[[str], None],
        say: Callable[[str], None],
        sender: Sender | None = None,
    ) -> None:
        self._hub = config.hub
        self._name = config.hub.hub_model_id or config.run.name
        self._stage = config.run_dir / _STAGE
        self._warn = warn
        self._say = say
        self._sender = sender or Child()
        self._changed = threading.Condition()
        self._next: _Upload | None = None
        self._busy = False
        self._given_up = False
        self._thread: threading.Thread | None = None
        self.failed = 0
        shutil.rmtree(self._stage, ignore_errors=True)

    def push(self, model: Path, step: int) -> None:
        """Send the model in folder `model`, of the checkpoint of `step`."""
        folder = self._stage / f"step-{step}"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            _link(model, folder)
        except OSError as error:
            self._fail(f"the model of step {step} cannot be prepared for the hub: {error}")
            return
        with self._changed:
            left_out, self._next = self._next, _Upload(folder, step)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if left_out is not None:
            shutil.rmtree(left_out.folder, ignore_errors=True)

    @property
    def pending(self) -> bool:
        with self._changed:
            return self._busy or self._next is not None

    def wait(self, timeout_s: float) -> None:
        """Wait for open uploads for at most `timeout_s` seconds, and then give them up."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._busy and self._next is None, timeout_s)
        if not done:
            self._given_up = True
            self._sender.kill()
            self._warn(
                f"the upload to the hub did not end within hub.hub_timeout_s = {timeout_s:g} s; send the newest "
                f"checkpoint's model folder with: hf upload"
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None)
                upload, self._next, self._busy = self._next, None, True
            if upload is not None:
                self._send(upload)
                shutil.rmtree(upload.folder, ignore_errors=True)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _send(self, upload: _Upload) -> None:
        request = Request(str(upload.folder), self._name, self._hub.hub_private_repo, f"step {upload.step}")
        try:
            repo = self._sender.send(request)
        except (SendError, OSError) as error:
            if not self._given_up:
                self._fail(f"the model of step {upload.step} is not on the hub: {error}")
            return
        self._say(f"the model of step {upload.step} is on the hub: {repo}")

    def _fail(self, text: str) -> None:
        self.failed += 1
        self._warn(f"{text}; the run continues, and the checkpoint is in the run directory")


def _link(source: Path, target: Path) -> None:
    """Copy a folder by hard links, where the disk has them."""

    def linked(old: str, new: str) -> str:
        try:
            os.link(old, new)
        except OSError:
            shutil.copyfile(old, new)
        return new

    shutil.copytree(source, target, copy_function=linked)
