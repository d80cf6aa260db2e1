"""What one episode is played in: its prompt, its tools, and who answers a turn that calls none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rollout_worker.chat.base import ChatFormat, Message
from rollout_worker.inference.wire import AS_THE_RUN, OwnParams
from rollout_worker.tools.toolbox import ToolBox

# The conversation after the prompt, to the messages that answer it; None ends the episode. Raises `EpisodeFailed`.
Respond = Callable[[Sequence[Message]], Awaitable[list[Message] | None]]


@dataclass(frozen=True, slots=True)
class Scene:
    """prompt: what `prompt_ids` were made of; a new segment is rendered from its messages, and needs some. chat: the
    format that shows `tools`. respond: an environment's answer to a turn without calls; without it such a turn is the
    last. own: what it is sampled with of its own."""

    prompt: str | Sequence[Message]
    prompt_ids: list[int]
    chat: ChatFormat
    tools: ToolBox
    respond: Respond | None = None
    own: OwnParams = AS_THE_RUN
