"""`{"name": ..., "parameters": ...}` and nothing around it: Llama 3.1, 3.2 and 3.3.

An object with other keys is an answer in JSON, not a call.
"""

from __future__ import annotations

import re

from rollout_worker.chat.base import MalformedCall
from rollout_worker.chat.parsers.base import CallFinder, Calls, Unreadable, call_of, read_json

_KEYS = frozenset({"name", "parameters", "arguments", "type", "id"})
_BEGINS_A_CALL = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"\\]*"\s*,\s*"(?:parameters|arguments)"'
)


class _Llama3Json:
    opening = re.compile(r'<\|python_tag\|>\s*(?=\{)|\{(?=\s*"(?:name|type)"\s*:)')

    def read(self, source: CallFinder, opened: re.Match[str]) -> tuple[Calls, int]:
        tagged = opened[0] != "{"
        begin = opened.end() if tagged else opened.start()
        try:
            value, end = read_json(source.text, begin)
        except Unreadable as error:
            if tagged or _BEGINS_A_CALL.match(source.text, begin):
                return [MalformedCall(f"the tool call is not valid JSON: {error}")], max(opened.end(), error.at)
            return [], max(opened.end(), error.at)
        if isinstance(value, dict) and (tagged or ("name" in value and set(value) <= _KEYS)):
            return [call_of(value, ("parameters", "arguments"))], end
        return [], opened.end() if tagged else end


NOTATION = _Llama3Json()
