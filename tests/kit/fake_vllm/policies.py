"""Scripted policies: from the ids of a prompt to the ids that are sampled."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

Policy = Callable[[list[int], int], list[int]]
"""(ids of the prompt, index of the continuation) -> sampled ids, with the stop token that ends them."""


def scripted(tokenizer: Any, reply: Callable[[str, int], str]) -> Policy:
    """A policy that answers the prompt's text with a text; `<|im_end|>` is put after it."""

    def policy(token_ids: list[int], index: int) -> list[int]:
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        ids: list[int] = tokenizer.encode(reply(text, index) + "<|im_end|>", add_special_tokens=False)
        return ids

    return policy


def multiplying(text: str, index: int) -> str:
    """Asks the tool for the product, then says it."""
    answer = re.search(
        r"<tool_response>\n(.*)\n</tool_response>", text.rpartition("assistant")[0].rpartition("user")[2]
    )
    if answer:
        return answer[1]
    numbers = re.search(r"Multiply (\d+) by (\d+)", text)
    if not numbers:
        return "What?"
    return f'<tool_call>{{"name": "multiply", "arguments": {{"a": {numbers[1]}, "b": {numbers[2]}}}}}</tool_call>'


def persistent(turns: int, before: str = "") -> Callable[[str, int], str]:
    """As `multiplying`, but it asks the tool again and again, `turns` turns in all, and writes calls as Qwen's template
    does, with the text `before` in front of every turn."""

    def reply(text: str, index: int) -> str:
        if text.count("<|im_start|>assistant\n") >= turns:
            return before + multiplying(text, index)
        call = multiplying(text[: text.index("<|im_end|>\n<|im_start|>assistant\n")], index)
        return before + call.replace("<tool_call>", "<tool_call>\n").replace("</tool_call>", "\n</tool_call>")

    return reply


def in_turn(replies: Sequence[str]) -> Callable[[str, int], str]:
    """Says the k-th reply in the k-th turn, counted by the turns that the prompt shows."""

    def reply(text: str, index: int) -> str:
        return replies[text.count("<|im_start|>assistant\n") - 1]

    return reply
