"""Who drives the episodes of a group: the policy's own turns, one module a way."""

from rollout_worker.drivers.agent import Agents
from rollout_worker.drivers.base import Driver, Plan, TicketFailed
from rollout_worker.drivers.choice import driver_of
from rollout_worker.drivers.conversation import Conversations
from rollout_worker.drivers.environment import InEnvironments

__all__ = ["Agents", "Conversations", "Driver", "InEnvironments", "Plan", "TicketFailed", "driver_of"]
