"""The `slipstream` command. Ctrl-C ends it without a traceback from its first import on."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    try:
        from deploy.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # An impatient second Ctrl-C has nothing left to stop but the exit.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
