"""`python -m slipstream.learner run.toml [--queue URL] [--resume [--take-over]] [--section.key value]`.

`accelerate launch -m slipstream.learner` starts it too.

`python -m slipstream.learner --rank` is another rank, which rank 0 starts on its own machine and which ends with it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading


def main(arguments: list[str]) -> int:
    """Run the learner.

    Returns:
        The exit code: 0 the run is done, 1 it failed, 2 the run file or the arguments are wrong.
    """
    if arguments == ["--rank"]:
        return follow_rank_0()
    from slipstream.learner.ranks.stopping import LearnerFailed
    from slipstream.learner.run import run
    from slipstream.protocol import access
    from slipstream.protocol.client import QueueError
    from slipstream.protocol.config import ConfigError, load
    from slipstream.weight_sync.publisher import PublishError

    given, settings = _parser().parse_known_args(arguments)
    try:
        config = load(given.run_file, settings, needs=["model", "chat", "callbacks"])
        access.hide_token()  # Callbacks, and programs that they start, must not read the token.
        run(config, given.queue, given.resume, given.take_over)
    except ConfigError as error:
        print(f"learner: {error}", file=sys.stderr)
        return 2
    except (QueueError, PublishError, LearnerFailed) as error:
        print(f"learner: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m slipstream.learner",
        usage="%(prog)s run.toml [options] [--section.key value ...]",
        allow_abbrev=False,
    )
    parser.add_argument("run_file", metavar="run.toml")
    parser.add_argument("--queue", metavar="URL", help="URL of the queue, or of several, separated by commas")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument("--take-over", action="store_true", help="with --resume: end one that lives")
    return parser


def follow_rank_0() -> int:
    """Run a rank that rank 0 has started on its own machine; the environment says which.

    Returns:
        The exit code: 0 there is nothing left to do, 1 rank 0 has gone, 2 the model cannot be loaded here.
    """
    threading.Thread(target=_end_with_rank_0, name="rank-0", daemon=True).start()
    from slipstream.learner.ranks.environment import place
    from slipstream.learner.ranks.liveness import RankLost
    from slipstream.learner.run import follow
    from slipstream.protocol.config import ConfigError

    here = place(os.environ, ranks=1)
    try:
        follow(here)
    except (ConfigError, RankLost) as error:
        print(f"learner: rank {here.rank}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _end_with_rank_0() -> None:
    """End this process when rank 0 ends: rank 0 writes nothing to our standard input, which closes with it."""
    # Not through sys.stdin: a thread that holds its lock makes Python abort as it ends, and the exit code is lost.
    os.read(sys.stdin.fileno(), 1)
    os._exit(0)


if __name__ == "__main__":
    # Until the learner handles it, Ctrl-C ends the process without a traceback: torch loads for seconds.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from slipstream.protocol import log_lines

    log_lines.set_up()
    sys.exit(main(sys.argv[1:]))
