"""Lists a case for each chat template of TRL 1.16.0, read from the installed package, on stand-in tokenizers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.rollout_worker.chat.template import TemplateFormat
from tests.kit.chat_case import Case
from tests.kit.stand_in_tokenizer import stand_in_tokenizer

_BOS = ("<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>")
_TOKENS = re.compile(r"<\|[^|<>\s'\"]+\|>|<｜[^｜]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>")


@dataclass(frozen=True, slots=True)
class Template:
    """Describes one of TRL's chat templates.

    Attributes:
        stem: Name of its file, without the ending.
        family: Name of the model family.
        ends: Tokens that end a turn, as in the models' generation_config.json. The tokenizer's eos is first.
        special: Special tokens that the template's text does not show.
        refused: Part of the reason why it does not support tools; None if it does.
        thinking: Whether it thinks if `enable_thinking` is not set; None if it has no such switch.
        in_trl: Whether TRL reads its calls.
    """

    stem: str
    family: str
    ends: Sequence[str]
    special: Sequence[str] = ()
    refused: str | None = None
    thinking: bool | None = None
    in_trl: bool = True

    @property
    def text(self) -> str:
        return (templates_folder() / f"{self.stem}.jinja").read_text(encoding="utf-8")

    def format(self, tools: Sequence[dict[str, Any]], **settings: Any) -> TemplateFormat:
        tokenizer = _tokenizer(self)
        stops = [tokenizer.convert_tokens_to_ids(token) for token in self.ends]
        return TemplateFormat(tokenizer, stops, tools, self.stem, **settings)


@cache
def _tokenizer(template: Template) -> Any:
    """Return the template's stand-in tokenizer. It is shared, so do not change it."""
    special = dict.fromkeys([*template.ends, *template.special, *_TOKENS.findall(template.text)])
    bos = next((token for token in template.special if token in _BOS), None)
    return stand_in_tokenizer(list(special), template.ends[0], bos=bos, chat_template=template.text)


def templates_folder() -> Path:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "chat_templates"


def shipped() -> list[str]:
    """Return the names of TRL's templates, without the patched ones that it trains with."""
    names = sorted(file.stem for file in templates_folder().glob("*.jinja"))
    return [name for name in names if not name.endswith("_training")]


_IM = ("<|im_end|>", "<|endoftext|>")
_IM_SPECIAL = ("<|im_start|>",)
_COHERE = ("<|END_OF_TURN_TOKEN|>",)
_DEEPSEEK = ("<｜end▁of▁sentence｜>",)
_GEMMA = ("<end_of_turn>", "<eos>")
_GEMMA4 = ("<turn|>", "<eos>", "<|tool_response>")
_GEMMA4_SPECIAL = ("<bos>", "<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<tool_response|>")
_LLAMA = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_LLAMA_SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
_SMOL = ("<end_of_utterance>",)

