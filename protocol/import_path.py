"""Lets a child process import the Slipstream of its parent, from a checkout that is not installed too."""

import os
from pathlib import Path

# Holds the folder `slipstream`. Its packages are links in a checkout, so the path is not resolved.
ROOT = Path(__file__).parents[2]


def python_path() -> str:
    """Return the child's PYTHONPATH: this Slipstream's folder before the parent's own."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
