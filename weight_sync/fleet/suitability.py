"""Whether a server was started with flags that the run can use: asked of every server, whoever started it."""

from __future__ import annotations

import asyncio

from weight_sync.fleet.eligibility import Wanted, describe_mismatches, judge
from weight_sync.server.control import LOOK_TIMEOUT_S, ControlError, ServerControl


class Suitability:
    """Of one server; each of its processes is asked once."""

    def __init__(self, control: ServerControl, wanted: Wanted) -> None:
        self._control = control
        self._wanted = wanted
        self._boot: str | None = None
        self._fault: str | None = None

    async def fault(self, boot: str) -> str | None:
        """Why the run cannot use the process of this `boot`, and the remedy; None: it can. One that does not say its
        flags is not used, and asked again."""
        if boot == self._boot:
            return self._fault
        url = self._control.url
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                faults = judge(await self._control.facts(), self._wanted)
        except (ControlError, TimeoutError) as error:
            why = str(error) or f"{url}/slipstream/facts: no answer within {LOOK_TIMEOUT_S:g} s"
            return f"it does not say with which flags it was started ({why}); start it with: slipstream vllm run.toml"
        self._boot, self._fault = boot, f"{url}: {describe_mismatches(faults)}" if faults else None
        return self._fault
