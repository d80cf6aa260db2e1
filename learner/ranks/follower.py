"""`python -m learner.ranks.follower`: a rank that rank 0 has started on its own machine, and that ends with it."""

from __future__ import annotations

import logging
import os
import sys
import threading

from learner.ranks.environment import place
from learner.ranks.liveness import RankLost
from learner.run import follow
from protocol.config import ConfigError


def main() -> int:
    """Exit code: 0 there is nothing left to do, 1 rank 0 has gone, 2 the model cannot be loaded here."""
    threading.Thread(target=_end_with_rank_0, name="rank-0", daemon=True).start()
    here = place(os.environ, ranks=1)
    try:
        follow(here)
    except (ConfigError, RankLost) as error:
        print(f"learner: rank {here.rank}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _end_with_rank_0() -> None:
    """Rank 0 writes nothing to our standard input, which closes as it ends, in whatever way."""
    # Not through sys.stdin: a thread that holds its lock makes Python abort as it ends, and the exit code is lost.
    os.read(sys.stdin.fileno(), 1)
    os._exit(0)


if __name__ == "__main__":
    logging.basicConfig(level=os.environ.get("SLIPSTREAM_LOG", "INFO").upper(), stream=sys.stderr)
    sys.exit(main())
