"""Writes docs/models.md, from the start check of each family: `python -m tests.models_page > docs/models.md`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from protocol.config import ConfigError
from rollout_worker.chat.parsers import NAMES
from rollout_worker.chat.proof import Proof, prove
from rollout_worker.chat.template import TemplateFormat
from rollout_worker.task.tools import ToolBox
from tests.kit.chat_case import Case

_MODULES = ("tests.kit.renderer_cases", "tests.kit.template_cases")
_HEAD = """\
# Models

Which model families work, with what. Written by `python -m tests.models_page > docs/models.md` from the check that
every worker makes at its start; a test compares the two.

A chat format turns messages into ids, and sampled ids into messages. With `[chat] format = "auto"` it is a renderer
where the `renderers` library knows the model by its name, and else the tokenizer's own chat template with a parser
of tool calls.

- A fine-tune, or a folder, of a family that a renderer knows: `[chat] renderer = "qwen3"`, and its options in
  `renderer_options`.
- Any other template: nothing to set. The parser is found by letting the template write a call and each notation
  read it. `[chat] template = "file.jinja"` takes a file in place of the tokenizer's, `chat_template_kwargs` sets
  its variables.
- A notation by name: `[chat] parser = "hermes"`, or another of {parsers}. `response_template` is the tokenizer's
  own, which `auto` takes first.
- A notation of your own: `[chat] parser = "path/to/file.py:function"`. The function takes the turn's text, without
  the token that ended it, and returns a list of `(name, arguments)`, empty where there is no call, or a
  `rollout_worker.chat.base.ParsedTurn`, which tells content and reasoning apart too. It runs for each turn on the
  worker's event loop: keep it as short as a regular expression. What it raises becomes a malformed call.

A relative path in `[chat]` starts at the run file's folder; on the command line, at the working directory.

**Tools**: the prompt shows the schemas, a call that the format wrote (numbers, quotes, line breaks, values within
values, other alphabets) is read back, and what is appended after a turn is what the whole conversation has there. A
value that comes back as text counts if it reads as the one that was written, as the tools' schemas say what is
meant. A family that is not fit is refused at the start of a run with tools, with what to set; it works without
tools. **Thinking**: whether it is on in that row, and whether reasoning is told from content. Where a template
drops reasoning once a user speaks again, a new segment opens there. **Parallel**: two calls in one turn.
**Rounds**: a second turn of calls and answers.

**Stand-in** tokenizers are byte-level ones with the family's special tokens. They show all that the table says but
the merges of the real vocabulary; no real tokenizer and no checkpoint was at hand where no row says "real". So
nothing here shows that a checkpoint was trained to write what its template writes. The templates are those that TRL
1.16.0 ships; the tokenizers of its tool-calling tests have the same ones.

| family | how | tools | thinking | parallel | rounds | tokenizer |
|---|---|---|---|---|---|---|
"""


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


def page() -> str:
    cases = [case for name in _MODULES if find_spec(name) is not None for case in import_module(name).CASES]
    rows = sorted((_row(case) for case in cases), key=lambda row: row[0].lower())
    lines = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)
    parsers = ", ".join(f"`{name}`" for name in NAMES)
    return _HEAD.replace("{parsers}", parsers) + "".join(lines)


def _row(case: Case) -> Sequence[str]:
    schemas: list[dict[str, Any]] = ToolBox([multiply]).schemas
    how, proof = case.how, Proof()
    try:
        chat = case.build(schemas)
        proof = asyncio.run(prove(chat, schemas))
        if isinstance(chat, TemplateFormat):
            how = f"{how}, parser {chat.parser_name}"
        refusal = proof.problems[0] if proof.problems else ""
    except ConfigError as error:
        refusal = str(error).partition("with tools: ")[2]
    tools = "yes" if proof.fit_for_tools else f"refused: {_short(refusal)}"
    told = {None: "", True: ", told from content", False: ", not told from content"}[proof.reasoning]
    answers = (_yes(proof.parallel_calls), _yes(proof.several_rounds)) if proof.fit_for_tools else ("", "")
    return (case.family, how, tools, case.thinking + told, *answers, case.tokenizer)


def _yes(found: bool | None) -> str:
    return "yes" if found else "no"


def _short(problem: str) -> str:
    """The problem without the remedy and without what was read."""
    return problem.partition("; ")[0].partition(": '")[0].partition(", '")[0].partition(" (")[0]


if __name__ == "__main__":
    print(page(), end="")
