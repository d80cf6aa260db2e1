"""The table of TRL's fields: the translation of each field of GRPOConfig, RLOOConfig, AsyncGRPOConfig (all of 1.16,
and what is known of later releases) and the TrainingArguments beneath them.

Nothing else decides that: the configs take the fields of this table, `translate` follows it, and
`python -m docs.generate from_trl` writes the tables of docs/from_trl.md from it. The file is as long as the list of
fields.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

# Which configs have a field: G, R, A for the three, T for TrainingArguments, which all three extend.
Letters = str


@dataclass(frozen=True, slots=True)
class Field:
    """A field of TRL.

    Attributes:
        name: The field.
        of: Letters of the configs that have it.
        here: Its setting here, or "no"; a column of the page.
        note: A column of the page.
        how: "set" becomes the setting `here`; "worked" is read by `translate`; "idle" is ignored; "noted" is ignored
            with a note unless its value is in `fine`; "only" is refused unless its value is in `fine`.
        fine: Values that change nothing.
        remedy: What to write instead of a value that is refused; "" for a value of `fine`.
    """

    name: str
    of: Letters
    here: str
    note: str
    how: Literal["set", "worked", "idle", "noted", "only"]
    fine: tuple[Any, ...] = ()
    remedy: str = ""

    @property
    def setting(self) -> tuple[str, str]:
        """Returns section and key of a field that is "set"."""
        section, key = self.here.strip("`").split(".")
        return section, key


def _set(name: str, of: Letters, setting: str, note: str = "") -> Field:
    return Field(name, of, f"`{setting}`", note, "set")


def _worked(name: str, of: Letters, here: str, note: str = "") -> Field:
    return Field(name, of, here, note, "worked")


def _idle(name: str, of: Letters, note: str, here: str = "no") -> Field:
    return Field(name, of, here, note, "idle")


def _noted(name: str, of: Letters, here: str, note: str, *fine: Any) -> Field:
    return Field(name, of, here, note, "noted", fine)


def _only(name: str, of: Letters, here: str, note: str, *fine: Any, remedy: str = "") -> Field:
    return Field(name, of, here, note, "only", fine, remedy)


TABLES: dict[str, tuple[Field, ...]] = {
    "The model": (
        _worked(
            "model_init_kwargs",
            "GRA",
            "`model.dtype`, `model.attention`, `model.revision`, `model.trust_remote_code`",
            "these four of it; others are refused",
        ),
        _worked("dtype", "A", "`model.dtype`", ""),
        _worked("bf16", "GRAT", "`model.dtype`", '`"bfloat16"`; the learner keeps its weights in float32'),
        _worked(
            "fp16",
            "T",
            "`model.dtype`",
            '`"float16"` for the servers; the learner then computes in float32',
        ),
        _set("trust_remote_code", "GRA", "model.trust_remote_code"),
        _set(
            "router_aux_loss_coef",
            "GRA",
            "learner.router_aux_loss_coef",
            "left out: 0 here, in TRL the model's own config",
        ),
        _idle("disable_dropout", "GR", "the learner's log-probs must be the server's", "always"),
        _noted(
            "cast_lm_head_to_fp32",
            "G",
            "no",
            "the output layer computes in `model.dtype`, as vLLM's does",
            False,
        ),
        _set("gradient_checkpointing", "GRAT", "learner.gradient_checkpointing", "TRL's default is True, ours False"),
        _set("torch_compile", "T", "learner.compile", ""),
        _idle("use_liger_kernel", "GRAT", "logits are never held whole: `learner.logits_mib`"),
        _worked("fsdp", "T", "`learner.shard_weights`", "FSDP2"),
        _idle("torch_empty_cache_steps", "GRAT", "rows have one token budget"),
    ),
    "Data and episodes": (
        _idle("remove_unused_columns", "GRT", "all columns reach the rewards"),
        _worked("shuffle_dataset", "GR", "`task.order`", 'False: `"as_given"`'),
        _set("num_generations", "GRA", "rollout.group_size"),
        _worked("num_generations_eval", "GR", "`eval.group_size`", "left out: `num_generations`"),
        _worked(
            "max_completion_length",
            "GRA",
            "`rollout.max_episode_tokens`, `rollout.max_turn_tokens`",
            "sampled tokens; tool results do not count",
        ),
        _worked(
            "max_tool_calling_iterations",
            "GA",
            "`rollout.max_turns`",
            "turns of the policy: iterations + 1; None: any number",
        ),
        _set("temperature", "GRA", "rollout.temperature", ""),
        _set("top_p", "GRA", "rollout.top_p", "below 1 with `rollout.top_k`, 64 if the script has none"),
        _worked("top_k", "GRA", "`rollout.top_k`", "up to 128; above see `rollout.accept_sampler_mismatch`"),
        _set("min_p", "GRA", "rollout.min_p", "as `top_p`"),
        _set(
            "repetition_penalty",
            "GRA",
            "rollout.repetition_penalty",
            "other than 1 see `rollout.accept_sampler_mismatch`",
        ),
        _set("generation_kwargs", "GR", "rollout.generation_kwargs", "further fields of vLLM's SamplingParams"),
        _set("chat_template_kwargs", "GRA", "chat.chat_template_kwargs"),
        _idle("pad_to_multiple_of", "GR", "rows are packed, nothing is padded"),
        _idle(
            "fork_threshold_tokens",
            "A",
            "sampled tokens are never tokenised again",
        ),
        _idle(
            "packing",
            "A",
            "of releases after 1.16; `auto` shares prefixes where the model can",
            "`learner.layout`",
        ),
        _idle("generation_batch_size", "GR", "`worker.episodes` run at once"),
        _idle(
            "steps_per_generation",
            "GR",
            "`queue.max_staleness` bounds how far generation runs ahead",
        ),
        _worked("max_inflight_tasks", "A", "`worker.episodes`", "for each worker"),
        _set("mask_truncated_completions", "GR", "rollout.mask_truncated"),
        _idle("cache_implementation", "GR", "vLLM generates"),
        _idle("ds3_gather_for_generation", "GR", "vLLM generates"),
        _idle("use_transformers_continuous_batching", "GR", "vLLM generates"),
        _idle("transformers_continuous_batching_config", "GR", "vLLM generates"),
        _idle("use_transformers_paged", "GR", "vLLM generates"),
    ),
    "vLLM and weights": (
        _idle(
            "use_vllm",
            "GR",
            "see `vllm_importance_sampling_correction`",
            "always",
        ),
        _idle("vllm_mode", "GR", "generation and training run at once", "server, always"),
        _worked("vllm_model_impl", "GR", "`vllm.args`", '`["--model-impl", "transformers"]`'),
        _idle("vllm_enable_sleep_mode", "GR", "generation and training run at once"),
        _worked(
            "vllm_structured_outputs_regex",
            "GR",
            "`rollout.generation_kwargs`",
            "with `rollout.top_k`, 64 if the script has none",
        ),
        _worked(
            "vllm_server_base_url",
            "GRA",
            "`vllm.servers`",
            "a server that `slipstream vllm` started; left out, the run starts its own",
        ),
        _worked("vllm_server_host", "GR", "`vllm.servers`", "as `vllm_server_base_url`"),
        _worked("vllm_server_port", "GR", "`vllm.servers`", "as `vllm_server_base_url`"),
        _set("vllm_server_timeout", "GRA", "vllm.start_timeout_s"),
        _set("request_timeout", "A", "worker.request_timeout_s"),
        _idle("vllm_group_port", "GR", "chosen for each transfer"),
        _worked("vllm_gpu_memory_utilization", "GR", "`vllm.args`", '`["--gpu-memory-utilization", "0.8"]`'),
        _worked(
            "vllm_max_model_length", "GR", "`vllm.max_model_len`", "left out: 4096, or what twice the completions need"
        ),
        _worked("vllm_tensor_parallel_size", "GR", "`vllm.args`", '`["--tensor-parallel-size", "2"]`; tried on CPUs'),
        _set("weight_sync_steps", "A", "weight_sync.every"),
        _set("weight_sync_timeout", "A", "weight_sync.timeout_s", "for one server"),
    ),
    "The objective": (
        _set("learning_rate", "GRAT", "learner.learning_rate"),
        _worked(
            "lr_scheduler_type",
            "AT",
            "`learner.lr_scheduler_type`",
            "TRL's defaults: linear, and constant for AsyncGRPO; not reduce_lr_on_plateau and greedy",
        ),
        _worked("lr_scheduler_kwargs", "GRAT", "`learner.lr_scheduler_kwargs`"),
        _worked(
            "beta",
            "GR",
            "`learner.kl_coef`, `learner.kl_in_reward`",
            "in the loss for GRPO, in the rewards for RLOO; loads a reference model",
        ),
        _worked(
            "num_iterations",
            "GR",
            "`learner.num_iterations`",
            "updates of one step; `max_steps` and other numbers of steps are divided by it",
        ),
        _worked("epsilon", "GRA", "`learner.clip_low`", ""),
        _worked(
            "epsilon_high",
            "GRA",
            "`learner.clip_high`",
            "None: `epsilon`, as in TRL (a run file's default: 0.28). With cispo the greatest ratio, `clip_high` + 1",
        ),
        _worked("delta", "G", "`learner.delta`", "None: `none`, as in TRL (a run file's default: 4)"),
        _only(
            "loss_type",
            "G",
            "`learner.algorithm`, `learner.objective`, `learner.normaliser`",
            "the preset of that name",
            *("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
        ),
        _worked("sapo_temperature_neg", "G", "`learner.sapo_temperature_neg`"),
        _worked("sapo_temperature_pos", "G", "`learner.sapo_temperature_pos`"),
        _worked("vespo_k_pos", "G", "`learner.vespo_k_pos`"),
        _worked("vespo_lambda_pos", "G", "`learner.vespo_lambda_pos`"),
        _worked("vespo_k_neg", "G", "`learner.vespo_k_neg`"),
        _worked("vespo_lambda_neg", "G", "`learner.vespo_lambda_neg`"),
        _only(
            "importance_sampling_level",
            "G",
            "`learner.objective`",
            '`"gspo"` for sequence, `"sequence_cispo"` with cispo; not with sapo and vespo',
            "token",
            "sequence",
        ),
        _only(
            "scale_rewards",
            "G",
            "`learner.advantage`",
            '`"grpo"` for group or True, `"batch"` for batch, `"dr_grpo"` for none or False',
            *("group", "batch", "none", True, False),
        ),
        _worked("normalize_advantages", "R", "`learner.normalise_advantages`", "over the step"),
        _worked("reward_clip_range", "R", "`learner.reward_clip`"),
        _worked("reward_weights", "GR", "`Task(reward_weights=...)`"),
        _only(
            "multi_objective_aggregation",
            "G",
            "`learner.advantage`",
            '`"gdpo"` for normalize_then_sum',
            "sum_then_normalize",
            "normalize_then_sum",
        ),
        _worked("top_entropy_quantile", "G", "`learner.top_entropy_quantile`", "of the step's tokens"),
        _worked("entropy_coef", "G", "`learner.entropy_coef`"),
        _only("use_adaptive_entropy", "G", "not yet", "the bonus is constant: `learner.entropy_coef`", False),
        _idle("entropy_coef_min", "G", "of `use_adaptive_entropy`", "not yet"),
        _idle("entropy_coef_max", "G", "of `use_adaptive_entropy`", "not yet"),
        _idle("entropy_coef_delta", "G", "of `use_adaptive_entropy`", "not yet"),
        _idle("entropy_target", "G", "of `use_adaptive_entropy`", "not yet"),
        _worked("sync_ref_model", "GR", "`learner.reference_sync_steps`", "False: 0, the reference stays"),
        _worked("ref_model_mixup_alpha", "GR", "`learner.reference_mixup`", "with `sync_ref_model`"),
        _worked("ref_model_sync_steps", "GR", "`learner.reference_sync_steps`", "with `sync_ref_model`"),
        _worked(
            "use_bias_correction_kl",
            "G",
            "`learner.kl_bias_correction`",
            "with `beta`",
        ),
    ),
    "Off-policy": (
        _worked(
            "vllm_importance_sampling_correction",
            "G",
            "`learner.correction`",
            "used if True (TRL's default) and the script sets `use_vllm` or a field of this name; else the ratio to "
            "the sampler is clipped. Never with vespo",
        ),
        _only(
            "vllm_importance_sampling_mode",
            "G",
            "`learner.correction`",
            'the same names, with `learner.proximal = "recomputed"`',
            *("sequence_mask", "sequence_truncate", "token_mask", "token_truncate"),
        ),
        _worked("vllm_importance_sampling_clip_max", "G", "`learner.correction_high`", "None: a million"),
        _worked("vllm_importance_sampling_clip_min", "G", "`learner.correction_low`", "None: 0"),
        _worked("vllm_importance_sampling_cap", "G", "`learner.correction_high`", "deprecated in TRL"),
        _worked("off_policy_mask_threshold", "G", "`learner.off_policy_mask_threshold`"),
        _set(
            "max_staleness",
            "A",
            "queue.max_staleness",
            "",
        ),
        _worked("queue_maxsize", "A", "`queue.capacity_groups`", "rollouts become groups"),
        _worked("token_budget", "A", "`learner.token_budget`"),
        _idle("heartbeat_stale_after_s", "A", "a worker that dies does not end the run"),
        _idle("ignore_data_skip", "AT", "a resume is exact in the data set's position"),
    ),
    "Logging": (
        _idle("logging_steps", "GRAT", "every step has a line in `metrics.jsonl`", "1, always"),
        _worked(
            "log_completions",
            "GRA",
            "`learner.show_rollout_every`, `tracking.rollouts_every`",
            "at every `logging_steps`; a table in trackers, a sample in `rollouts.jsonl`",
        ),
        _set("num_completions_to_print", "GRA", "learner.sample_rollouts", "of each step, in `rollouts.jsonl`"),
        _idle("log_multimodal", "GR", "rollouts keep a small preview of each image"),
        _idle("log_unique_prompts", "GR", "the sample is spread over the step's groups"),
        _only(
            "log_completions_hub_repo",
            "G",
            "no",
            "trackers get tables of them",
            None,
            remedy="write log_completions=True",
        ),
        _worked("report_to", "T", "`tracking.report_to`", "those that accelerate has; others are refused"),
        _set("run_name", "T", "tracking.run_name"),
        _set("project", "T", "tracking.project"),
        _worked("trackio_space_id", "T", "`tracking.options`", "`trackio.space_id` of it"),
        _worked("trackio_bucket_id", "T", "`tracking.options`", "`trackio.bucket_id` of it"),
    ),
    "TrainingArguments that scripts often set": (
        _worked("output_dir", "T", "`run.dir`, `run.name`", "its parent and its last part"),
        _worked(
            "max_steps",
            "T",
            "`learner.steps`",
            'with `learner.zero_variance = "keep"`',
        ),
        _worked("num_train_epochs", "T", "`learner.epochs`", "rows x epochs / `groups_per_step` steps"),
        _worked("per_device_train_batch_size", "T", "`learner.groups_per_step`", "see above"),
        _worked(
            "gradient_accumulation_steps",
            "T",
            "`learner.groups_per_step`",
            "see above",
        ),
        _set("max_grad_norm", "T", "learner.max_grad_norm"),
        _worked("adam_beta1", "T", "`learner.betas`"),
        _worked("adam_beta2", "T", "`learner.betas`"),
        _worked("adam_epsilon", "T", "`learner.optim_args`", "`eps`"),
        _set("optim", "T", "learner.optim"),
        _worked("optim_args", "T", "`learner.optim_args`", "a table; text is parsed"),
        _set("weight_decay", "T", "learner.weight_decay"),
        _worked("warmup_steps", "T", "`learner.warmup_steps`", "below 1: a share of the steps"),
        _set("seed", "T", "run.seed"),
        _worked(
            "save_strategy", "T", "`learner.checkpoint_every`", '`"no"`: at the end only; `"epoch"` as `eval_strategy`'
        ),
        _worked("save_steps", "T", "`learner.checkpoint_every`", "below 1: a share of `max_steps`"),
        _set("save_total_limit", "T", "learner.keep_checkpoints", "the best one not counted; left out: 2"),
        _worked(
            "load_best_model_at_end",
            "T",
            "`learner.keep_best`",
            "`save_model` takes the best; needs `eval_strategy`; one of `save_steps`, `eval_steps` divides the other",
        ),
        _only(
            "metric_for_best_model",
            "T",
            "the mean reward of the evaluation, always",
            "with `load_best_model_at_end`",
            *(None, "reward", "eval_reward"),
        ),
        _only("greater_is_better", "T", "True, always", "with `load_best_model_at_end`", None, True),
        _worked(
            "eval_strategy",
            "T",
            "`eval.every`",
            "`steps`, or `epoch` of a data set in memory; runs during training",
        ),
        _worked(
            "eval_steps",
            "T",
            "`eval.every`",
            "left out: `logging_steps` (TRL's default: 10); below 1: a share of `max_steps`",
        ),
        _worked("eval_on_start", "T", "`eval.at_start`"),
        _idle("per_device_eval_batch_size", "T", "see `eval.share`"),
        _set("push_to_hub", "T", "hub.push_to_hub", "the model and its card"),
        _set("hub_model_id", "T", "hub.hub_model_id", "left out: the last part of `output_dir`"),
        _set("hub_private_repo", "T", "hub.hub_private_repo"),
        _worked(
            "hub_strategy", "T", "`hub.hub_strategy`", "`checkpoint` and `all_checkpoints` are refused: models only"
        ),
        _worked("hub_token", "T", "no", "passed to the learner as HF_TOKEN; written to no file"),
        _only("hub_revision", "T", "no", "models go to the main branch", None),
    ),
}

# Name, reason, values that change nothing, and the remedy if it is not one of these values.
_REST_ONLY: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    ("do_predict", "there is no prediction apart from evaluation", (False,), ""),
    ("deepspeed", "ranks share weights out with FSDP2", (None, ""), "write fsdp=True"),
    ("parallelism_config", "ranks share a step's rows, not their tensors", (None,), ""),
    ("neftune_noise_alpha", "log-probs must be the server's", (None, 0), ""),
    ("label_smoothing_factor", "there are no labels", (0,), ""),
    (
        "auto_find_batch_size",
        "rows have one token budget",
        (False,),
        "leave it out, and where memory runs out write slipstream={'learner': {'token_budget': 2048}}",
    ),
    ("data_seed", "the order of the rows follows from seed", (None,), ""),
    (
        "train_sampling_strategy",
        "rows are shuffled, or in order",
        (None, "random"),
        "write shuffle_dataset=False for order",
    ),
    ("optim_target_modules", "no optimiser that needs it is supported", (None,), ""),
    ("debug", "TRL's debugging does not reach the processes of the run", ("", [], None), ""),
)
_REST_NOTED = ("eval_delay", "tf32", "full_determinism", "use_cpu", "enable_jit_checkpoint", "save_only_model")
_REST_IDLE = (
    *("average_tokens_across_devices", "bf16_full_eval", "fp16_full_eval", "gradient_checkpointing_kwargs"),
    *("torch_compile_backend", "torch_compile_mode", "liger_kernel_config", "use_cache", "logging_strategy"),
    *("logging_first_step", "log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen"),
    *("log_level", "log_level_replica", "disable_tqdm"),
    *("trackio_static_space_id", "do_eval", "prediction_loss_only"),
    *("eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics"),
    *("batch_eval_metrics", "save_on_each_node"),
    *("hub_always_push", "resume_from_checkpoint"),
    *("restore_callback_states_from_checkpoint", "accelerator_config", "dataloader_drop_last"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
    *("dataloader_multiprocessing_context", "dataloader_in_order", "label_names", "length_column_name"),
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend"),
    *("ddp_timeout", "fsdp_config", "skip_memory_metrics", "do_train", "local_rank"),
)

# The rest of TrainingArguments.
REST: tuple[Field, ...] = (
    *(Field(name, "T", "no", note, "only", fine, remedy) for name, note, fine, remedy in _REST_ONLY),
    *(Field(name, "T", "no", "it has no meaning here", "noted", (None, False)) for name in _REST_NOTED),
    *(Field(name, "T", "no", "", "idle") for name in _REST_IDLE),
)

FIELDS: dict[str, Field] = {field.name: field for table in (*TABLES.values(), REST) for field in table}

# Fields that TRL and transformers no longer have, each with what to write.
FORMER: dict[str, str] = {
    "max_prompt_length": "prompts are never cut; vllm_max_model_length bounds prompt and completion together",
    "evaluation_strategy": "write eval_strategy",
    "warmup_ratio": "write warmup_steps, which below 1 is a share of the steps",
    "use_liger_loss": "write use_liger_kernel",
    "wandb_log_unique_prompts": "write log_unique_prompts",
    "vllm_guided_decoding_regex": "write vllm_structured_outputs_regex",
    "vllm_device": "servers and learner share out the devices by themselves; leave it out",
    "vllm_max_model_len": "write vllm_max_model_length",
    "logging_dir": "trackers write into the run directory; leave it out",
    "overwrite_output_dir": "give each run its own output_dir, or resume it; leave it out",
    "no_cuda": "write use_cpu",
    "push_to_hub_token": "write hub_token",
    "per_gpu_train_batch_size": "write per_device_train_batch_size",
    "save_safetensors": "checkpoints are safetensors; leave it out",
    "group_by_length": "rows are packed by length anyway; leave it out",
    "half_precision_backend": "write bf16 or fp16",
    "include_tokens_per_second": "metrics.jsonl has train_tokens_per_s; leave it out",
    "vllm_dtype": "write model_init_kwargs={'dtype': ...}",
    "vllm_enable_prefix_caching": "it is on; leave it out",
    "max_new_tokens": "write max_completion_length",
    "response_length": "write max_completion_length",
    "rloo_k": "write num_generations",
    "kl_coef": "write beta",
    "cliprange": "write epsilon",
    "num_ppo_epochs": "write num_iterations",
    "num_mini_batches": "a step is one batch; write per_device_train_batch_size, gradient_accumulation_steps",
    "total_episodes": "write num_train_epochs, or max_steps",
    "normalize_reward": "write normalize_advantages",
    "missing_eos_penalty": "write a reward function for it, or mask_truncated_completions=True",
    "stop_token": "write generation_kwargs={'stop': [...]}",
    "reward_model_path": "give the model to the trainer, as reward_funcs",
    "sft_model_path": "give the model to the trainer, as model",
}

# Names that are near no field of what they mean, or near another one.
MISTAKEN: dict[str, str] = {
    "batch_size": "write per_device_train_batch_size",
    "per_device_batch_size": "write per_device_train_batch_size",
    "lr": "write learning_rate",
    "epochs": "write num_train_epochs",
    "group_size": "write num_generations",
    "max_length": "write max_completion_length; vllm_max_model_length bounds prompt and completion together",
    "max_seq_length": "write max_completion_length; vllm_max_model_length bounds prompt and completion together",
    "max_tokens": "write max_completion_length",
    "tokenizer": "give it to the trainer, as processing_class",
    "model_name_or_path": "give it to the trainer, as model",
    "use_peft": "give the trainer a peft_config",
    "lora_r": "give the trainer peft_config=LoraConfig(r=...)",
    "lora_alpha": "give the trainer peft_config=LoraConfig(lora_alpha=...)",
    "reward_funcs": "give them to the trainer",
    "tools": "give them to the trainer",
}


def settings_of(name: str) -> list[tuple[str, str]]:
    """Return section and key of the settings that a field becomes."""
    return [(found[1], found[2]) for found in re.finditer(r"`([a-z_]+)\.([a-z_]+)`", FIELDS[name].here)]
