"""The command `slipstream`: Ctrl-C at any moment of its start prints no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

STAND_IN_MODULE = """
import sys, time
print("importing", flush=True)
time.sleep(60)
"""


def test_ctrl_c_while_it_is_imported_ends_it_at_once_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(STAND_IN_MODULE, encoding="utf-8")
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.entry", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{root}"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # not ignored, as CI may have it
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (-signal.SIGINT, ""), "a shell tells it as 130"


def test_ctrl_c_is_a_keyboard_interrupt_again_for_the_commands() -> None:
    code = (
        "import signal, sys, deploy.cli\n"
        "deploy.cli.main = lambda: print(signal.getsignal(signal.SIGINT).__name__)\n"
        "from deploy.entry import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.stdout == "default_int_handler\n", done.stderr
