"""The routes of the proof."""

from __future__ import annotations

from weight_sync.vllm.route import Handler

ROUTES: dict[tuple[str, str], Handler] = {}
