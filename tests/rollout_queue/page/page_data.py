"""Makes PageData for the tests of the page: of a run's own files where there is a run directory, else of made-up steps.

What no file of a run holds yet (columns over wall time, statuses, events) follows from its steps by simple arithmetic.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec

from slipstream.protocol.messages import Proof, ServerState
from slipstream.protocol.rollouts import RolloutView
from slipstream.protocol.status import (
    Cause,
    Evaluation,
    GroupCounts,
    LearnerStatus,
    Limit,
    Notice,
    Rates,
    ServerStatus,
    Staleness,
    Stall,
    Status,
    TicketCounts,
    Wait,
    WorkerStatus,
)

# Wall time of the run's start: 2026-11-23 05:50:34 UTC.
STARTED_AT = 1795413034.0

MAX_STALENESS, GROUP_SIZE, GROUPS_PER_STEP = 4, 8, 16

Json = dict[str, Any]


def made_up_steps(count: int) -> list[Json]:
    """Make lines of `metrics.jsonl`: rewards rise, and every chart has something to draw."""
    steps = []
    for step in range(1, count + 1):
        share = step / count
        wait_s, train_s = 1.5 - share, 0.3 + 0.1 * math.sin(step)
        steps.append(
            {
                "step": step,
                "version": step,
                "reward": round(0.3 + 0.6 * share, 3),
                "reward_std": 0.4,
                "rewards/accuracy/mean": round(0.3 + 0.6 * share, 3),
                "rewards/format/mean": round(0.5 + 0.4 * share, 3),
                "staleness_mean": 1 + math.sin(step / 3),
                "staleness_max": 2 + step % 3,
                "staleness_in_flight": 0.4,
                "staleness_in_queue": 0.6,
                "wait_s": wait_s,
                "train_s": train_s,
                "publish_blocked_ms": 12.0,
                "step_time": wait_s + train_s + 0.05,
                "tokens_sampled": 3000 + 10 * step,
                "tokens_trained": 2500 + 10 * step,
                "groups_dropped": {"zero_variance": step % 4},
                "entropy": 0.3 - 0.2 * share,
                "kl": 1e-4 * step,
                "ratio": 1.0,
                "clip_ratio/low_mean": 0.01 * share,
                "clip_ratio/high_mean": 0.02 * share,
                "sampler/ratio_p1": 0.9,
                "sampler/ratio_p50": 1.0,
                "sampler/ratio_p99": 1.1,
                "loss": -0.2,
                "grad_norm": 0.4,
                "rollout/turns_mean": 1.8,
                "rollout/turns_max": 3,
                "tools/call_frequency": 0.8,
                "tools/failure_frequency": 0.1 * (1 - share),
                "completions/mean_length": 22.5,
                "finish/stop": 1.0,
                "house_metric": share,
            }
        )
    return steps


def read_lines(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def made_up_rollouts(steps: int) -> list[Json]:
    """Make views of rollouts: each step has a group of four; one row comes again at a later version, with tokens."""
    views = []
    for step in range(1, steps + 1):
        for number in range(4):
            reward = float((step + number) % 3 > 0)
            view = RolloutView(
                ticket_id=f"{step}.0",
                index=step if step < steps else 1,
                epoch=0,
                number=number,
                worker_id=f"worker-{step % 2}",
                reward=reward,
                reward_components={"accuracy": reward, "format": None},
                finish_reason="stop" if number else "length",
                turns=2,
                tool_calls=1,
                tool_failures=0,
                sampled_tokens=29,
                versions=(step - 1, step),
                messages=[
                    {"role": "user", "content": f"Multiply {step} by 62."},
                    {
                        "role": "assistant",
                        "reasoning_content": "I need the tool.",
                        "content": "",
                        "tool_calls": [
                            {"type": "function", "function": {"name": "multiply", "arguments": {"a": step, "b": 62}}}
                        ],
                    },
                    {"role": "tool", "name": "multiply", "content": str(62 * step)},
                    {"role": "assistant", "content": str(62 * step if reward else number)},
                ],
                step=step,
                staleness=step % 3,
                advantage=round(reward - 0.5, 2),
                servers=[f"vllm-{step % 2}"] if number else ["vllm-0", "vllm-1"],
            )
            views.append({**msgspec.to_builtins(view), "tokens": _tokens(step)})
    return views


def _tokens(step: int) -> list[Any]:
    texts = ["Multi", "ply", " it", ".", "\n", "<call>", " 62", "372"]
    return [
        [text, step - 1 + (i > 4), -0.25 * i, None if i > 6 else -0.2 * i, 0 if i in (5, 6) else 1]
        for i, text in enumerate(texts)
    ]


def make_status(lines: list[Json], done: int, now_s: float, **changes: Any) -> Json:
    """Make the status after `done` of the run's steps, `now_s` seconds after its start."""
    line = lines[done - 1] if done else {}
    workers = [
        WorkerStatus(
            worker_id=f"worker-{i}",
            host="node-1",
            pid=4000 + i,
            capacity=16,
            episodes_in_flight=12 - 4 * i,
            episodes_done=128 * done,
            episodes_failed=i,
            tokens_sampled=3000 * done,
            tool_calls=90 * done,
            tool_failures=2 * done,
            requests_retried=0,
            wait_share=0.02,
            cpu_ms_per_episode=1.8,
            seen_s_ago=0.4,
            episodes_generating=8 - 4 * i,
            episodes_in_tools=3,
            episodes_in_judgement=1,
            does="in_tools" if i else "generating",
        )
        for i in range(2)
    ]
    servers = [
        ServerStatus(
            "vllm-0",
            "http://127.0.0.1:8100",
            ServerState.SERVING,
            done,
            transport="gloo",
            proof=Proof(done, 3.2e-4, 0.42, 0.012),
            lag=0,
            since_s=now_s,
        ),
        ServerStatus(
            "vllm-1",
            "http://127.0.0.1:8101",
            ServerState.SYNCING,
            max(0, done - 1),
            transport="gloo",
            lag=1,
            since_s=0.6,
            waits_for=f"version {done}, which is on its way",
        ),
    ]
    status = Status(
        run="multiply",
        uptime_s=now_s,
        version=done,
        served_version=max(0, done - 1),
        step=done,
        total_steps=len(lines),
        checkpoint_step=done // 10 * 10,
        finished=False,
        max_staleness=MAX_STALENESS,
        depth=2.5,
        depth_target=3.0,
        groups=GroupCounts(20, 12, 8, 40, 3_400_000, 160, 2**30, 48),
        staleness=Staleness(line.get("staleness_mean", 0.0), line.get("staleness_max", 0), 4, 0.4, 0.6),
        rates=Rates(8.2, 1930.0, 826.0, 0.51),
        learner=LearnerStatus(1, done, done, line.get("reward"), line.get("step_time"), 0.67, 0.2),
        workers=workers,
        servers=servers,
        waits=[
            Wait("learner", "12 more groups", 3.2),
            Wait("server vllm-1", f"version {done}, which is on its way: syncing", 0.6),
            Wait("worker-1", "tickets: 40 of 48 groups are outstanding", 1.4),
        ],
        stall=Stall(False, 3.2, None, 120.0),
        ledger=TicketCounts(700, 289, 351, 20, 40),
        tokens_sampled=151421,
        learner_wait_share=0.67,
        worker_wait_share=0.02,
        drops={"zero_variance": 351},
        diagnosis=[Cause("tool multiply", "tool multiply fails in 3 of its newest 9 calls", "warn", 41.0)],
        limit=Limit("servers", "The vLLM servers limit the run: the learner waits 67% of its time for groups."),
        notices=[Notice(1, "tool", "the tool multiply failed in 2 of 90 calls: bad_arguments", "worker-0", 40.0, 2)],
    )
    return {**msgspec.to_builtins(status), **changes}


