"""TRL's names: a script for TRL 1.16 runs when `from trl import ...` becomes `from slipstream.trl import ...`.

What becomes of each field and argument: docs/from_trl.md.
"""

from slipstream.trl.configs import AsyncGRPOConfig, GRPOConfig, RLOOConfig
from slipstream.trl.trainer import AsyncGRPOTrainer, GRPOTrainer, RLOOTrainer, TrainOutput

__all__ = [
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "TrainOutput",
]
