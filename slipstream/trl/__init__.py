"""TRL's classes: a script for TRL 1.16 runs when `from trl import ...` becomes `from slipstream.trl import ...`.

docs/from_trl.md lists how each field and argument is translated.
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
