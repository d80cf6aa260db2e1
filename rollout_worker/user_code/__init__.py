"""Runs user code (tools, environments, rewards, data sets) behind one boundary: none can end or block a worker (I9)."""

from slipstream.rollout_worker.user_code.boundary import Kind, UserCode
from slipstream.rollout_worker.user_code.call import Call
from slipstream.rollout_worker.user_code.errors import NotCalled, UserCodeError, defined_at, failure_of

__all__ = ["Call", "Kind", "NotCalled", "UserCode", "UserCodeError", "defined_at", "failure_of"]
