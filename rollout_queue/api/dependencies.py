"""What a route asks FastAPI for."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from rollout_queue.broker.broker import Broker


async def _ready_broker(request: Request) -> Broker:
    broker: Broker = request.app.state.broker
    broker.check_ready()
    return broker


ReadyBroker = Annotated[Broker, Depends(_ready_broker)]
"""The broker that the app serves; refused (STORE_FAILED, NOT_READY) while it cannot answer."""
