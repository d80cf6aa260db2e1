"""Registers the notations of tool calls in a turn's text, by name.

To add one, write a `Notation`, or a `Parser` for a notation of whole turns, in a file of this folder and add a line
here. `auto` tries the notations in this order on a call that the template wrote.
"""

from slipstream.rollout_worker.chat.parsers import json_calls, literal_calls, tagged_calls
from slipstream.rollout_worker.chat.parsers.base import Before, Notation, Parser, Scan, Thought

NOTATIONS: dict[str, Notation] = {
    "hermes": json_calls.HERMES,
    "qwen3_xml": tagged_calls.QWEN3_XML,
    "glm4": tagged_calls.GLM4,
    "gemma4": literal_calls.GEMMA4,
    "lfm2_pythonic": literal_calls.LFM2_PYTHONIC,
    "mistral": json_calls.MISTRAL,
    "deepseek": json_calls.DEEPSEEK,
    "kimi": json_calls.KIMI,
    "minimax": tagged_calls.MINIMAX,
    "cohere": json_calls.COHERE,
    "phi4": json_calls.PHI4,
    "nemotron_json": json_calls.NEMOTRON_JSON,
    "llama3_json": json_calls.LLAMA3_JSON,
}
_THOUGHTS = {
    "gemma4": Thought("<|channel>thought", "<channel|>", separate=True),
    "cohere": Thought("<|START_THINKING|>", "<|END_THINKING|>", separate=True),
}
WHOLE_TURNS: dict[str, Parser] = {"harmony": tagged_calls.parse_harmony, "atem": tagged_calls.parse_atem}
NAMES = (*NOTATIONS, *WHOLE_TURNS)


def by_name(name: str, thought: Thought) -> Parser:
    """Return the parser of that name.

    Args:
        name: One of `NAMES`.
        thought: The form in which the model's template writes reasoning. If the template does not show it, a notation
            that belongs to one model family supplies that family's tags.

    Returns:
        The parser.

    Raises:
        KeyError: There is no parser of that name.
    """
    if name in WHOLE_TURNS:
        return WHOLE_TURNS[name]
    return Scan(NOTATIONS[name], thought if thought.separate else _THOUGHTS.get(name, thought))


__all__ = ["NAMES", "NOTATIONS", "WHOLE_TURNS", "Before", "Notation", "Parser", "Scan", "Thought", "by_name"]
