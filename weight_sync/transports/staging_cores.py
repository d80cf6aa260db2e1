"""CPU cores on which a server receives and builds new weights: all of the run's, not the server's share alone.

Generation keeps to the cores that the launcher gave the servers. While the learner waits for groups its cores are
idle, and a publication takes them instead of generation's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# Environment variable of a server: numbers of cores, such as "0,1".
STAGING_CORES = "SLIPSTREAM_STAGING_CORES"


def staging_environment(cores: Iterable[int]) -> dict[str, str]:
    """Return the variable with which a server stages on `cores`."""
    return {STAGING_CORES: ",".join(str(core) for core in sorted(cores))}


@contextmanager
def on_staging_cores() -> Iterator[None]:
    """Let this thread, and threads that it starts meanwhile, run on the staging cores; no change without any."""
    named = os.environ.get(STAGING_CORES)
    if not named:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {int(core) for core in named.split(",")})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
