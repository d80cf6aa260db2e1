"""Files that are written tensor by tensor are safetensors' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from slipstream.learner.model.tensor_files import write_tensors

TENSORS = {
    "odd": torch.arange(3, dtype=torch.uint8),
    "wide": torch.arange(12, dtype=torch.float64).reshape(3, 4),
    "short": torch.arange(5).to(torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.empty(0, 4),
    "turned": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    "bits": torch.tensor([True, False]),
    "eight": torch.arange(4).to(torch.float8_e4m3fn),
}


def test_what_is_written_is_read_by_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write_tensors(path, TENSORS, reversed(TENSORS.items()), {"of": "rank 1"})
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].double(), tensor.double()), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "of": "rank 1"}


def test_a_file_that_cannot_be_written_takes_the_tensors_nevertheless(tmp_path: Path) -> None:
    """Other ranks take part in making them, and would wait."""
    tensors = iter(TENSORS.items())
    with pytest.raises(FileNotFoundError):
        write_tensors(tmp_path / "nowhere" / "file", TENSORS, tensors)
    assert list(tensors) == []
