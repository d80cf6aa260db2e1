"""`slipstream up` with the command in $STAND_IN in the place of `slipstream` for every process that it starts."""

from __future__ import annotations

import os

from deploy import cli
from deploy.run import processes
from deploy.run.process_keeper import RestartPolicy


def broken(self: RestartPolicy, name: str) -> None:
    raise RuntimeError("a fault of the supervisor")


if __name__ == "__main__":
    processes.SLIPSTREAM = (os.environ["STAND_IN"],)
    if "BROKEN" in os.environ:
        setattr(RestartPolicy, "up", broken)  # noqa: B010
    cli.main()
