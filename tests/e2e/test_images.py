"""A model that sees on a real vLLM: images in prompts and from a tool, a tower that trains, log-probs of both ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.deploy.run.run_directory import write_resolved
from slipstream.protocol.config import load
from slipstream.weight_sync.vllm import cpu_server
from tests.e2e.conftest import SmallRun
from tests.kit.ports import free_port
from tests.kit.seeing import build_seeing
from tests.kit.supervised import processes

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not cpu_server.FOLDER.is_dir(), reason="deploy/setup.sh has put no torchvision there"),
]

TASK = """
from PIL import Image
from slipstream import Task

def picture(number):
    return Image.new("RGB", (48, 48 + 16 * (number % 3)), (number * 37 % 256, number * 91 % 256, 90))

class Screen:
    def reset(self, number, **columns):
        self.number = number
        return [{"type": "text", "text": "Now:"}, {"type": "image", "image": picture(number + 5)}]

    def respond(self, messages):
        said = sum(message["role"] == "assistant" for message in messages)
        return None if said > 1 else [{"role": "user", "content": [{"type": "image", "image": picture(said)}]}]

def spread(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]

def rows(count):
    for number in range(count):
        part = {"type": "image", "image": picture(number)}
        yield {"prompt": [{"role": "user", "content": [part, {"type": "text", "text": "Which?"}]}], "number": number}

task = Task(dataset=list(rows(64)), environment=Screen, rewards=[spread])
"""

RUN = """
[run]
name = "seeing"
[model]
train_vision = true
[task]
path = "task.py:task"
[images]
enabled = true
max_per_episode = 6
[rollout]
group_size = 4
max_turn_tokens = 8
max_episode_tokens = 24
max_turns = 3
[queue]
max_staleness = 0
[learner]
steps = 3
groups_per_step = 4
learning_rate = 1e-2
zero_variance = "keep"
token_budget = 2048
[vllm]
max_model_len = 256
max_num_seqs = 16
args = ["--max-num-batched-tokens", "1024", "--kv-cache-memory-bytes", "64M", "--block-size", "32"]
"""


@pytest.mark.wide
def test_what_server_and_learner_see_is_the_same_while_the_tower_trains(tmp_path: Path) -> None:
    """At staleness 0 every token was sampled by the weights that train on it. Were an image embedded by the weights
    before, or other pixels, the log-probs would be far apart: at this rate a step moves them a lot."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.toml").write_text(RUN)
    model = build_seeing(tmp_path / "model")
    ports = ("--queue.port", str(free_port()), "--vllm.port", str(free_port()))
    given = ["--run.dir", str(tmp_path / "runs"), "--model.path", str(model), *ports]
    config = load(tmp_path / "run.toml", given)
    with processes(tmp_path) as started:
        run = SmallRun(config, write_resolved(config), started)
        started.slipstream("up", "up", str(run.run_file))
        assert run.wait("up") == 0, started.logs()
    steps = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    for step in steps:
        assert step["sampler/tokens_staleness_0"] > 50
        assert step["sampler/distance/vllm-0"] < 1e-3, step
        assert 0.99 < step["sampler/ratio_p1"] <= step["sampler/ratio_p99"] < 1.01
    assert steps[0]["grad_norm"] > 0
