"""The `slipstream` command. Ctrl-C ends it without a traceback, even while it imports."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    try:
        from slipstream.deploy.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # A second Ctrl-C would only interrupt the exit.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
