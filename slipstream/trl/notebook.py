"""Runs the training of a notebook: its cells, as a script in its own process, with a table of progress.

A notebook has an event loop and no file. The cells so far are written to a file, and Python runs it up to the training
that the notebook has come to. Lines for IPython are left out. As in the notebook, a cell that fails does not keep the
next ones from running.
"""

from __future__ import annotations

import ast
import contextlib
import html
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from slipstream.deploy.run.process_keeper import RunFailed
from slipstream.protocol.config import ConfigError
from slipstream.trl.state import TrainerState, read_state

# Number of the start with which the cells end, in the environment of their process.
ONLY = "SLIPSTREAM_NOTEBOOK_START"

_POLL_S = 1.0

# Columns of the table, each with its name in the log.
_COLUMNS = {"Step": "step", "Training Loss": "loss", "Reward": "reward", "Length": "completions/mean_length"}


def is_one() -> bool:
    """Tell whether this process is a notebook's, or another session of IPython."""
    main = sys.modules["__main__"]
    return not hasattr(main, "__file__") and isinstance(getattr(main, "In", None), list)


def script(cells: list[str]) -> str:
    """Join cells, as they are or as IPython keeps them, to a script. What is no Python is left out."""
    parts: list[ast.stmt] = []
    for cell in cells:
        lines = [line for line in cell.splitlines() if not line.lstrip().startswith(("%", "!", "?", "get_ipython()"))]
        try:
            body = ast.parse("\n".join(lines)).body if not cell.lstrip().startswith("%%") else []
        except SyntaxError:
            continue
        if cell is cells[-1]:
            parts += body
        elif body:
            failed = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Pass()])
            parts.append(ast.Try(body, [failed], [], []))
    return ast.unparse(ast.fix_missing_locations(ast.Module(parts, []))) + "\n"


def run(run_dir: Path, start: int, steps_per_epoch: float | None = None) -> None:
    """Run the notebook's cells up to a start of a run, and draw its progress.

    Args:
        run_dir: The run directory.
        start: Number of the start.
        steps_per_epoch: As in `read_state`.

    Raises:
        ConfigError: A setting cannot work; nothing was started.
        RunFailed: The process failed; the text is what it raised, or its last lines.
        KeyboardInterrupt: The cell was interrupted; all processes have ended.
    """
    with tempfile.TemporaryDirectory(prefix="slipstream-cells-") as folder:
        file, output = Path(folder, "notebook.py"), Path(folder, "output")
        file.write_text(script(getattr(sys.modules["__main__"], "In", [])), encoding="utf-8")
        environment = {**os.environ, ONLY: str(start), "PYTHONUNBUFFERED": "1"}
        with output.open("wb") as sink:
            process = subprocess.Popen([sys.executable, str(file)], stdout=sink, stderr=sink, env=environment)
            try:
                _watch(process, run_dir, steps_per_epoch)
            except BaseException:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(60)
                process.kill()
                process.wait()
                raise
        if process.returncode:
            raise failure(output.read_text(encoding="utf-8", errors="replace"), process.returncode)


def failure(output: str, code: int) -> ConfigError | RunFailed:
    """Return the error with which the cells' process ended: the one that it raised, or its last lines."""
    lines = output.strip().splitlines()
    for number in reversed(range(len(lines))):
        if raised := re.match(r"[\w.]*\b(ConfigError|RunFailed): ", lines[number]):
            text = "\n".join([lines[number][raised.end() :], *lines[number + 1 :]])
            return ConfigError(text) if raised[1] == "ConfigError" else RunFailed(text, code)
    return RunFailed("\n".join(lines[-12:]) or f"the run ended with {code}", code)


def _watch(process: subprocess.Popen[bytes], run_dir: Path, steps_per_epoch: float | None) -> None:
    shown, display = read_state(run_dir).global_step or -1, None  # what is there already is another run's
    while True:
        ended = process.poll() is not None
        state = read_state(run_dir, (), steps_per_epoch)
        if state.global_step != shown:
            shown, display = state.global_step, _draw(state, display)
        if ended:
            return
        time.sleep(_POLL_S)


def table(state: TrainerState) -> str:
    """Return the steps so far as an HTML table, as transformers draws its own."""
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    steps = [entry for entry in state.log_history if "loss" in entry]
    rows = "".join(
        "<tr>" + "".join(f"<td>{_shown(entry.get(key))}</td>" for key in _COLUMNS.values()) + "</tr>" for entry in steps
    )
    return (
        f'<div>Step {state.global_step}, epoch {state.epoch:g}</div><table border="1" class="dataframe"><thead>'
        f'<tr style="text-align: left;">{head}</tr></thead><tbody>{rows}</tbody></table>'
    )


def _shown(value: Any) -> str:
    return f"{value:.6f}" if isinstance(value, float) else html.escape(str("" if value is None else value))


def _draw(state: TrainerState, display: Any) -> Any:
    """Show the table, or renew it. Returns the handle with which it is renewed."""
    try:
        from IPython.display import HTML
        from IPython.display import display as show
    except ImportError:
        return None
    if display is None:
        return show(HTML(table(state)), display_id=True)
    display.update(HTML(table(state)))
    return display
