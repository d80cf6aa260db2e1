"""The one boundary around the user's code: tools, environments, rewards, data sets (I9)."""

from rollout_worker.user_code.boundary import Kind, UserCode, in_thread
from rollout_worker.user_code.failures import NotCalled, UserCodeError, defined_at, failure_of

__all__ = ["Kind", "NotCalled", "UserCode", "UserCodeError", "defined_at", "failure_of", "in_thread"]
