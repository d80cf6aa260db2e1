"""`slipstream up` with the command in $STAND_IN in the place of `slipstream` for every process that it starts."""

from __future__ import annotations

import os

from deploy import cli, programs

if __name__ == "__main__":
    programs.SLIPSTREAM = (os.environ["STAND_IN"],)
    cli.main()
