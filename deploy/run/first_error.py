"""Finds the first error in the log of a process of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice

_TRACEBACK = "Traceback (most recent call last):"

# A line of our own log below ERROR, such as a failure that the process survives.
_BELOW_ERROR = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING) ")

_ERROR = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|(^|\s)[\w.]*(Error|Exception)\b:|^slipstream: ")

# What argparse says last, after a usage whose flags may be called anything.
_USAGE, _WRONG_USAGE = "usage: ", re.compile(r"^\S+: error: ")

# What SLURM says of a step, which may come before the last words of the step's program.
_OF_SLURM = re.compile(r"^(srun|slurmstepd): error: ")

# vLLM's prefix of each line of a logged traceback: process, level, time and place.
_VLLM_PREFIX = re.compile(r"^(\([^()]+ pid=\d+\) )?(?:\w+ \d\d-\d\d \d\d:\d\d:\d\d \[[^]]*\] ?)?")

# Our part of a vLLM server logs this after the errors that the engine's end has caused.
_ENGINE_ENDED = re.compile(r"its EngineCore process ended \([^)]*\)")

_OF_THE_ENGINE = re.compile(r"^\((EngineCore|(Vllm)?Worker)\S* pid=\d+\) ")

# What a server says whose engine has ended, in place of why it did.
_FOLLOWS = ("its EngineCore process ended", "EngineDeadError")
# Lines of an engine's error to read: a traceback in vLLM is up to a hundred lines long.
_MAX_ENGINE_LINES = 400

# Detail lines of an error to quote: the first line of pydantic's only says that there is an error.
_MAX_DETAILS = 2


def first_error(lines: Sequence[str]) -> str | None:
    """Find the first error of a log: later ones usually only follow from it.

    Returns:
        The first line that reports an error; of a traceback the exception at its end, of a chain of tracebacks the
        root. For a vLLM server whose engine ended, the engine's own first error, else that it ended. What SLURM says
        of a step counts only where its program reports no error. None if there is no error.
    """
    own = [line for line in lines if not _OF_SLURM.match(line)]
    if (ended := next(filter(None, map(_ENGINE_ENDED.search, own)), None)) is not None:
        return _first_error([line for line in own if _OF_THE_ENGINE.match(line)]) or ended.group()
    return _first_error(own) or _first_error(lines)


def follows_engine(error: str) -> bool:
    """Return whether an error only follows from the end of a vLLM server's engine."""
    return any(said in error for said in _FOLLOWS)


def error_of_engine(lines: Iterable[str]) -> str | None:
    """Find the first error that a vLLM server's engine logged; None if it logged none."""
    errors = (line.rstrip("\n") for line in lines if _OF_THE_ENGINE.match(line) and " ERROR " in line[:60])
    return _first_error([*islice(errors, _MAX_ENGINE_LINES)])


def _first_error(lines: Sequence[str]) -> str | None:
    in_usage = False
    for place, line in enumerate(lines):
        if _WRONG_USAGE.match(line):
            return line.strip()
        in_usage = line.startswith(_USAGE) or (in_usage and line[:1].isspace())
        if in_usage:
            continue
        if _bare(line) == _TRACEBACK:
            if cause := _end_of_traceback(lines[place:]):
                return cause
            continue  # a full disk or a kill has cut it off: its beginning says nothing
        if _ERROR.search(line) and not _BELOW_ERROR.match(line):
            if line != _bare(line) and _bare(line)[:1].isspace():
                # The part of the log that was read begins within a traceback.
                if cause := _end_of_traceback([line, *lines[place:]]):
                    return cause
                continue
            after = lines[place + 1 : place + 2]
            cause = _end_of_traceback(lines[place + 1 :]) if after and _bare(after[0]) == _TRACEBACK else None
            return cause or line.strip()
    return None


def _end_of_traceback(lines: Sequence[str]) -> str | None:
    """Return the exception of the traceback that `lines` begin with, None if it is cut off.

    Lines of other processes may stand in between.
    """
    start = _VLLM_PREFIX.match(lines[0])
    process = start.group(1) if start else None
    own = [_bare(line) for line in lines[1:] if process is None or line.startswith(process)]
    for place, line in enumerate(own):
        if line and not line[0].isspace():
            details = [detail.strip() for detail in own[place + 1 : place + 1 + _MAX_DETAILS] if detail[:1].isspace()]
            return " ".join([line.strip(), *(detail for detail in details if not detail.startswith("For further"))])
    return None


def _bare(line: str) -> str:
    """Remove vLLM's prefix."""
    return _VLLM_PREFIX.sub("", line, count=1).rstrip()