def make_page(run_dir: Path | None = None, live: bool = True, steps: int = 40) -> Json:
    """Make PageData: of the run in `run_dir`, or made up.

    Args:
        steps: How many steps are made up.
    """
    lines = made_up_steps(steps) if run_dir is None else read_lines(run_dir / "metrics.jsonl")
    rollouts = made_up_rollouts(min(steps, 12)) if run_dir is None else read_lines(run_dir / "rollouts.jsonl")
    at, now = [], STARTED_AT + 5.0
    for line in lines:
        now += line["step_time"]
        at.append(round(now, 3))
    names = sorted({name for line in lines for name, value in line.items() if isinstance(value, int | float)})
    statuses = [[at[i], make_status(lines, i + 1, at[i] - STARTED_AT)] for i in range(len(lines))]
    statuses.insert(0, [STARTED_AT, make_status(lines, 0, 0.0)])
    cause = {"about": "x", "text": "The tool search fails in 9 of 10 calls.", "since_s": 41.0, "severity": "bad"}
    causes = {"diagnosis": [cause]} if live else {}
    ended = make_status(lines, len(lines), at[-1] - STARTED_AT, finished=not live, **causes)
    return {
        "run": run_dir.name if run_dir is not None else "multiply",
        "live": live,
        "now": at[-1],
        "max_staleness": MAX_STALENESS,
        "group_size": GROUP_SIZE,
        "groups_per_step": GROUPS_PER_STEP,
        "status": ended,
        "statuses": [] if live else statuses,
        "time": _columns(lines, at),
        "steps": {"at": at, **{name: [line.get(name) for line in lines] for name in names}},
        "events": _events(at),
        "rollouts": rollouts,
        "evaluations": [
            msgspec.to_builtins(
                Evaluation(
                    10,
                    10,
                    1,
                    rows=64,
                    done=64,
                    ended="complete",
                    seconds=4.2,
                    rollouts=64,
                    reward=0.61,
                    versions=(10, 11),
                )
            )
        ],
        "compare": None,
    }


