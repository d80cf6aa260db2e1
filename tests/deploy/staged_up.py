"""`slipstream up` with the command in $STAND_IN in the place of `slipstream` for every process that it starts, and with
short waits: the first before a restart takes $FIRST_PAUSE_S."""

from __future__ import annotations

import os

from slipstream.deploy import cli
from slipstream.deploy.run import process_keeper, processes
from slipstream.deploy.run.process_keeper import RestartPolicy


def broken(self: RestartPolicy, name: str) -> None:
    raise RuntimeError("a fault of the supervisor")


if __name__ == "__main__":
    processes.SLIPSTREAM = (os.environ["STAND_IN"],)
    process_keeper.FIRST_PAUSE_S = float(os.environ.get("FIRST_PAUSE_S", "0.1"))
    process_keeper.HEALTH_EVERY_S = process_keeper.LEARNER_EVERY_S = processes.POLL_S = 0.05
    process_keeper.LOGS_EVERY_S, processes.MAX_LOG_BYTES, processes.LOG_KEPT_BYTES = 0.05, 100_000, 10_000
    if "BROKEN" in os.environ:
        setattr(RestartPolicy, "up", broken)  # noqa: B010
    cli.main()
