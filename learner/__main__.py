"""`python -m learner run.toml [--resume] [--section.key value]`, also under `accelerate launch -m learner`."""

from __future__ import annotations

import logging
import os
import signal
import sys

USAGE = "usage: python -m learner run.toml [--resume] [--section.key value ...]"


def main(arguments: list[str]) -> int:
    """Exit code: 0 done, 1 the run failed, 2 the run file or the arguments are wrong."""
    from learner.ranks.stopping import LearnerFailed
    from learner.run import run
    from protocol import access
    from protocol.client import QueueError
    from protocol.config import ConfigError, load
    from weight_sync.publisher import PublishError

    resume = "--resume" in arguments
    rest = [argument for argument in arguments if argument != "--resume"]
    if not rest or rest[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        config = load(rest[0], rest[1:], needs=["model", "chat", "callbacks"])
        access.hide_token()  # from the callbacks, and from what they start
        run(config, resume=resume)
    except ConfigError as error:
        print(f"learner: {error}", file=sys.stderr)
        return 2
    except (QueueError, PublishError, LearnerFailed) as error:
        print(f"learner: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # Until the learner handles it, Ctrl-C ends the process without a traceback: torch loads for seconds.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    logging.basicConfig(
        level=os.environ.get("SLIPSTREAM_LOG", "INFO").upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    sys.exit(main(sys.argv[1:]))
