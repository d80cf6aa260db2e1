"""How a command ends: its exit code, and what a person is told."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

import typer

from deploy.run.process_keeper import RunFailed
from protocol.client import QueueError
from protocol.config import ConfigError


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Ends the process with the code that the command's error or exit has, as `main` would, but without waiting for
    threads that the task's code started."""
    try:
        yield
    except typer.Exit as ended:
        code = ended.exit_code
    except (ConfigError, QueueError, RunFailed) as error:
        code = told(error)
    except Exception:
        logging.getLogger(__name__).exception("the command failed unexpectedly")
        code = 1
    leave(code)


def leave(code: int) -> NoReturn:
    """A thread that the task file started, or its executor with a job, would keep the process from ending otherwise."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the task's code may have closed it
            stream.flush()
    os._exit(code)


def told(error: Exception) -> int:
    """The exit code of an error, which a person has been told."""
    with contextlib.suppress(OSError, ValueError):  # the task's code may have closed stderr
        print(f"slipstream: {error}", file=sys.stderr)
    if isinstance(error, RunFailed):
        return error.code
    return 2 if isinstance(error, ConfigError) else 1
