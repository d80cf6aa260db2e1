"""The sums behind OpenEnv's own server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from tests.environments.stand_ins.sums import Sums


class Answer(Action):
    text: str


class Question(Observation):
    question: Any = ""


class OpenEnvSums(Environment[Answer, Question, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.sums = Sums()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Question:
        self.sums = Sums(given.get("fault", ""))
        return Question(question=self.sums.reset())

    def step(self, action: Answer, timeout_s: float | None = None, **given: Any) -> Question:
        question, reward, is_over = self.sums.step(action.text)
        if self.sums.fault == "image":
            question = [[0] * 64] * 64
        return Question(question=question, reward=reward, done=is_over)

    @property
    def state(self) -> State:
        return State()


@contextmanager
def serving() -> Iterator[str]:
    app = create_fastapi_app(OpenEnvSums, Answer, Question, max_concurrent_envs=16)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
