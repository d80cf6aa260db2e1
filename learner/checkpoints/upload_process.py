"""Uploads one model to the hub in its own process, which can be killed: a hub that never answers holds threads
that Python would wait for at its end.

`python -m slipstream.learner.checkpoints.upload_process REQUEST` sends it. Its last line is the answer in JSON.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Protocol

import msgspec

from slipstream.protocol.import_path import python_path


class Request(msgspec.Struct, frozen=True):
    """One upload.

    Attributes:
        folder: Folder of the model.
        repo: `owner/name`, or `name` for the account's own.
        private: Whether the repository is private; None for the account's default.
    """

    folder: str
    repo: str
    private: bool | None
    message: str


class Answer(msgspec.Struct, frozen=True):
    """The result of an upload.

    Attributes:
        repo: The hub's name of the repository.
        error: Why nothing was sent.
    """

    repo: str = ""
    error: str | None = None


class SendError(Exception):
    """The hub does not have the model; the text says why."""


class Sender(Protocol):
    """Sends models to the hub."""

    def send(self, request: Request) -> str:
        """Send a model. Returns the repository's name on the hub, with its owner. Raises `SendError`."""

    def kill(self) -> None:
        """End the running upload, from another thread."""


class Child:
    """Sends in a child process, which ends when this one ends, even by a kill."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._killed = False

    def send(self, request: Request) -> str:
        own = {"PYTHONPATH": python_path(), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        with self._lock:
            if self._killed:
                raise SendError("it was given up")
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, msgspec.json.encode(request).decode()],
                env={**os.environ, **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the learner
            )
        assert process.stdin is not None
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
        code = process.wait()
        process.stdin.close()
        process.stdout.close()
        last = lines[-1] if lines else b""
        try:
            answer = msgspec.json.decode(last, type=Answer)
        except msgspec.DecodeError as error:
            last_line = last.decode(errors="replace").strip()
            raise SendError(
                f"the process that sends it ended with code {code}: {last_line or 'it says nothing'}"
            ) from error
        if answer.error is not None:
            raise SendError(answer.error)
        return answer.repo

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            if self._process is not None and self._process.poll() is None:
                self._process.kill()


def _answer(request: Request) -> Answer:
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        repo = api.create_repo(request.repo, private=request.private, exist_ok=True).repo_id
        api.upload_folder(repo_id=repo, folder_path=request.folder, commit_message=request.message)
    except Exception as error:  # HTTP, the file system and the hub raise their own types
        return Answer(error=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    return Answer(repo)


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing is ever written there; it closes as the parent ends
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    answer = msgspec.json.encode(_answer(msgspec.json.decode(sys.argv[1], type=Request)))
    os.write(1, b"\n" + answer + b"\n")
    os._exit(0)  # threads of uploads that failed may hang
