"""What becomes of copies of a process that user code makes with `os.fork`.

A copy that runs user code may do so to the end of the call, as `fork` is meant to be used; then it must not go on as
another worker, or as another child that answers.
"""

from __future__ import annotations

import os


def end_if_copy(pid: int, error: BaseException | None = None) -> None:
    """End at once, writing nothing, if this is not the process `pid`: with the code of a `SystemExit`, with 1 after
    another `error`."""
    if os.getpid() == pid:
        return
    code = 1 if error is not None else 0
    if error is not None and issubclass(type(error), SystemExit):
        given = SystemExit.__dict__["code"].__get__(error)
        code = 0 if given is None else given & 255 if type(given) is int else 1
    os._exit(code)
