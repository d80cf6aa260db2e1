"""A rank 0 in a process of its own, with real followers: the process of the tests keeps its one rank.

with Ranks(config) as ranks:
    state = ranks.call(some_function, argument)   # some_function(trainer, argument), in the process of rank 0
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from protocol.config import RunConfig

# For all ranks to load torch, on a busy machine.
ANSWERS_WITHIN_S = 240.0


class Ranks:
    """As many ranks as the run file says; a context manager. `call` runs a function of a module, in turn. resume: from
    the run's newest checkpoint."""

    def __init__(self, config: RunConfig, resume: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_lead, args=(config.model_dump_json(), resume, theirs))

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # it has been killed
            self._ours.send(None)
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function(trainer, *arguments)` gives; raises AssertionError with its traceback where it fails."""
        self._ours.send((function, arguments))
        assert self._ours.poll(ANSWERS_WITHIN_S), f"{function.__name__} does not end"
        ok, answer = self._ours.recv()
        assert ok, answer
        return answer


def _lead(run_file: str, resume: bool, pipe: Connection) -> None:
    from learner.ranks import joining
    from learner.run import build_trainer
    from learner.start import starting_point

    config = RunConfig.model_validate_json(run_file)
    with joining.leading(config, joining.here(config)) as team:
        trainer = build_trainer(config, starting_point(config, resume), team)
        while (work := pipe.recv()) is not None:
            function, arguments = work
            try:
                pipe.send((True, function(trainer, *arguments)))
            except Exception:
                pipe.send((False, traceback.format_exc()))
