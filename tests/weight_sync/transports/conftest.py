"""What the tests of transports share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from slipstream.weight_sync.transports.http.blob_server import BlobServer


@pytest.fixture(scope="module")
def flat(request: pytest.FixtureRequest) -> torch.Tensor:
    """Random bytes, as many as the file's SIZE."""
    return torch.randint(0, 256, (request.module.SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def depot() -> Iterator[BlobServer]:
    with BlobServer("127.0.0.1") as depot:
        yield depot
