"""A checksum of tensors that is computed where they lie, on a GPU without waiting for it.

It finds damage; it is no defence against anyone who means harm.
"""

from __future__ import annotations

import torch

SIZE = 16
_MIX = -7046029254386353131  # 0x9E3779B97F4A7C15: odd, so that no word is lost

# Words at a time: bounds the memory that the weights take.
_PART = 1 << 20


def checksum(data: torch.Tensor) -> torch.Tensor:
    """Sum the 64-bit words of contiguous uint8 [n], modulo 2**64, plainly and mixed with odd weights by position.

    It tells changed and exchanged words.

    Returns:
        uint8 [`SIZE`] on the same device.
    """
    padded = -len(data) % 8
    if padded:
        data = torch.cat([data, data.new_zeros(padded)])
    words = data.view(torch.int64) if data.data_ptr() % 8 == 0 else data.clone().view(torch.int64)
    plain = torch.zeros(1, dtype=torch.int64, device=data.device)
    weighted = torch.zeros_like(plain)
    for start in range(0, len(words), _PART):
        part = words[start : start + _PART]
        mixed = part * _MIX
        mixed ^= mixed >> 32
        weights = torch.arange(start, start + len(part), dtype=torch.int64, device=data.device) * 2 + 1
        plain += part.sum()
        weighted += (mixed * weights).sum()
    return torch.cat([plain, weighted]).view(torch.uint8)


def checksum_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a tensor's bytes, of any shape and type."""
    return checksum(tensor.contiguous().view(-1).view(torch.uint8))
