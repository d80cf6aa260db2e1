"""What a CPU computes fast, by its flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.protocol.config.machine import bfloat16_unit


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("processor: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_bf16\n", "AMX"),
        ("flags\t\t: fpu avx512f avx512_bf16\n", "AVX-512"),
        ("flags\t\t: fpu avx2 avx512f\n", None),
        ("Features\t: fp asimd bf16 i8mm\n", "NEON"),
        ("", None),
    ],
)
def test_instructions_that_multiply_in_bfloat16(text: str, unit: str | None, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert bfloat16_unit(tmp_path / "cpuinfo") == unit
    assert bfloat16_unit(tmp_path / "none") is None
