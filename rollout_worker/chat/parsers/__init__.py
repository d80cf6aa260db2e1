"""How tool calls are written in a turn's text: one file for each notation.

Adding one is a file with a `NOTATION`, or with a `parse` for a notation of whole turns, and a line here. `auto` tries
them in this order on a call that the template wrote.
"""

from rollout_worker.chat.parsers import (
    atem,
    cohere,
    deepseek,
    gemma4,
    glm4,
    harmony,
    hermes,
    kimi,
    lfm2_pythonic,
    llama3_json,
    minimax,
    mistral,
    nemotron_json,
    phi4,
    qwen3_xml,
)
from rollout_worker.chat.parsers.base import Before, Notation, Parser
from rollout_worker.chat.parsers.scan import Scan, Thought

NOTATIONS: dict[str, Notation] = {
    "hermes": hermes.NOTATION,
    "qwen3_xml": qwen3_xml.NOTATION,
    "glm4": glm4.NOTATION,
    "gemma4": gemma4.NOTATION,
    "lfm2_pythonic": lfm2_pythonic.NOTATION,
    "mistral": mistral.NOTATION,
    "deepseek": deepseek.NOTATION,
    "kimi": kimi.NOTATION,
    "minimax": minimax.NOTATION,
    "cohere": cohere.NOTATION,
    "phi4": phi4.NOTATION,
    "nemotron_json": nemotron_json.NOTATION,
    "llama3_json": llama3_json.NOTATION,
}
_THOUGHTS = {
    "gemma4": Thought("<|channel>thought", "<channel|>", told=True),
    "cohere": Thought("<|START_THINKING|>", "<|END_THINKING|>", told=True),
}
WHOLE_TURNS: dict[str, Parser] = {"harmony": harmony.parse, "atem": atem.parse}
NAMES = (*NOTATIONS, *WHOLE_TURNS)


def by_name(name: str, thought: Thought) -> Parser:
    """The parser of that name, for a model that thinks so. Raises `KeyError`.

    Where its template does not show how, a notation that is of one family with its tags of thought knows."""
    if name in WHOLE_TURNS:
        return WHOLE_TURNS[name]
    return Scan(NOTATIONS[name], thought if thought.told else _THOUGHTS.get(name, thought))


__all__ = ["NAMES", "NOTATIONS", "WHOLE_TURNS", "Before", "Notation", "Parser", "Scan", "Thought", "by_name"]
