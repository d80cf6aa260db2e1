"""Trains the multiply example's policy by programs written for agent frameworks, unchanged, on real vLLM.

    python -m benchmarks.frameworks [--only pydantic-ai] [--steps 60] [--out FOLDER]

The programs are snippets of docs/frameworks.md, which says what to install; here all are in one environment. A first
episode against a server that answers as vLLM does shows which tools and messages each framework sends. One tiny policy
is warm-started on conversations of all these forms, half of them flawed, and each framework then trains a copy by
`slipstream up`. The reward is the exact product as the last message.

Prints a JSON line for each framework: the mean reward of the first and the last five steps, the first step from which
five steps have a mean of 0.9, and of the last step how often an episode asked for what was not followed, or began a
further segment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.frameworks.test_frameworks import SNIPPETS
from tests.kit import WORKER, config
from tests.kit.agent import agent_task
from tests.kit.fake_vllm.policies import multiplying, scripted
from tests.kit.worker import TOKENIZER, fake, roll

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "multiply")]

NAMES = ("OpenAI Agents SDK", "pydantic-ai", "LangGraph with its own graph", "anthropic")
REACHED, OVER = 0.9, 5

TASK = """
import random

from slipstream import Task

{snippet}

async def program(endpoint, question, answer):
    await agent(endpoint, question, answer)


def accuracy(completions, answer, **_):
    return [float(each[-1].get("content") == str(right)) for each, right in zip(completions, answer)]


def rows(rng):
    for _ in range(4096):
        a, b = (rng.randint(*rng.choice([(0, 9), (10, 99), (100, 999)])) for _ in range(2))
        yield {{"question": f"Multiply {{a}} by {{b}}.", "answer": a * b}}


task = Task(dataset=list(rows(random.Random(1))), agent=program, rewards=[accuracy], agent_errors={{Exception: 0.0}})
"""


class Form(NamedTuple):
    """What a framework sends before the question, and its tools."""

    before: list[dict[str, Any]]
    tools: list[dict[str, Any]]


async def form_of(snippet: str) -> Form:
    """Play one episode of a snippet, and read what its first prompt shows."""
    space: dict[str, Any] = {}
    exec(snippet, space)
    shown: list[str] = []

    def policy(text: str, index: int) -> str:
        shown.append(text)
        return multiplying(text, index)

    rows = [{"question": "Multiply 12 by 34.", "answer": 408}]
    settings = config(WORKER, rollout={"max_turns": 8}, vllm={"max_model_len": 8000}, learner={"token_budget": 8000})
    await roll(agent_task(space["agent"], dataset=rows), fake(scripted(TOKENIZER, policy)), config=settings)
    tools = re.search(r"<tools>\n(.*?)\n</tools>", shown[0], re.DOTALL)
    assert tools is not None, shown[0]
    own = re.search(r"<\|im_start\|>system\n(.*?)\n\n# Tools", shown[0], re.DOTALL)
    before = [{"role": "system", "content": own[1]}] if own else []
    return Form(before, [json.loads(line) for line in tools[1].splitlines()])


def build(forms: Sequence[Form], out: Path) -> None:
    """Warm-start the example's policy on conversations of all forms."""
    import demonstrations
    from tiny_policy.demonstration import Demonstration
    from tiny_policy.recipe import Recipe
    from tiny_policy.warm_start import warm_start

    def in_some_form(demo: Demonstration, rng: random.Random) -> Demonstration:
        form = rng.choice(forms)
        return demo._replace(prompt=[*form.before, *demo.prompt], tools=form.tools)

    recipe = Recipe(
        tools=forms[0].tools,
        correct=lambda rng: in_some_form(demonstrations.correct(rng), rng),
        mixed=lambda rng: in_some_form(demonstrations.mixed(rng), rng),
    )
    for part in warm_start(recipe, seed=0):
        part.save_pretrained(out)


def train(name: str, snippet: str, model: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Train by a snippet; return the figures."""
    folder.mkdir(parents=True)
    (folder / "task.py").write_text(TASK.format(snippet=snippet), encoding="utf-8")
    settings = ["--model.path", str(model), "--task.path", f"{folder}/task.py:task", "--run.dir", str(folder)]
    settings += ["--run.name", "run", "--learner.steps", str(steps), "--rollout.max_episode_tokens", "400"]
    command = [sys.executable, "-m", "slipstream.deploy.cli", "up", str(EXAMPLES / "multiply" / "run.toml"), *settings]
    subprocess.run(command, check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines]
    means = [statistics.mean(rewards[at : at + OVER]) for at in range(len(rewards) - OVER + 1)]
    return {
        "framework": name,
        "first": round(means[0], 3),
        "last": round(means[-1], 3),
        "reached at step": next((at + 1 for at, mean in enumerate(means) if mean >= REACHED), None),
        "an episode": {name: round(value, 2) for name, value in lines[-1].items() if name.startswith("agent/")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/frameworks"))
    arguments = parser.parse_args()
    code = {snippet.name: snippet.code for snippet in SNIPPETS}
    model = arguments.out.resolve() / "model"
    if not model.exists():
        build([asyncio.run(form_of(code[name])) for name in NAMES], model)
    for name in arguments.only:
        folder = arguments.out.resolve() / name.replace(" ", "-")
        print(json.dumps(train(name, code[name], model, folder, arguments.steps)), flush=True)


if __name__ == "__main__":
    main()
