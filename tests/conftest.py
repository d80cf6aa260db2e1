"""For all tests: examples of properties are bounded in number, never in time, so that a busy machine fails none; and
signals are as a terminal's foreground has them, even if the tests were started by nohup or in the background, whose
children ignore SIGHUP and SIGINT."""

from __future__ import annotations

import signal

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
