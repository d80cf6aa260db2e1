"""Traces of groups at the learner: from the answer that brought a group to the step that trains it, or to its drop."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.learner.feed.judged_groups import rewards_of
from slipstream.protocol import tracing
from slipstream.protocol.messages import Group
from slipstream.protocol.tracing import TicketTrace


@dataclass
class GroupSpans:
    """Follows the groups that the learner holds. Does nothing while nobody traces.

    Attributes:
        run: The run's id.
    """

    run: str
    _held: dict[str, tuple[float, dict[str, Any]]] = field(default_factory=dict)

    def came(self, groups: Sequence[Group]) -> None:
        """Begin the spans of groups that were leased."""
        if tracing.is_on():
            now = time.time()
            self._held |= {of.ticket_id: (now, _facts(of)) for of in groups if of.ticket_id not in self._held}

    def dropped(self, reasons: Mapping[str, str], step: int, version: int) -> None:
        """End the spans of groups that are dropped, each for its reason. `version`: the one that would have trained."""
        for ticket_id, reason in reasons.items():
            self._end(ticket_id, step, version, failed=reason)

    def trained(self, ticket_ids: Sequence[str], step: int, version: int) -> None:
        """End the spans of groups that the current step has trained. `version`: the one that trained."""
        for ticket_id in ticket_ids:
            self._end(ticket_id, step, version)

    def _end(self, ticket_id: str, step: int, version: int, failed: str | None = None) -> None:
        if (held := self._held.pop(ticket_id, None)) is None:
            return
        began, facts = held
        staleness = version - facts["oldest_version"]
        tracing.record(
            "feed",
            TicketTrace(self.run, ticket_id),
            began,
            time.time(),
            [] if failed else [tracing.current()],
            failed,
            step=step,
            staleness=staleness,
            **facts,
        )


def _facts(group: Group) -> dict[str, Any]:
    versions = group.versions()
    return {
        "ticket": group.ticket_id,
        "tokens": group.sampled_tokens,
        "reward": float(rewards_of(group).mean()),
        "oldest_version": versions[0] if versions else 0,
        "servers": group.server_names,
    }
