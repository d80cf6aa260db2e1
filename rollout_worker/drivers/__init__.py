"""Who drives the episodes of a group: the policy's own turns, one module a way."""

from rollout_worker.drivers.agent import Agents
from rollout_worker.drivers.base import Driver, Plan, TicketFailed
from rollout_worker.drivers.conversation import Conversations

__all__ = ["Agents", "Conversations", "Driver", "Plan", "TicketFailed"]
