"""How long to wait before something that failed is tried again."""

import pytest

from slipstream.protocol.client import retry_pause_s


@pytest.mark.parametrize(("pauses", "seconds"), [(0, 0.25), (1, 0.5), (5, 8.0), (6, 10.0), (100_000, 10.0)])
def test_pauses_grow_to_ten_seconds(pauses, seconds):
    assert retry_pause_s(pauses) == seconds
