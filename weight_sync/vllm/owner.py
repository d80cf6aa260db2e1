"""Which run a server serves: that of the learner which controls it, and of one learner at a time (I5).

A run owns the server from its first control call on, as long as its learner is heard: it looks every two seconds. One
that says goodbye, or is silent for `SILENT_S`, leaves it to the next that calls. Calls without the header
`slipstream-run` are a person's, and own nothing.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from starlette.types import Scope

from protocol.versions import RUN_HEADER, RUN_ID
from weight_sync.server.answers import serves_another_run
from weight_sync.transports.http import ranges
from weight_sync.vllm import guard
from weight_sync.vllm.route import RouteError

SILENT_S = 30.0
STATE = "/slipstream/state"


@dataclass
class Owner:
    """`run`: the id of the last owner, "" before the first; `heard_at`: when it called last. Times: seconds, on any one
    clock."""

    run: str = ""
    heard_at: float = 0.0

    def live(self, now: float) -> str:
        """The owner's id; "" where there is none any more."""
        return self.run if now - self.heard_at < SILENT_S else ""

    def silent_s(self, now: float) -> float:
        """How long ago the live owner called; 0 without one."""
        return now - self.heard_at if self.live(now) else 0.0

    def admits(self, run: str, now: float) -> bool:
        """A control call of `run`: whether that run is the owner, which it becomes where there is none."""
        if self.live(now) not in ("", run):
            return False
        self.run, self.heard_at = run, now
        return True

    def leaves(self, run: str) -> None:
        """The learner of `run` says goodbye."""
        if self.run == run:
            self.run = ""


def check(owner: Owner, scope: Scope, now: float | None = None) -> None:
    """Of a request, before anything else of it is done. Raises `RouteError` 409 for a control call of another run than
    the owner; a look at the state passes, and says who that is."""
    path = guard.route_of(scope)
    if path.startswith(ranges.PREFIX) or path == guard.HEALTH or guard.roles_for(path) != ("learner",):
        return  # also those ask who may not control the server, and so must not come to own it
    run = dict(scope["headers"]).get(RUN_HEADER.encode(), b"").decode("latin-1")
    if not run:
        return
    if not re.fullmatch(RUN_ID, run):
        raise RouteError(400, f"{RUN_HEADER}: {run[:80]!r} is not the id of a run")
    now = time.monotonic() if now is None else now
    if not owner.admits(run, now) and path != STATE:
        raise RouteError(409, serves_another_run("this server", owner.run, owner.silent_s(now)))
