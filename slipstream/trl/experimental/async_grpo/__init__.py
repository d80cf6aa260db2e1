"""Where AsyncGRPOTrainer stood before TRL 1.18; it is in `slipstream.trl` as well."""

from slipstream.trl import AsyncGRPOConfig, AsyncGRPOTrainer

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer"]