def _columns(lines: list[Json], at: list[float]) -> Json:
    """Make the columns over wall time: two points for each step."""
    rows: list[Json] = []
    drops = 0
    for i, line in enumerate(lines):
        drops += sum(line["groups_dropped"].values())
        for half in (0.0, 0.5):
            rows.append(
                {
                    "at": round(at[i] - (0.5 - half) * line["step_time"], 3),
                    "version": line["version"],
                    "step": line["step"],
                    "depth": 1.5 + math.sin(i / 4 + half),
                    "depth_target": 2.0,
                    "tickets": 10 + i % 8,
                    "ready": 12,
                    "leased": 8,
                    "limit": 48,
                    "capacity_groups": 160,
                    "bytes": 3_400_000 + 10_000 * i,
                    "staleness_mean": line["staleness_mean"],
                    "staleness_max": line["staleness_max"],
                    "rate_groups": 8.2,
                    "rate_tokens_sampled": line["tokens_sampled"] / line["step_time"],
                    "rate_tokens_trained": line["tokens_trained"] / line["step_time"],
                    "rate_steps": 1 / line["step_time"],
                    "workers": 2,
                    "workers_generating": 1,
                    "workers_in_tools": 1,
                    "episodes_open": 20,
                    "servers": 2,
                    "servers_serving": 2 - (i % 10 == 0),
                    "learner_wait_share": line["wait_s"] / line["step_time"],
                    "worker_wait_share": 0.02,
                    "drops_total": drops,
                    "drop/zero_variance": drops,
                    "rejections_total": 0 if half == 0 else None,
                }
            )
    return {name: [row[name] for row in rows] for name in rows[0]}


def _events(at: list[float]) -> list[Json]:
    middle = at[len(at) // 2]
    return [
        {"at": STARTED_AT, "kind": "run", "who": None, "text": "the queue has started"},
        {"at": STARTED_AT + 2, "kind": "server", "who": "vllm-0", "text": "joining"},
        {"at": STARTED_AT + 3, "kind": "worker", "who": "worker-0", "text": "joined"},
        {"at": STARTED_AT + 4, "kind": "learner", "who": None, "text": "session 1 began at version 0"},
        {"at": middle, "kind": "server", "who": "vllm-1", "text": "quarantined: its weights failed their proof"},
        {"at": middle + 4, "kind": "server", "who": "vllm-1", "text": "serving version 20"},
        {"at": at[-1] - 1, "kind": "notice", "who": "worker-0", "text": "the tool multiply failed in 2 of 90 calls"},
        {"at": at[-1], "kind": "evaluation", "who": None, "text": "evaluation of step 10: reward 0.610 (64 rows)"},
    ]
