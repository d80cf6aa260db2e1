"""TRL's defaults that shape what is trained: they hold here too where a script leaves the field out.

Of a field that is not named, ours does.
"""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    "learning_rate": 1e-6,
    "temperature": 1.0,
    "epsilon": 0.2,
    "epsilon_high": None,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "warmup_steps": 0,
    "seed": 42,
}
_SYNC: dict[str, Any] = {
    **_COMMON,
    "max_completion_length": 512,
    "shuffle_dataset": True,
    "mask_truncated_completions": False,
    "num_iterations": 1,
    "lr_scheduler_type": "linear",
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "GRPOConfig": {
        **_SYNC,
        "num_generations": 8,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "importance_sampling_level": "token",
        "multi_objective_aggregation": "sum_then_normalize",
        "delta": None,
        "top_entropy_quantile": 1.0,
        "entropy_coef": 0.0,
        "off_policy_mask_threshold": None,
        "sync_ref_model": False,
        "ref_model_mixup_alpha": 0.6,
        "ref_model_sync_steps": 512,
        "use_bias_correction_kl": True,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
        "vllm_importance_sampling_clip_min": None,
        "max_tool_calling_iterations": None,
    },
    "RLOOConfig": {
        **_SYNC,
        "num_generations": 2,
        "beta": 0.05,
        "normalize_advantages": False,
        "reward_clip_range": None,
        "sync_ref_model": False,
        "ref_model_mixup_alpha": 0.6,
        "ref_model_sync_steps": 512,
    },
    "AsyncGRPOConfig": {
        **_COMMON,
        "num_generations": 8,
        "max_completion_length": 2048,
        "max_tool_calling_iterations": None,
        "max_staleness": 4,
        "weight_sync_steps": 1,
        "lr_scheduler_type": "constant",
    },
}
