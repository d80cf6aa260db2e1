"""Why this run may not use a server that answers: another name or another run has it, or its flags do not fit."""

from __future__ import annotations

from weight_sync.fleet.eligibility import Wanted
from weight_sync.fleet.suitability import Suitability
from weight_sync.fleet.whose import of_another_run
from weight_sync.server.answers import EngineState
from weight_sync.server.control import ServerControl


class Barred:
    """Of one server. `reason`: as of the last look, None where the run may use it; `is_news`: whether it is another one
    than at the look before."""

    def __init__(self, control: ServerControl, wanted: Wanted) -> None:
        self.reason: str | None = None
        self.is_news = False
        self._control = control
        self._suitability = Suitability(control, wanted)
        self._by: str | None = None

    async def look(self, state: EngineState, claimed: str | None) -> str | None:
        """The reason. claimed: why the server process cannot have its name, None if it can."""
        foreign = of_another_run(self._control.url, state, self._control.run_id)
        self.reason = claimed or foreign or await self._suitability.fault(state.boot)
        before = self._by
        # The text on another run says how long ago its learner looked, which is no news.
        self._by = state.owner if self.reason is not None and self.reason is foreign else self.reason
        self.is_news = self._by != before
        return self.reason
