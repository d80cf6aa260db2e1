"""All routes that we add to vLLM's server, by method and path."""

from __future__ import annotations

from weight_sync.vllm import proof_routes, server_routes
from weight_sync.vllm.route import Handler

ROUTES: dict[tuple[str, str], Handler] = {**server_routes.ROUTES, **proof_routes.ROUTES}
