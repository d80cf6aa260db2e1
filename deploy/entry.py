"""The command `slipstream`: the command line, and no traceback for a Ctrl-C while it is still being imported."""

import signal


def main() -> None:
    """As `deploy.cli.main`. Until that is imported, which takes half a second, Ctrl-C ends the process at once."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where it is ignored, as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from deploy.cli import main as command_line

    signal.signal(signal.SIGINT, before)
    command_line()


if __name__ == "__main__":
    main()
