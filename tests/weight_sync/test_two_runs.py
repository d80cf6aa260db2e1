"""I5: a learner whose server another run controls, against two fake servers and a real queue."""

from __future__ import annotations

import time

import pytest

from slipstream.protocol.messages import ServerState
from slipstream.weight_sync.publisher import Publisher
from tests.kit.sync import probe
from tests.weight_sync.test_publisher import (
    World,
    until,
    weights,
)
from tests.weight_sync.test_publisher import (
    world as world,  # a fixture
)

OTHER = "other-1"


def publisher(world: World) -> Publisher:
    publisher = world.publisher()
    publisher.run_id = "ours-1"
    return publisher


def other_looks(world: World, silent_s: float = 0.0) -> None:
    """The other run's learner was heard so long ago by the second server."""
    world.fakes[1].owner.run, world.fakes[1].owner.heard_at = OTHER, time.monotonic() - silent_s


def test_i5_labels_carry_the_run_and_a_server_of_another_run_is_down_until_that_has_gone(world: World) -> None:
    other_looks(world)
    with publisher(world) as publishing:
        publishing.publish(1, weights(), probe())
        publishing.wait()
        assert world.fakes[0].engine.weight_version == "ours-1:1"
        until(lambda: world.servers()["vllm-1"].state is ServerState.DOWN)
        reason = world.servers()["vllm-1"].reason or ""
        assert reason.startswith(f"{world.urls[1]} serves run {OTHER}, whose learner looked ")
        before = len(world.changes)
        time.sleep(0.5)  # ten looks
        assert world.changes[before:] == [], "it is tried again quietly"
        assert world.fakes[1].engine.weight_version == "default"
        other_looks(world, silent_s=31.0)
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
    assert [fake.owner.run for fake in world.fakes] == ["", ""], "the learner said goodbye"


def test_i5_a_server_that_is_taken_over_goes_down_once_and_is_never_called_restarted(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with publisher(world) as publishing:
        publishing.publish(1, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
        other_looks(world)
        world.fakes[1].engine.weight_version = f"{OTHER}:9"
        until(lambda: world.servers()["vllm-1"].state is ServerState.DOWN)
        before = len(world.changes)
        publishing.publish(2, weights(), probe())
        publishing.wait()
        time.sleep(0.3)
        assert [change for change in world.changes[before:] if change[0] == "vllm-1"] == []
        assert world.fakes[1].engine.weight_version == f"{OTHER}:9"
    assert "restarted" not in caplog.text


def test_i5_weights_of_a_run_that_has_gone_are_named_and_replaced(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with publisher(world) as publishing:
        publishing.publish(1, weights(), probe())
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
        world.fakes[1].engine.weight_version = f"{OTHER}:9"
        until(lambda: world.fakes[1].engine.weight_version == "ours-1:1")
        until(lambda: world.states() == [(ServerState.SERVING, 1)] * 2)
    assert f"taken over by run {OTHER}: it holds version 9 of that one" in caplog.text
