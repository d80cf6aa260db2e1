"""A quorum that the run file's servers cannot make: it is said, and what no run can make is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from slipstream.protocol.config.checks import find_quorum_warnings
from slipstream.protocol.config.sections.servers import MAX_SERVERS
from slipstream.rollout_queue.ledger import server_registry
from tests.kit import config


@pytest.mark.parametrize(
    ("quorum", "vllm", "said"),
    [
        (2, {"count": 2}, None),
        (3, {"count": 2}, r"vllm.count = 2: the first step waits until 1 more have joined .*lower .*quorum to 2"),
        (4, {"servers": ["http://a:1", "http://b:1"]}, r"the 2 of vllm.servers: .*until 2 more .*= 600 s"),
    ],
)
def test_a_quorum_above_the_servers_that_are_listed_is_a_warning(
    quorum: int, vllm: dict[str, Any], said: str | None
) -> None:
    made = config(weight_sync={"quorum": quorum}, vllm={"start_timeout_s": 600.0, **vllm})
    found = find_quorum_warnings(made.weight_sync, made.vllm)
    assert len(found) == (said is not None)
    assert said is None or re.search(said, str(found[0]))


def test_a_quorum_above_what_a_run_may_register_is_refused() -> None:
    assert MAX_SERVERS == server_registry._MAX_SERVERS
    with pytest.raises(ValidationError, match=r"less than or equal to 1024"):
        config(weight_sync={"quorum": MAX_SERVERS + 1})
