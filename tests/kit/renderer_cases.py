"""Lists a case for every configuration of the `renderers` library, with and without thinking where it has a switch.

Stand-ins replace the families' tokenizers and harmony's encoder, because these tokenizers and harmony's vocabulary are
on the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

from slipstream.rollout_worker.chat.base import ChatFormat
from slipstream.rollout_worker.chat.renderer import RendererFormat
from tests.kit.chat_case import Case
from tests.kit.stand_in_harmony import StandInHarmony
from tests.kit.stand_in_tokenizer import stand_in_tokenizer

_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_KIMI = (
    "[BOS]",
    "<|im_end|>",
    *(f"<|im_{role}|>" for role in ("user", "assistant", "system", "middle")),
    *(f"<|tool_call{part}|>" for part in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")),
)
_GLM = (
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    *(f"<|{role}|>" for role in ("system", "user", "assistant", "observation")),
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_DEEPSEEK_TOOLS = (
    *(f"<｜tool▁{what}▁{end}｜>" for what in ("calls", "call", "outputs", "output") for end in ("begin", "end")),
    "<｜tool▁sep｜>",
)
_HY3 = tuple(
    f"<{token}:opensource{bar}>"
    for bar, tokens in (
        ("｜", ("｜hy_eos", "｜hy_begin_of_sentence", "｜hy_User", "｜hy_Assistant", "｜reasoning_mode")),
        (
            "",
            [
                f"{slash}{tag}"
                for tag in (
                    "think",
                    "tool_calls",
                    "tool_call",
                    "arg_key",
                    "arg_value",
                    "tool_responses",
                    "tool_response",
                )
                for slash in ("", "/")
            ]
            + ["tool_sep"],
        ),
    )
    for token in tokens
)
_INKLING = (
    "<|content_model_end_sampling|>",
    *(f"<|message_{role}|>" for role in ("user", "model", "system", "tool")),
    *(f"<|content_{kind}|>" for kind in ("text", "thinking", "image", "audio_input", "xml")),
    *("<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>", "<|end_message|>", "<|audio_end|>"),
    *("<|unused_200054|>", "<|unused_200053|>"),
)
_GEMMA = (
    *("<eos>", "<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>"),
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
    *("<|image>", "<|image|>", "<image|>"),
)
_LAGUNA = ("〈|EOS|〉", "<think>", "</think>", "<assistant>", "</assistant>", "<tool_call>", "</tool_call>")
_LLAMA = (
    *("<|eot_id|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|python_tag|>"),
    *("<|start_header_id|>", "<|end_header_id|>"),
)
_MINIMAX = ("[e~[", "]~!b[", "]~b]", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>")
_HARMONY = ("<|return|>", *(f"<|{name}|>" for name in ("start", "end", "call", "channel", "message", "constrain")))
_DEEPSEEK_V4 = (
    *_DEEPSEEK,
    *("<｜latest_reminder｜>", "<think>", "</think>", "｜DSML｜"),
    *(f"<｜{task}｜>" for task in ("action", "query", "authority", "domain", "title", "read_url")),
)

# Special tokens by renderer. The first one ends a text.
SPECIAL_TOKENS: dict[str, Sequence[str]] = {
    # In Qwen3's first releases <think> is not a special token. Its renderer supports both.
    "qwen3": (*_CHATML, *_TAGS),
    "prime-qwen3": (*_CHATML, *_TAGS),
    "qwen3-vl": (*_CHATML, *_TAGS, *_VISION),
    "qwen3.5": (*_CHATML, *_TAGS, *_VISION),
    "qwen3.6": (*_CHATML, *_TAGS, *_VISION),
    "qwen3.8": (*_CHATML, *_TAGS, *_VISION),
    "gemma4": _GEMMA,
    "glm-4.5": _GLM,
    "glm-5": (*_GLM, "<tool_response>", "</tool_response>"),
    "glm-5.1": (*_GLM, "<tool_response>", "</tool_response>"),
    "glm-5.3": (*_GLM, "<tool_response>", "</tool_response>"),
    "gpt-oss": _HARMONY,
    "hy3": _HY3,
    "inkling": _INKLING,
    "kimi-k2": _KIMI,
    "kimi-k2.5": (*_KIMI, *(f"<|media_{part}|>" for part in ("begin", "content", "pad", "end"))),
    "laguna-xs.2": _LAGUNA,
    "laguna-m.1": _LAGUNA,
    "laguna-xs-2.1": _LAGUNA,
    "laguna-s-2.1": _LAGUNA,
    "llama-3": _LLAMA,
    "minimax-m2": _MINIMAX,
    "nemotron-3": (*_CHATML, *_TAGS),
    "nemotron-3-ultra": (*_CHATML, *_TAGS),
    "nemotron-3.5": (*_CHATML, *_TAGS),
    "deepseek-v3": (*_DEEPSEEK, *_DEEPSEEK_TOOLS),
    "deepseek-r1": (*_DEEPSEEK, *_DEEPSEEK_TOOLS),
    "deepseek-v4": _DEEPSEEK_V4,
}

_FAMILIES = {
    "qwen3": "Qwen3",
    "prime-qwen3": "PrimeIntellect Qwen3",
    "qwen3-vl": "Qwen3-VL",
    "qwen3.5": "Qwen3.5",
    "qwen3.6": "Qwen3.6",
    "qwen3.8": "Qwen3.8",
    "gemma4": "Gemma 4",
    "glm-4.5": "GLM-4.5",
    "glm-5": "GLM-5, GLM-4.7",
    "glm-5.1": "GLM-5.1",
    "glm-5.3": "GLM-5.3",
    "gpt-oss": "GPT-OSS",
    "hy3": "Hunyuan Hy3",
    "inkling": "Inkling",
    "kimi-k2": "Kimi K2",
    "kimi-k2.5": "Kimi K2.5, K2.6",
    "laguna-xs.2": "Laguna XS.2",
    "laguna-m.1": "Laguna M.1",
    "laguna-xs-2.1": "Laguna XS-2.1",
    "laguna-s-2.1": "Laguna S-2.1",
    "llama-3": "Llama 3",
    "minimax-m2": "MiniMax M2, M2.5",
    "nemotron-3": "Nemotron 3 Nano, Super",
    "nemotron-3-ultra": "Nemotron 3 Ultra",
    "nemotron-3.5": "Nemotron 3.5",
    "deepseek-v3": "DeepSeek V3",
    "deepseek-r1": "DeepSeek R1",
    "deepseek-v4": "DeepSeek V4",
}

# Options that switch thinking on and off, by renderer. The other renderers have no switch.
_ON_AND_OFF: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        name: ({"enable_thinking": True}, {"enable_thinking": False})
        for name in (
            *("qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "gemma4", "glm-4.5", "glm-5", "glm-5.1", "deepseek-v4"),
            *("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"),
            *("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
        )
    },
    "kimi-k2.5": ({"thinking": True}, {"thinking": False}),
    "hy3": ({"reasoning_effort": "high"}, {"reasoning_effort": "no_think"}),
}
_ALWAYS = ("deepseek-r1", "glm-5.3", "gpt-oss", "inkling", "minimax-m2")


@cache
def tokenizer_of(renderer: str) -> Any:
    """Return the stand-in for a renderer's tokenizer. It is shared, so do not change it."""
    special = SPECIAL_TOKENS[renderer]
    return stand_in_tokenizer(special, eos=special[0])


