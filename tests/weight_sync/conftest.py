"""What the tests of this folder share."""

from __future__ import annotations

import pytest

from slipstream.weight_sync.server import cancellation, control


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between attempts, and for threads that hang, as short as a test wants them."""
    monkeypatch.setattr(control, "RESUME_PAUSE_S", 0.01)
    monkeypatch.setattr(cancellation, "GRACE_S", 0.05)
