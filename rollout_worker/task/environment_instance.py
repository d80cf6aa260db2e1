"""What an environment says: `reset`'s observation, folded into a row's prompt, and `respond`'s answer to a turn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rollout_worker.chat.base import Message
from rollout_worker.task.plain_data import plain
from rollout_worker.user_code.texts import bounded, type_name

# Text, or messages; None where nothing is said.
Observation: TypeAlias = str | list[Message] | None

# The prompt of a row that has none: the environment's reset gives it.
EMPTY_PROMPT: list[Message] = [{"role": "user", "content": ""}]


def observed(said: Any) -> Observation:
    """What `reset` returned, as plain data: None, text, parts of text, which TRL takes too, or messages. It looks into
    the user's objects, so it runs where user code runs. Raises `TypeError` and `ValueError`."""
    if said is None:
        return None
    if isinstance(said, str):
        return bounded(said)
    entries = [said] if isinstance(said, Mapping) else said
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, Mapping) for entry in entries):
        raise TypeError(
            f"it returned a {type_name(said)}; return None, text, or a list of messages: "
            f"[{{'role': 'user', 'content': ...}}]"
        )
    found: list[Message] = plain(entries, "what it returned")
    if all("role" in entry for entry in found):
        return [{**entry, "content": _text(entry.get("content"))} for entry in found] or None
    return _joined(found)


def answered(said: Any) -> list[Message] | None:
    """What `respond` returned, as messages of the user's role; None ends the episode. As `observed`."""
    found = observed(said)
    if found is None or isinstance(found, str):
        return None if found is None else [{"role": "user", "content": found}]
    if wrong := next((message for message in found if message["role"] != "user"), None):
        raise ValueError(
            f"it returned a message of role {wrong['role']!r:.80}; an answer to the policy has role 'user'"
        )
    if any(not isinstance(message["content"], str) for message in found):
        raise ValueError("it returned a message without text; give it 'content'")
    return [{"role": "user", "content": message["content"]} for message in found]


def rewarded(value: Any) -> float | None:
    """What `get_reward` returned, None for no opinion. As `observed`."""
    if value is None:
        return None
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"it returned {reward}; a reward is a finite number, or None for no reward")
    return reward


def folded(prompt: Sequence[Message], observation: Observation) -> list[Message]:
    """The prompt of one episode. Text goes on where the last user's message ends, as in TRL; messages follow the
    row's, or stand alone where it has none."""
    messages = list(prompt)
    if observation is None:
        return messages
    if not isinstance(observation, str):
        return [*([] if messages == EMPTY_PROMPT else messages), *observation]
    last = next((at for at in reversed(range(len(messages))) if messages[at].get("role") == "user"), None)
    if last is None:
        return [*messages, {"role": "user", "content": observation}]
    content = messages[last].get("content")
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": observation}]
    else:
        content = (content or "") + observation
    messages[last] = {**messages[last], "content": content}
    return messages


def _text(content: Any) -> Any:
    """Parts of text as one text; all else as it is, for the chat format to judge."""
    if isinstance(content, str):
        return bounded(content)
    return _joined(content) if isinstance(content, list) else content


def _joined(parts: list[Any]) -> str:
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type_name(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"it returned a part of type {kind!r:.80}, and the policy reads text alone")
    return bounded("".join(part["text"] for part in parts))
