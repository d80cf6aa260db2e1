"""`slipstream rollouts`: what the policy said can be read, within 80 columns, from the file or from the queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI, Response
from rich.console import Console

from slipstream.deploy.commands.rollouts import FILE_NAME, Wanted, find, follow, print_followed, render
from slipstream.deploy.commands.status import of_run
from slipstream.protocol import access
from slipstream.protocol.client import QueueClient, QueueError
from slipstream.protocol.config import ConfigError
from slipstream.protocol.rollouts import RolloutView
from slipstream.protocol.status import Status
from tests.kit.ports import free_port
from tests.kit.queue import listening
from tests.kit.status import status

NOBODY = QueueClient(f"http://127.0.0.1:{free_port()}", patience_s=0.0)


def view(number: int, reward: float = 0.5, **fields: Any) -> RolloutView:
    return RolloutView(
        **{
            "ticket_id": f"{number}.0",
            "index": number,
            "epoch": 0,
            "number": 0,
            "worker_id": "host-1-ab",
            "reward": reward,
            "reward_components": {"correct": reward},
            "finish_reason": "stop",
            "turns": 1,
            "tool_calls": 0,
            "tool_failures": 0,
            "sampled_tokens": 5,
            "versions": (3, 4),
            **fields,
        }
    )


def shown(rollout: RolloutView, width: int = 80) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(render(rollout))
    return [line.rstrip() for line in capture.get().splitlines()]


def said(content: str, *calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    functions = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    return {"role": "assistant", "content": content, "tool_calls": functions}


def answer(name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "name": name, "content": content}


def test_what_a_reward_noted_stands_below_the_facts() -> None:
    lines = shown(view(1, extra={"gold": "6\x1b[2J", "long": "x" * 200}))
    assert "    gold: 6\ufffd" in lines
    assert max(map(len, lines)) <= 80


def test_a_call_and_its_answer_stand_on_one_line() -> None:
    messages = [
        said("", ("multiply", {"a": 3, "b": 4}), ("greet", {"name": "Ann"})),
        answer("multiply", "12"),
        answer("greet", "hello,\nAnn"),
        said("It is 12."),
    ]
    assert shown(view(1, messages=messages))[2:] == [
        "  assistant",
        "    multiply(a=3, b=4) -> 12",
        '    greet(name="Ann") -> hello, Ann',
        "  assistant",
        "    It is 12.",
    ]


def test_the_facts_of_a_rollout_stand_above_its_messages() -> None:
    rollout = view(
        *(17, 1.05),
        reward_components={"correct": 1.0, "brief": 0.5, "style": None},
        step=12,
        staleness=2,
        advantage=0.71,
        turns=3,
        tool_calls=2,
        tool_failures=1,
    )
    head, facts, kept = shown(rollout, width=120)
    assert head == "step 12  reward 1.05 (correct 1, brief 0.5, style -)  advantage +0.71"
    assert facts.startswith(
        "versions 3 to 4, staleness 2, 3 turns, 2 calls, 1 failed, 5 tokens, ended by stop, ticket 17"
    )
    assert kept == "  its messages were not kept: set worker.keep_messages = true"


def test_the_role_of_a_rollout_is_named() -> None:
    head, *_ = shown(view(1, role="critic\x1b[2J", step=12))
    assert head == "step 12  critic\ufffd  reward 0.5 (correct 0.5)"


def test_a_malformed_call_does_not_take_another_ones_answer() -> None:
    messages = [
        said("<tool_call>{", ("multiply", {"a": 3, "b": 4})),
        answer("tool_call", '{"error": "no JSON"}'),
        answer("multiply", "12"),
    ]
    assert shown(view(1, messages=messages))[3:] == [
        "    <tool_call>{",
        '    tool_call -> {"error": "no JSON"}',
        "    multiply(a=3, b=4) -> 12",
    ]


def test_parts_of_a_message_are_joined_and_images_named() -> None:
    image = {"hash": "ab", "width": 48, "height": 32, "tokens": 9, "preview": "data:image/jpeg;base64,AAAA"}
    seen = [{"type": "image", "image": image}, {"type": "text", "text": "Which colour?"}]
    boxed = {**answer("open_box", ""), "content": seen[:1]}
    messages = [{"role": "user", "content": seen}, said("", ("open_box", {"number": 6})), boxed]
    text = "\n".join(shown(view(1, messages=messages)))
    assert "[image 48 x 32] Which colour?" in text
    assert "open_box(number=6) -> [image 48 x 32]" in text


def test_long_and_hostile_text_stays_within_the_terminal() -> None:
    messages = [
        said("word " * 100 + "\x1b]0;owned\x07 [bold]x[/bold]", ("search", {"query": "q" * 500})),
        answer("search", "r" * 500),
        {"role": ["not", "a", "role"]},
        said("", ("last", {})),
    ]
    lines = shown(view(1, messages=messages))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]x[/bold]" in text
    assert "qqq..." in text
    assert "    -> rrrr" in text
    assert "rrr…" in text
    assert '    {"role": ["not", "a", "role"]}' in lines
    assert lines[-1] == "    last() (no answer)"


def written(folder: Path, *rollouts: RolloutView, rest: bytes = b"") -> Path:
    lines = b"".join(msgspec.json.encode(rollout) + b"\n" for rollout in rollouts)
    (folder / FILE_NAME).write_bytes(lines + rest)
    return folder


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Wanted(2), [4, 3]),
        (Wanted(2, order="worst"), [3, 1]),
        (Wanted(2, order="best"), [2, 4]),
        (Wanted(9, step=1), [2, 1]),
        (Wanted(1, step=1, order="best"), [2]),
        (Wanted(9, role="critic"), [4, 1]),
        (Wanted(1, role="critic", order="worst"), [1]),
    ],
)
def test_the_newest_the_worst_and_the_best_are_found(tmp_path: Path, wanted: Wanted, expected: list[int]) -> None:
    """The line that is being written does no harm."""
    critic, solver = {"role": "critic"}, {"role": "solver"}
    rollouts = [
        view(1, 0.2, step=1, **critic),
        view(2, 0.9, step=1),
        view(3, 0.1, step=2, **solver),
        view(4, 0.5, step=2, **critic),
    ]
    run_dir = written(tmp_path, *rollouts, rest=b'{"ticket_id": "5')
    assert [rollout.index for rollout in find(run_dir, wanted, NOBODY)] == expected


def test_a_step_that_is_not_there_and_a_broken_line_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--step 9: no rollout of that step is kept"):
        find(written(tmp_path, view(1, step=1)), Wanted(1, step=9), NOBODY)
    with pytest.raises(ConfigError, match="--role judge: no rollout of that role is kept"):
        find(written(tmp_path, view(1, role="critic")), Wanted(1, role="judge"), NOBODY)
    with pytest.raises(ConfigError, match=r"rollouts\.jsonl: line 2 is not a rollout"):
        find(written(tmp_path, view(1), rest=b"{}\n"), Wanted(1), NOBODY)


@pytest.fixture
async def queue() -> AsyncIterator[str]:
    """Answers `GET /v1/rollouts` as the queue does: newest first, or worst first."""
    app = FastAPI()
    app.state.broker = type("Broker", (), {"close_waits": staticmethod(lambda: None)})

    @app.get(access.ROLLOUTS)
    async def rollouts(limit: int, worst: bool, eval: bool) -> Response:
        found = [view(number, number / 10) for number in ((1, 2, 3) if worst else (3, 2, 1))]
        found = [msgspec.structs.replace(shown, evaluation=5, step=None) for shown in found] if eval else found
        return Response(msgspec.json.encode(found[:limit]), media_type="application/json")

    async with listening(app) as url:
        yield url


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [(Wanted(2), [3, 2]), (Wanted(2, order="worst"), [1, 2]), (Wanted(1, order="best"), [3])],
)
async def test_before_the_first_step_the_queue_is_asked(
    queue: str, tmp_path: Path, wanted: Wanted, expected: list[int]
) -> None:
    found = await asyncio.to_thread(find, tmp_path, wanted, QueueClient(queue))
    assert [rollout.index for rollout in found] == expected


async def test_i7_the_empty_file_of_a_run_without_a_step_hides_nothing_of_the_queue(queue: str, tmp_path: Path) -> None:
    """Where all rewards are equal from the start, this is all that there is to read."""
    found = await asyncio.to_thread(find, written(tmp_path), Wanted(2), QueueClient(queue))
    assert [rollout.index for rollout in found] == [3, 2]


async def test_rollouts_of_evaluations_are_the_queues_although_there_is_a_file(queue: str, tmp_path: Path) -> None:
    found = await asyncio.to_thread(find, written(tmp_path, view(9)), Wanted(1, evals=True), QueueClient(queue))
    assert [(rollout.index, rollout.evaluation) for rollout in found] == [(3, 5)]
    assert shown(found[0])[0].startswith("evaluation of step 5  reward 0.3")
    of_another = Wanted(1, step=6, evals=True)
    with pytest.raises(ConfigError, match="--step 6: no rollout of that step is kept"):
        await asyncio.to_thread(find, tmp_path, of_another, QueueClient(queue))


async def test_a_queue_that_is_named_is_asked_although_there_is_a_file(queue: str, tmp_path: Path) -> None:
    found = await asyncio.to_thread(find, written(tmp_path, view(9)), Wanted(1), QueueClient(queue), ask=True)
    assert [rollout.index for rollout in found] == [3]


async def test_rollouts_of_a_queue_that_serves_another_run_are_not_shown(
    queue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def other(client: QueueClient) -> Status:
        return status(run="other")

    monkeypatch.setattr(QueueClient, "status", other)
    checked = partial(of_run, run="mine", url=queue)
    with pytest.raises(ConfigError, match="serves run other, not mine"):
        await asyncio.to_thread(find, tmp_path, Wanted(1), QueueClient(queue), checked=checked)


def test_where_there_is_neither_file_nor_queue_both_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        QueueError, match=rf"no rollout in {tmp_path}/rollouts.jsonl yet, and the queue at {NOBODY.url} did"
    ):
        find(tmp_path, Wanted(1), NOBODY)


def test_roles_and_names_of_others_hold_nothing_that_a_terminal_obeys() -> None:
    escape = "\x1b[2J"
    of_others = view(1, worker_id=f"w{escape}", messages=[{"role": f"user{escape}", "content": "hello"}])
    of_others.reward_components = {f"accuracy{escape}": 1.0}
    assert "\x1b" not in "\n".join(shown(of_others))


def test_rollouts_of_evaluations_without_a_queue_say_where_their_figures_are(tmp_path: Path) -> None:
    """The queue alone keeps them, and it ends with the run."""
    client = QueueClient(f"http://127.0.0.1:{free_port()}", patience_s=0.1)
    with pytest.raises(QueueError, match=r"gone when the run has ended: their metrics are in .*evaluations\.jsonl"):
        find(written(tmp_path, view(9)), Wanted(1, evals=True), client)


def test_new_rollouts_are_followed_through_half_lines_a_new_file_and_a_resume_to_the_run_s_end(tmp_path: Path) -> None:
    path, found = tmp_path / FILE_NAME, list[int]()

    def line(number: int) -> bytes:
        return msgspec.json.encode(view(number, step=number)) + b"\n"

    path.write_bytes(line(0) + line(1))  # before anyone looked
    half = line(4)

    def append(data: bytes) -> None:
        with path.open("ab") as file:
            file.write(data)

    def replace() -> None:
        (tmp_path / "new").write_bytes(line(3) + line(4) + line(5))
        (tmp_path / "new").replace(path)

    acts = iter(
        [
            lambda: append(line(2) + line(3)),
            lambda: append(half[:20]),
            lambda: append(half[20:]),
            replace,
            lambda: path.write_bytes(line(3)),
            lambda: append(line(6)),
        ]
    )

    def has_ended() -> bool:
        act = next(acts, None)
        if act is not None:
            act()
        return act is None

    found = [rollout.index for rollout in follow(tmp_path, has_ended)]
    assert found == [2, 3, 4, 5, 6]


def test_bad_input_follow_goes_alone_and_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: there is no such run; start it"):
        print_followed(tmp_path / "nowhere", as_json=False, is_over=lambda: True)


def test_the_reward_at_a_turn_stands_at_its_message() -> None:
    messages = [said("", ("multiply", {"a": 3, "b": 4})) | {"turn_reward": 0.25}, answer("multiply", "12"), said("12")]
    messages[2]["turn_reward"] = "an agent's own field"
    assert shown(view(1, messages=messages))[2:] == [
        "  assistant  reward 0.25",
        "    multiply(a=3, b=4) -> 12",
        "  assistant",
        "    12",
    ]
