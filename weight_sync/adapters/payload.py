"""What travels of an adapter: a safetensors file and its configuration, under a name that their digest is a part of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3
from safetensors.torch import save

from protocol.versions import name_of


@dataclass(frozen=True)
class AdapterPayload:
    """file: the content of `adapter_model.safetensors`; config: that of `adapter_config.json`; digest: `digest_of`
    them."""

    name: str
    file: bytes
    config: str
    digest: str

    @classmethod
    def of(
        cls, version: int, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], run_id: str = ""
    ) -> AdapterPayload:
        """tensors: by peft's names, contiguous, on the host."""
        file, text = save(dict(tensors)), json.dumps(config, sort_keys=True)
        digest = digest_of(file, text)
        return cls(name_of(version, digest, run_id), file, text, digest)


def digest_of(file: bytes, config: str) -> str:
    """BLAKE3 over both, hexadecimal."""
    return blake3(file).update(config.encode()).hexdigest()
