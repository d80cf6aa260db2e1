"""Large blocks that were freed are the system's again."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slipstream.rollout_worker.memory import return_large_blocks

# Frees 8 MB, after which glibc would take blocks of up to that size from an arena, and says whether one of 1 MB is.
PROGRAM = """
import ctypes, sys
from slipstream.rollout_worker.memory import return_large_blocks
if sys.argv[1] == "set":
    assert return_large_blocks()
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd a b c d e".split()]
mapped = ctypes.CDLL(None).mallinfo2
mapped.restype = Info
block = bytearray(8_000_000)
del block
before = mapped().hblkhd
block = bytearray(1_000_000)
print(mapped().hblkhd - before >= 1_000_000)
"""


@pytest.mark.skipif(not return_large_blocks(), reason="another allocator than glibc's")
@pytest.mark.parametrize(("how", "mapped"), [("set", True), ("as it is", False)])
def test_a_large_block_is_mapped_by_itself_after_a_larger_one_was_freed(how: str, mapped: bool) -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == str(mapped)
