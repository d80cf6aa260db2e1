"""What scripts with a `rollout_func` import from `trl.experimental.openenv`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["generate_rollout_completions"]


def generate_rollout_completions(
    trainer: Any,
    prompts: Sequence[Any],
    *,
    generation_overrides: Mapping[str, Any] | None = None,
    as_chat: bool | None = None,
) -> list[dict[str, Any]]:
    """Sample a completion of each prompt, inside a `rollout_func`.

    Args:
        trainer: The trainer that the `rollout_func` was given.
        prompts: Texts, to which no special tokens are added; lists of messages, which are rendered; or token ids.
        generation_overrides: Parameters of the requests; one that changes the distribution is not followed, and said.
        as_chat: Has no meaning here: messages are always rendered.

    Returns:
        prompt_ids, completion_ids, logprobs and text of each.
    """
    given = dict(generation_overrides or {})
    return [trainer.complete(trainer.rendered(prompt), **given)[0] for prompt in prompts]
