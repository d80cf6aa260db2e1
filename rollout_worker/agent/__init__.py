"""An OpenAI-compatible endpoint for each episode, so that a program that owns its loop can be trained as it is."""

from slipstream.rollout_worker.agent.formats import ChatFormats
from slipstream.rollout_worker.agent.server import AgentServer
from slipstream.rollout_worker.agent.session import Session

__all__ = ["AgentServer", "ChatFormats", "Session"]
