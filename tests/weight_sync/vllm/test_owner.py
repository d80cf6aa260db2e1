"""I5: one server serves one run at a time. The owner's rules, our middleware's, and what a learner makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.protocol.engine import EngineState
from slipstream.weight_sync.fleet.eligibility import find_lost_weights, of_another_run
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.engine import ControlError
from slipstream.weight_sync.vllm import engine_state
from slipstream.weight_sync.vllm.engine_state import SILENT_S, Owner
from tests.kit.fake_vllm import FakeVllm, serving
from tests.weight_sync.vllm.test_vllm_middleware import serving as middleware

A, B = {"slipstream-run": "a-1"}, {"slipstream-run": "b-2"}


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "goodbye a", "goodbye b"]), st.floats(0, 40)), max_size=30))
def test_i5_a_run_gets_a_server_only_when_the_other_left_or_was_silent(calls: list[tuple[str, float]]) -> None:
    of, now = Owner(), 1000.0
    holder, heard = "", 0.0  # as the rule says
    for call, later in calls:
        now += later
        if now - heard >= SILENT_S:
            holder = ""
        if call.startswith("goodbye"):
            of.leaves(call[-1])
            holder = "" if holder == call[-1] else holder
        else:
            may = holder in ("", call)
            assert of.admits(call, now) == may
            holder, heard = (call, now) if may else (holder, heard)
        assert of.live(now) == holder
        assert 0.0 <= of.silent_s(now) < SILENT_S


async def test_i5_another_runs_control_calls_are_refused_and_say_whose_the_server_is() -> None:
    async with middleware() as server:
        assert (await server.get("/slipstream/state", headers=A)).json()["owner"] == "a-1"
        seen = await server.get("/slipstream/state", headers=B)
        assert (seen.status_code, seen.json()["owner"]) == (200, "a-1")
        for path in ("/slipstream/swap", "/pause", "/start_weight_update", "/slipstream/lease"):
            refused = await server.post(path, json={}, headers=B)
            assert refused.status_code == 409
            assert "serves run a-1, whose learner looked 0 s ago" in refused.json()["error"]["message"]
        assert not server.engine.paused
        assert (await server.post("/pause", headers=A)).status_code == 200


async def test_i5_a_silent_owner_is_followed_after_its_time_and_one_that_says_goodbye_at_once() -> None:
    async with middleware() as server:
        await server.get("/slipstream/state", headers=A)
        server.condition.owner.heard_at -= SILENT_S
        assert (await server.get("/slipstream/state")).json()["owner"] == "", "a look of nobody's owns nothing"
        assert (await server.get("/slipstream/state", headers=B)).json()["owner"] == "b-2"
        assert (await server.post("/slipstream/goodbye", json={"run": "a-1"}, headers=A)).status_code == 409
        await server.post("/slipstream/goodbye", json={"run": "b-2"}, headers=B)
        assert (await server.get("/slipstream/state", headers=A)).json()["owner"] == "a-1"


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/models", "/health", "/metrics"])
def test_i8_whoever_may_not_control_a_server_cannot_come_to_own_it(path: str) -> None:
    of = Owner()
    engine_state.check_owner(of, {"path": path, "headers": [(b"slipstream-run", b"b-2")]}, 5.0)
    assert of.live(5.0) == ""


async def test_i5_a_learner_leaves_its_server_to_the_next_as_it_ends() -> None:
    async with (
        serving(FakeVllm()) as url,
        ServerControl(url, 5, run_id=lambda: "a-1") as first,
        ServerControl(url, 5, run_id=lambda: "b-2") as b,
    ):
        assert (await first.state()).owner == "a-1"
        with pytest.raises(ControlError, match=r"409.*serves run a-1"):
            await b.pause(False)
        await first.goodbye()
        assert (await b.state()).owner == "b-2"


def state(label: str, boot: str = "x", owner: str = "") -> EngineState:
    return EngineState(boot, label, False, True, True, "none", 1, "gloo", None, owner, 3.2)


def test_i5_the_server_of_another_run_is_refused_with_one_text_that_names_it() -> None:
    assert of_another_run("http://s:1", state("7", owner="b-2"), "a-1") == (
        "http://s:1 serves run b-2, whose learner looked 3 s ago: one server serves one run; stop that run, or give "
        "this one its own server"
    )
    for owned, run_id in (("", "a-1"), ("a-1", "a-1"), ("b-2", "")):
        assert of_another_run("http://s:1", state("7", owner=owned), run_id) is None


@pytest.mark.parametrize(
    ("now", "became"),
    [
        (state("a-1:7"), None),
        (state("default", boot="y"), "it restarted"),
        (state("b-2:7"), "taken over by run b-2: it holds version 7 of that one"),
        (state("default"), "it holds weights 'default', which this learner did not publish"),
        (state("a-1:6"), "it holds weights 'a-1:6', which this learner did not publish"),
    ],
)
def test_a_restart_is_told_from_another_runs_weights(now: EngineState, became: str | None) -> None:
    assert find_lost_weights(now, "x", {"a-1:7"}, "a-1") == became


def test_before_anything_was_proven_any_weights_are_taken_over() -> None:
    assert find_lost_weights(state("b-2:7"), "x", None, "a-1") is None