TEMPLATES = [
    Template("cohere", "Aya Expanse", _COHERE, refused="roles must alternate", in_trl=False),
    Template("cohere2", "Tiny Aya", _COHERE, refused="leaves out tool messages", in_trl=False),
    Template(
        "deepseek_r1_distill", "DeepSeek-R1-Distill", _DEEPSEEK, refused="leaves out the tool calls", in_trl=False
    ),
    Template("deepseekv3", "DeepSeek-V3", _DEEPSEEK, refused="does not show the tool", in_trl=False),
    Template(
        "diffusion_gemma",
        "DiffusionGemma",
        _GEMMA4,
        _GEMMA4_SPECIAL,
        refused="not asked for",
        thinking=False,
        in_trl=False,
    ),
    Template(
        "gemma", "Gemma, Gemma 2", _GEMMA, ("<bos>", "<start_of_turn>"), refused="roles must alternate", in_trl=False
    ),
    Template("gemma3", "Gemma 3", _GEMMA, ("<bos>", "<start_of_turn>"), refused="roles must alternate", in_trl=False),
    *(
        Template(stem, f"Gemma 4, {which}", _GEMMA4, _GEMMA4_SPECIAL, thinking=False)
        for stem, which in [
            ("gemma4", "third template"),
            ("gemma4_v2", "first template"),
            ("gemma4_v3", "second template"),
            ("gemma4_v4", "fourth template"),
            ("gemma4_v5", "fifth template"),
        ]
    ),
    Template("glm4moe", "GLM 4.5", ("<|endoftext|>", "<|user|>", "<|observation|>"), thinking=True),
    Template("gptoss", "GPT-OSS", ("<|return|>", "<|call|>", "<|endoftext|>")),
    Template("idefics3", "Idefics3", _SMOL, refused="leaves out the tool calls", in_trl=False),
    Template(
        "lfm2",
        "LFM2, first template",
        _IM,
        ("<|startoftext|>", *_IM_SPECIAL),
        refused="leaves out the tool calls",
        in_trl=False,
    ),
    Template("lfm2_v2", "LFM2", _IM, ("<|startoftext|>", *_IM_SPECIAL)),
    Template("lfm2_2_5", "LFM2.5, first template", _IM, ("<|startoftext|>", *_IM_SPECIAL)),
    Template("lfm2_2_5_v2", "LFM2.5", _IM, ("<|startoftext|>", *_IM_SPECIAL)),
    Template("lfm2_2_5_vl", "LFM2.5-VL", _IM, ("<|startoftext|>", *_IM_SPECIAL)),
    Template("llama3", "Llama 3", _LLAMA, _LLAMA_SPECIAL, refused="leaves out the tool calls", in_trl=False),
    Template("llama3_1", "Llama 3.1", _LLAMA, _LLAMA_SPECIAL),
    Template("llama3_2", "Llama 3.2", _LLAMA, _LLAMA_SPECIAL),
    Template("llava_next", "LLaVA-NeXT", ("</s>",), ("<s>",), refused="refuses a tool message", in_trl=False),
    Template("muse_glimmer", "Muse Glimmer", ("<|eot|>",), ("<|start|>", "<|message|>", "<|eom|>"), in_trl=False),
    Template("nemotron_3_nano", "Nemotron 3 Nano", _IM, _IM_SPECIAL, thinking=True),
    Template("nemotron_3_super", "Nemotron 3 Super", _IM, _IM_SPECIAL, thinking=True),
    Template("nemotron_3_ultra", "Nemotron 3 Ultra", _IM, _IM_SPECIAL, thinking=True),
    Template("nemotron_3_5_lightning", "Nemotron 3.5 Lightning", _IM, _IM_SPECIAL, thinking=True),
    Template("phi3", "Phi-3", ("<|end|>", "<|endoftext|>"), refused="leaves out tool messages", in_trl=False),
    Template("phi3_5", "Phi-3.5", ("<|end|>", "<|endoftext|>"), refused="leaves out tool messages", in_trl=False),
    Template("qwen2_5", "Qwen2.5", _IM, _IM_SPECIAL),
    Template("qwen2_5_vl", "Qwen2.5-VL", _IM, _IM_SPECIAL, refused="leaves out the tool calls", in_trl=False),
    Template("qwen3", "Qwen3", _IM, _IM_SPECIAL, thinking=True),
    Template("qwen3_instruct_2507", "Qwen3-Instruct-2507", _IM, _IM_SPECIAL),
    Template("qwen3_vl", "Qwen3-VL", _IM, _IM_SPECIAL),
    Template("qwen3_5_think", "Qwen3.5, 4B and larger", _IM, _IM_SPECIAL, thinking=True),
    Template("qwen3_5_nothink", "Qwen3.5, 2B and smaller", _IM, _IM_SPECIAL, thinking=False),
    Template("qwen3_6", "Qwen3.6", _IM, _IM_SPECIAL, thinking=True),
    Template("qwen3_8", "Qwen3.8", _IM, _IM_SPECIAL, thinking=True),
    Template("smolvlm", "SmolVLM", _SMOL, refused="leaves out the tool calls", in_trl=False),
]


def _case(template: Template, thinking: bool | None) -> Case:
    variables = {} if thinking is None else {"enable_thinking": thinking}

    def build(tools: Sequence[dict[str, Any]]) -> TemplateFormat:
        return template.format(tools, variables=variables)

    how = f"template {template.stem}"
    words = "as it comes" if thinking is None else "on" if thinking else "off"
    return Case(template.family, how, build, "stand-in", words)


CASES: list[Case] = [
    _case(template, thinking)
    for template in TEMPLATES
    for thinking in ((None,) if template.thinking is None else (True, False))
]
