"""What launchers and accelerate's settings say: who stands where, and that nothing of it changes the arithmetic."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream.learner.feed.packing import pack
from slipstream.learner.model.policy import Policy
from slipstream.learner.ranks.environment import RankInfo, check_environment, check_sharded, clear, is_sharded, place
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import ConfigError, LearnerSection
from tests.kit import LEARNER, config
from tests.kit.learner import sample, step_rollouts

ACCELERATE = [
    "/venv/bin/python",
    "/venv/bin/accelerate",
    "launch",
    "--cpu",
    "--num_processes",
    "2",
    "-m",
    "slipstream.learner",
]
ON_CPU = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "ranks", "expected"),
    [
        ({}, 1, RankInfo()),
        ({}, 4, RankInfo(count=4)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, 1, RankInfo()),
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}, 1, RankInfo(3, 4, 1, True)),
        ({"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}, 4, RankInfo(0, 4, 0, True)),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, 1, RankInfo(1, 2, 1, True)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "0"}, 1, RankInfo(1, 2, 0, True)),
    ],
)
def test_a_process_knows_its_place(environment: dict[str, str], ranks: int, expected: RankInfo) -> None:
    assert place(environment, ranks) == expected


@pytest.mark.parametrize("flag", [["--num_processes", "2"], ["--num-processes", "2"], ["--num_processes=2"]])
def test_accelerate_starts_one_process_on_a_cpu_and_the_learner_the_others(flag: list[str]) -> None:
    for command in (["python", "/venv/bin/accelerate", "launch"], ["python", "-m", "accelerate.commands.launch"]):
        assert place(ON_CPU, 1, [*command, *flag, "-m", "slipstream.learner"]) == RankInfo(count=2)
    assert place(ON_CPU, 2, ["accelerate", "launch", *flag]) == RankInfo(count=2)


@pytest.mark.parametrize(
    ("environment", "ranks", "parents", "told"),
    [
        ({"WORLD_SIZE": "4", "RANK": "0"}, 2, [], "learner.ranks = 2, and the launcher started WORLD_SIZE = 4"),
        ({"WORLD_SIZE": "2"}, 1, [], "WORLD_SIZE = 2, and no RANK says"),
        (ON_CPU, 3, ACCELERATE, "learner.ranks = 3, and accelerate launch was given --num_processes 2"),
        (ON_CPU, 1, ["accelerate", "launch", "--config_file", "a.yaml"], "set learner.ranks"),
    ],
)
def test_what_does_not_agree_is_refused(environment: dict[str, str], ranks: int, parents: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        place(environment, ranks, parents)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "parallelism"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP_VERSION = 1"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "FSDP_VERSION = 1"),
        ({"ACCELERATE_TORCH_DEVICE": "meta"}, "ACCELERATE_TORCH_DEVICE = meta: the learner cannot train there; unset"),
        ({"ACCELERATE_TORCH_DEVICE": "nonsense:0"}, "ACCELERATE_TORCH_DEVICE = nonsense:0.*name a device"),
    ],
)
def test_another_kind_of_training_is_refused(environment: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_environment(environment)


def test_what_has_no_effect_is_said() -> None:
    assert check_environment({}) == []
    # What accelerate launch sets where nobody asked for anything.
    assert check_environment({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}) == []
    said = check_environment({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_MIXED_PRECISION": "bf16"})
    assert [line.split(" has no effect")[0] for line in said] == [
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS = 4",
        "ACCELERATE_MIXED_PRECISION = bf16",
    ]
    eight = {"ACCELERATE_FP8_BACKEND": "TE", "ACCELERATE_FP8_MARGIN": "0", "ACCELERATE_OF_TOMORROW": "on"}
    assert check_environment(eight) == [
        "ACCELERATE_FP8_BACKEND = TE, ACCELERATE_OF_TOMORROW = on: without effect, since the run file says what the "
        "learner computes"
    ]


def test_only_what_is_heeded_stays_in_the_environment() -> None:
    heeded = {
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_TORCH_DEVICE": "cpu",
        "RANK": "0",
    }
    assert check_environment({"ACCELERATE_TORCH_DEVICE": "cpu"}) == []
    environment = {**heeded, "ACCELERATE_FP8_BACKEND": "TE", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}
    clear(environment)
    assert environment == heeded


@pytest.mark.parametrize(
    ("sections", "says"),
    [({"learner": {"optim": "adafactor"}}, "learner.optim = adafactor"), ({"lora": {"r": 4}}, "lora.r = 4")],
    ids=str,
)
def test_fsdp_that_accelerate_asks_for_has_the_limits_of_shard_weights(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"ACCELERATE_USE_FSDP = true, which stands for.*{says}"):
        check_sharded(config(LEARNER, **sections))
    check_sharded(config(LEARNER))


def test_accelerate_s_second_fsdp_shards_the_weights() -> None:
    asked = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    assert check_environment(asked) == []
    assert is_sharded(asked)
    assert not is_sharded({"ACCELERATE_USE_FSDP": "false"})


def test_accelerate_s_variables_do_not_change_the_gradient(
    make_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [sample(30, 5, i, rollout=i) for i in range(4)]

    def gradient() -> torch.Tensor:
        trainer = PolicyTrainer(make_policy(), LearnerSection(max_grad_norm=1e9), longest=64)
        seen: list[torch.Tensor] = []
        weights = list(trainer.policy.parameters())
        trainer.optimiser.optimizer.register_step_pre_hook(
            lambda *_: seen.extend(weight.grad.flatten().clone() for weight in weights if weight.grad is not None)
        )
        trainer.step(pack(samples, 64), step_rollouts(samples))
        return torch.cat(seen)

    right = gradient()
    for name, value in {
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_FP8_BACKEND": "TE",
    }.items():
        monkeypatch.setitem(os.environ, name, value)
    assert torch.equal(gradient(), right)
