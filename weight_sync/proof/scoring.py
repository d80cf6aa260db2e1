"""Where a server's log-probs come from: its workers, beside generation; else a request of vLLM's own kind.

In the workers no slot and no cache is taken and nobody waits: the cost hangs on the probe, not on the load. What vLLM's
workers cannot compute that way (latent attention, state-space layers, parallel pipelines) is asked for as a request,
which waits behind episodes.
"""

from __future__ import annotations

import logging
from typing import Protocol

from weight_sync.server.control import ControlError
from weight_sync.server.proof_rule import Floats

logger = logging.getLogger(__name__)

# 404, 405: a server without our routes; 501: our route cannot compute it for this model.
CANNOT = frozenset({404, 405, 501})


class Scoring(Protocol):
    """What the proof needs of `ServerControl`."""

    url: str

    async def score(self, sequences: list[list[int]]) -> list[Floats]: ...

    async def score_by_request(self, token_ids: list[int]) -> Floats: ...


class Scorer:
    """The log-probs of one server. What it cannot do is found out, and said, once."""

    def __init__(self) -> None:
        self._by_request = False

    async def __call__(self, control: Scoring, token_ids: list[int]) -> Floats:
        """float32 [T-1] of `token_ids` [T], by the weights that now serve. Raises `ControlError`."""
        if not self._by_request:
            try:
                return (await control.score([token_ids]))[0]
            except ControlError as error:
                if error.status not in CANNOT:
                    raise
                self._by_request = True
                logger.info(
                    "%s cannot score beside generation, so its proofs wait behind episodes: %s", control.url, error
                )
        return await control.score_by_request(token_ids)
