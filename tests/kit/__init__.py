"""Gives all tests one `config()`, one `group()`, one fake vLLM, and stand-ins for the other processes."""

from tests.kit.config import LEARNER, WORKER, config
from tests.kit.messages import VOCABULARY, group, segment

__all__ = ["LEARNER", "VOCABULARY", "WORKER", "config", "group", "segment"]
