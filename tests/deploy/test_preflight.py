"""What `slipstream up` finds wrong before it starts anything."""

from __future__ import annotations

