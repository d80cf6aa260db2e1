"""One segment of an episode while it grows: a prompt, and turns with what the policy was shown between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protocol.messages import Segment, VersionSpan
from rollout_worker.chat.base import Message
from rollout_worker.inference.wire import Sampled, SampledSpan


class SegmentDraft:
    """`ids` begins with the prompt's `prompt_size`; `mask`: sampled; `logprobs`: 0 where not sampled; `spans` count
    from the segment's start."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_size = len(prompt_ids)
        self.ids = list(prompt_ids)
        self.mask = [False] * self.prompt_size
        self.logprobs = [0.0] * self.prompt_size
        self.spans: list[SampledSpan] = []

    def add(self, suffix: Sequence[int], turn: Sampled) -> None:
        """Append what was shown before a turn, and the turn."""
        self.ids += suffix
        self.mask += [False] * len(suffix)
        self.logprobs += [0.0] * len(suffix)
        self.spans += [span.moved(len(self.ids)) for span in turn.spans]
        self.ids += turn.token_ids
        self.mask += [True] * len(turn.token_ids)
        self.logprobs += turn.logprobs

    def segment(self, server_names: Sequence[str]) -> Segment:
        """The tokens so far; spans name their servers by place in `server_names`."""
        return Segment(
            token_ids=np.array(self.ids, dtype=np.int32),
            loss_mask=np.array(self.mask, dtype=np.bool_),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            version_spans=[
                VersionSpan(span.version, span.start, span.end, server_names.index(span.server)) for span in self.spans
            ],
        )


def whole_conversation(prompt: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    """Prompt and what followed as one conversation; a prompt's last message that the policy continued is one with its
    continuation."""
    if not (prompt and messages and prompt[-1].get("role") == messages[0].get("role") == "assistant"):
        return [*prompt, *messages]
    begun, continued = prompt[-1], messages[0]
    content = f"{begun.get('content') or ''}{continued.get('content') or ''}"
    return [*prompt[:-1], {**begun, **continued, "content": content}, *messages[1:]]
