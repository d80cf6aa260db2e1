"""The staleness rule (I2), for queue and learner alike.

The staleness of a token is the learner's version at the step that trains on it, minus the version that sampled it.
"""

from __future__ import annotations

from typing import overload

import numpy as np
import numpy.typing as npt


@overload
def within_staleness(version: int, oldest: int, max_staleness: int) -> bool: ...


@overload
def within_staleness(version: int, oldest: npt.NDArray[np.int64], max_staleness: int) -> npt.NDArray[np.bool_]: ...


def within_staleness(
    version: int, oldest: int | npt.NDArray[np.int64], max_staleness: int
) -> bool | npt.NDArray[np.bool_]:
    """Whether tokens that version `oldest` sampled may train in the step of `version`; for arrays, of each."""
    return version - oldest <= max_staleness