def build(renderer: str, options: dict[str, Any], tools: Sequence[dict[str, Any]]) -> RendererFormat:
    """Build the format of a renderer with these options, over its stand-in tokenizer."""
    from pydantic import TypeAdapter
    from renderers import RendererConfig

    config = TypeAdapter(RendererConfig).validate_python({"name": renderer, **options})
    tokenizer = tokenizer_of(renderer)
    if renderer != "gpt-oss":
        return RendererFormat(tokenizer, config, tools)
    with patch("renderers.gpt_oss.load_harmony_encoding", lambda name: StandInHarmony(tokenizer)):
        return RendererFormat(tokenizer, config, tools)


def _case(renderer: str, options: dict[str, Any], thinking: str) -> Case:
    def built(tools: Sequence[dict[str, Any]]) -> ChatFormat:
        return build(renderer, options, tools)

    return Case(_FAMILIES[renderer], f"renderer {renderer}", built, "stand-in", thinking)


def _cases() -> list[Case]:
    cases = []
    for renderer in SPECIAL_TOKENS:
        if renderer in _ON_AND_OFF:
            on, off = _ON_AND_OFF[renderer]
            cases += [_case(renderer, on, "on"), _case(renderer, off, "off")]
        else:
            cases.append(_case(renderer, {}, "always" if renderer in _ALWAYS else "none"))
    return cases


CASES: list[Case] = _cases()
