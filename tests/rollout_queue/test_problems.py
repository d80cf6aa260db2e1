"""Reasons on the wire: every refusal has a status, and clients can rely on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream import rollout_queue
from slipstream.protocol import codec, reasons
from slipstream.protocol.messages import ErrorBody
from slipstream.rollout_queue.api import requests
from slipstream.rollout_queue.ledger.records import Refusal

PACKAGE = Path(rollout_queue.__file__).parent

# What clients branch on: it may grow, but never change.
ON_THE_WIRE = {
    401: "unauthorized",
    403: "wrong_role fingerprint origin",
    409: "run_finished run_exists session_awaited session_superseded lease_lapsed not_leased ack_ambiguous "
    "step_missing step_unknown version_conflict version_missing server_unknown transition_forbidden unregistered "
    "gave_up evaluations_open",
    410: "ticket_unknown ticket_ended",
    413: "too_large",
    422: "decode out_of_range max_tickets worker_mismatch server_mismatch schema_version ticket_mismatch group_size "
    "no_sampled_tokens reward_not_finite metric_not_finite length_mismatch token_id_negative token_id_unknown "
    "bad_image too_deep segment_too_long too_many logprob_missing logprob_not_finite logprob_positive span_cover "
    "experts_cover mask_cover turn_cover span_version_unknown span_server_unknown version_from_future "
    "unverified_server",
    429: "full",
    503: "busy store_failed not_ready stands_by",
}


def refused_in(source: str) -> Iterator[str]:
    """The reason of every `Refusal(...)` in a source; each must be named as `reasons.X`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Refusal":
            reason = ast.unparse(node.args[0])
            assert reason.startswith("reasons."), (
                f"line {node.lineno}: {reason} is not a constant of slipstream.protocol.reasons"
            )
            yield getattr(reasons, reason.removeprefix("reasons."))


def test_the_table_covers_every_reason_that_is_refused_anywhere_and_no_other() -> None:
    refused = {reason for file in PACKAGE.rglob("*.py") for reason in refused_in(file.read_text())}
    assert refused == set(requests.HTTP_STATUS)


def test_a_reason_that_is_spelt_out_or_made_up_is_found() -> None:
    with pytest.raises(AssertionError, match="line 1"):
        list(refused_in("raise Refusal('full', message)"))
    with pytest.raises(AttributeError):
        list(refused_in("raise refusal.Refusal(reasons.NO_SUCH, message)"))


def test_the_statuses_on_the_wire_stay_what_they_are() -> None:
    assert {reason: status for status, named in ON_THE_WIRE.items() for reason in named.split()} == requests.HTTP_STATUS


def test_only_the_api_knows_http() -> None:
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name not in ("api", "rollout_queue"):
            imported = {
                node.module or "" for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)
            }
            assert not {name.split(".")[0] for name in imported} & {"fastapi", "starlette", "uvicorn"}, file


@pytest.mark.parametrize("reason", sorted(requests.HTTP_STATUS))
def test_every_refusal_becomes_a_problem(reason: str) -> None:
    answer = requests.error_response(Refusal(reason, "what and how to fix it", retry_after_s=2.5))
    assert answer.status_code == requests.HTTP_STATUS[reason]
    assert codec.decode_json(bytes(answer.body), ErrorBody) == ErrorBody(reason, "what and how to fix it")
    assert answer.headers["retry-after"] == "2.5"
    assert ("www-authenticate" in answer.headers) == (reason == reasons.UNAUTHORIZED)
