"""Each framework of docs/frameworks.md plays its snippet of that page, in its own environment.

Asked for by name, as environments are downloaded: `pytest -m frameworks`.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slipstream.rollout_worker.task.agent import Endpoint
from tests import kit
from tests.frameworks.environments import environment, playing
from tests.kit.agent import agent_task
from tests.kit.fake_vllm.policies import multiplying, scripted
from tests.kit.worker import TOKENIZER, fake, roll

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
CONFIG = kit.config(
    kit.WORKER,
    rollout={"max_turns": 8, "max_episode_tokens": 20_000, "max_turn_tokens": 2_000},
    vllm={"max_model_len": 60_000},
    learner={"token_budget": 60_000},
    worker={"episode_timeout_s": 240.0, "request_timeout_s": 60.0},
)


class Snippet(NamedTuple):
    name: str
    packages: list[str]
    code: str


def snippets() -> list[Snippet]:
    """Return the snippets of the page: a heading, a line that installs, and the code, for each framework."""
    found = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return [
        Snippet(name, shlex.split(install[1]), code[1])
        for name, text in found
        if (install := re.search(r"`pip install (.+?)`", text))
        and (code := re.search(r"```python\n(.*?)```", text, re.DOTALL))
    ]


SNIPPETS = snippets()
PREFIX = "Calculator-"
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>'


class Played(NamedTuple):
    """What a rollout has: segments, turns, and calls of the policy."""

    segments: int = 1
    turns: int = 2
    calls: int = 1


# Those whose loop is another, or that write their conversation again.
OTHERS = {
    # Calls and results come back as text, and the answer is a call, too.
    "smolagents": Played(segments=2, calls=2),
    # One answer in a form; no loop.
    "instructor": Played(turns=1),
}


def playing_along(text: str, index: int) -> str:
    """Multiply with the tool, in the words that a framework asks for."""
    if '"name": "Product"' in text:
        return '<tool_call>{"name": "Product", "arguments": {"value": 408}}</tool_call>'
    if '"name": "final_answer"' in text and text.rpartition("<|im_start|>user")[2].count("408"):
        return '<tool_call>{"name": "final_answer", "arguments": {"answer": "408"}}</tool_call>'
    said = multiplying(text, index)
    # Semantic Kernel's names have the class before the method.
    return said.replace('"multiply"', f'"{PREFIX}multiply"') if f'"name": "{PREFIX}multiply"' in text else said


@pytest.mark.frameworks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("snippet", SNIPPETS, ids=[snippet.name for snippet in SNIPPETS])
async def test_i4_a_plain_tool_loop_is_one_segment(snippet: Snippet, tmp_path: Path) -> None:
    python = environment(snippet.packages)
    (tmp_path / "snippet.py").write_text(snippet.code, encoding="utf-8")
    with playing(python, tmp_path / "snippet.py") as player:

        def agent(endpoint: Endpoint, question: str, answer: int) -> Any:
            return player.play(endpoint, question=question, answer=answer)

        rows = [{"question": "Multiply 12 by 34.", "answer": 408}]
        server = fake(scripted(TOKENIZER, playing_along), max_model_len=60_000)
        run = await roll(agent_task(agent, dataset=rows), server, config=CONFIG)
    assert run.queue.failures == {}, run.queue.failures
    for rollout in run.rollouts:
        told = {name: value for name, value in rollout.metrics.items() if name.startswith("agent/")}
        print(f"{snippet.name}: {len(rollout.segments)} segments, {rollout.turns} turns, {told}")
        assert rollout.reward == 1.0, rollout.messages
        played = Played(len(rollout.segments), rollout.turns, rollout.tool_calls)
        assert played == OTHERS.get(snippet.name, Played()), rollout.extra
        assert rollout.tool_failures == 0
        sampled = [segment.token_ids[segment.loss_mask] for segment in rollout.segments]
        turns = "".join(TOKENIZER.decode(ids, skip_special_tokens=False) for ids in sampled).split("<|im_end|>")
        # Each turn trains once, and nothing else does.
        assert len(turns) == rollout.turns + 1
        assert turns[0].replace(PREFIX, "") == (CALL if rollout.turns > 1 else turns[0])
        assert "408" in turns[-2]
        assert turns[-1] == ""
