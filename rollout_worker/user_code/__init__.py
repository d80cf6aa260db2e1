"""The one boundary around the user's code: tools, environments, rewards, data sets (I9)."""

from rollout_worker.user_code.boundary import UserCode, in_thread
from rollout_worker.user_code.failures import UserCodeError, defined_at, failure_of

__all__ = ["UserCode", "UserCodeError", "defined_at", "failure_of", "in_thread"]
