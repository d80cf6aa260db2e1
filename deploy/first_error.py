"""The first error in a log: what went wrong, where everything after it only followed from it."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TRACEBACK = "Traceback (most recent call last):"
# A line of a log that tells of less, such as a failure that the process outlives.
_LESS = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING) ")
_ERROR = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|(^|\s)[\w.]*(Error|Exception)\b:|^slipstream: ")
# What vLLM writes before each line of a traceback that it logs: process, level, time and place.
_VLLM = re.compile(r"^(\([^()]+ pid=\d+\) )?(?:\w+ \d\d-\d\d \d\d:\d\d:\d\d \[[^]]*\] ?)?")
# What our part of a vLLM server says of its engine's end, after all that failed by it.
_ENGINE_ENDED = re.compile(r"its EngineCore process ended \([^)]*\)")
_OF_THE_ENGINE = re.compile(r"^\((EngineCore|(Vllm)?Worker)\S* pid=\d+\) ")
# Detail lines of an error that are quoted: pydantic's and others' first line says only that there is one.
_DETAILS = 2


def first_error(lines: Sequence[str]) -> str | None:
    """The first line that reports an error; of a traceback the exception it ends with, which for a chain of them is
    the root. None: no line does.

    Of a vLLM server whose engine ended it is the engine's own last word, if it had one, else that it ended."""
    if (ended := next(filter(None, map(_ENGINE_ENDED.search, lines)), None)) is not None:
        return _first_error([line for line in lines if _OF_THE_ENGINE.match(line)]) or ended.group()
    return _first_error(lines)


def _first_error(lines: Sequence[str]) -> str | None:
    for place, line in enumerate(lines):
        if _bare(line) == _TRACEBACK:
            return _end_of_traceback(lines[place:]) or line.strip()
        if _ERROR.search(line) and not _LESS.match(line):
            if line != _bare(line) and _bare(line)[:1].isspace():
                # The log's end begins within a traceback.
                return _end_of_traceback([line, *lines[place:]]) or line.strip()
            after = lines[place + 1 : place + 2]
            cause = _end_of_traceback(lines[place + 1 :]) if after and _bare(after[0]) == _TRACEBACK else None
            return cause or line.strip()
    return None


def _end_of_traceback(lines: Sequence[str]) -> str | None:
    """`lines` begin with a traceback. None: it is cut short. Other processes' lines may stand in between."""
    start = _VLLM.match(lines[0])
    process = start.group(1) if start else None
    own = [_bare(line) for line in lines[1:] if process is None or line.startswith(process)]
    for place, line in enumerate(own):
        if line and not line[0].isspace():
            details = [detail.strip() for detail in own[place + 1 : place + 1 + _DETAILS] if detail[:1].isspace()]
            return " ".join([line.strip(), *(detail for detail in details if not detail.startswith("For further"))])
    return None


def _bare(line: str) -> str:
    """Without what vLLM writes before it."""
    return _VLLM.sub("", line, count=1).rstrip()
