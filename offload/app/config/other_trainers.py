"""Setting names in other trainers, for suggestions after an unknown key.

Sources: transformers TrainingArguments, TRL, LLaMA-Factory, axolotl and DeepSpeed.
"""

from __future__ import annotations

_NAMES: dict[str, str] = {
    "model.path": "model model_name_or_path model_name model_id base_model pretrained_model_name_or_path hub_model_id",
    "model.attention": "attn_implementation flash_attn flash_attention attention_implementation",
    "data.source": "data dataset datasets dataset_name dataset_path dataset_dir data_path data_files train_file "
    "train_data",
    "data.sources": "mix mixture interleave dataset_mixture",
    "data.sources, by the weight of each": "interleave_probs dataset_weights",
    "data.stopping_strategy": "mix_strategy interleave_strategy",
    "data.eval_source": "test_datasets eval_dataset eval_datasets eval_file validation_file",
    "data.columns": "field field_messages text_column text_field dataset_text_field column_mapping",
    "data.format": "dataset_format dataset_type template chat_template",
    "data.tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_path",
    "data.sequence_length": "max_seq_length max_seq_len seq_len seq_length sequence_len cutoff_len max_length "
    "block_size model_max_length context_length",
    "data.packing": "sample_packing pack_sequences",
    "data.group_by_length": "train_sampling_strategy length_grouped_sampling",
    "data.num_workers": "dataset_num_proc dataset_processes preprocessing_num_workers num_proc tokenizer_num_workers",
    "data.train_on_prompt": "train_on_inputs train_on_input completion_only_loss assistant_only_loss",
    "data.eval_share": "eval_fraction val_size val_set_size test_size validation_split eval_split "
    "validation_split_percentage",
    "train.method": "rl rlhf training_method finetuning_stage",
    "train.beta": "dpo_beta pref_beta orpo_alpha orpo_beta rl_beta",
    "train.center_rewards_coefficient": "center_rewards",
    "train.steps": "max_steps num_train_steps max_train_steps num_steps iterations",
    "train.epochs": "num_train_epochs num_epochs n_epochs",
    "train.batch_size": "train_batch_size global_batch_size per_device_eval_batch_size eval_batch_size",
    "train.micro_batch_size": "per_device_train_batch_size per_device_batch_size train_micro_batch_size_per_gpu",
    "train.precision": "bf16 fp16 fp32 mixed_precision dtype torch_dtype tf32 half",
    "train.recompute": "gradient_checkpointing activation_checkpointing use_gradient_checkpointing",
    "train.max_grad_norm": "gradient_clipping clip_grad clip_grad_norm grad_clip gradient_clip_val",
    "train.eval_every": "eval_steps eval_strategy evaluation_strategy eval_interval evals_per_epoch do_eval",
    "train.eval_batches": "max_eval_batches eval_samples max_eval_samples limit_val_batches eval_max_batches",
    "train.early_stopping_min_delta": "early_stopping_threshold min_delta",
    "train.early_stopping_patience": "early_stopping patience",
    "train.log_every": "logging_steps logging_strategy log_interval",
    "optimizer.states int8": "adamw_8bit adamw_bnb_8bit paged_adamw_8bit adamw8bit adam8bit lion_8bit paged_lion_8bit",
    "optimizer.name adamw": "adamw_torch adamw_torch_fused adamw_hf",
    "optimizer.name": "optim optimizer_type optimizer_name",
    "optimizer.lr": "learning_rate max_lr peak_lr base_lr",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2 adam_betas",
    "optimizer.eps": "adam_epsilon adam_eps epsilon",
    "optimizer.weight_decay": "wd",
    "optimizer.freeze": "freeze_modules frozen_layers freeze_trainable_layers frozen_parameters",
    "optimizer.clip_value": "clip_grad_value gradient_clip_value",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler scheduler lr_schedule",
    "optimizer.warmup_steps": "warmup_ratio warmup warmup_iters lr_warmup_steps num_warmup_steps",
    "offload.parameters": "offload_param offload_params offload_parameters cpu_offload device_map",
    "offload.optimizer": "offload_optimizer",
    "offload.nvme_dir": "nvme_path offload_folder offload_dir",
    "offload.device_memory": "max_memory gpu_memory",
    "offload.zero_stage": "stage deepspeed zero_optimization fsdp",
    "train.sequence_parallel": "sequence_parallel_size sp_size sequence_parallel_degree context_parallel_size cp_size "
    "ulysses_sequence_parallel_size ulysses_degree",
    "offload.replicas": "hsdp hybrid_shard ddp dp_replicate mics",
    "offload.replica_states": "zero_hpz_partition_size",
    "offload.link_weights": "zero_quantized_weights",
    "offload.link_gradients": "zero_quantized_gradients powersgd gradient_compression",
    "checkpoint.every": "save_steps save_strategy save_interval saves_per_epoch",
    "checkpoint.keep": "save_total_limit",
    "checkpoint.keep_best": "save_best best_model keep_best_model",
    "checkpoint.export_best": "load_best_model_at_end load_best",
    "checkpoint.resume": "resume_from_checkpoint resume_from auto_resume_from_checkpoints",
    "run.dir": "output_dir out_dir output logging_dir overwrite_output_dir save_dir",
    "run.name": "run_name project_name experiment_name",
    "run.seed": "data_seed random_seed",
    "--gpus": "num_gpus n_gpus nproc_per_node num_processes world_size",
    "train.batch_size, in parts of train.micro_batch_size or train.passes": (
        "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches"
    ),
    "lora.rank": "lora lora_r lora_rank r use_lora use_peft peft finetuning_type",
    "offload.frozen_weights, with lora.rank": "load_in_4bit load_in_8bit qlora",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.target_modules": "lora_target lora_target_modules lora_target_linear",
    "lora.target_parameters": "lora_target_parameters",
    "lora.modules_to_save": "lora_modules_to_save additional_target",
    "lora.trainable_tokens": "trainable_token_indices fix_untrained_tokens",
    "lora.init": "init_lora_weights peft_init_lora_weights",
    "lora.use_rslora": "peft_use_rslora",
    "lora.use_dora": "peft_use_dora",
    "lora.config": "peft_config lora_config",
    "lora.adapter": "adapter_name_or_path adapter_path lora_model_dir",
}  # fmt: skip
EQUIVALENT_SETTINGS = {name: ours for ours, names in _NAMES.items() for name in names.split()}


_RENAMED = {"data.eval_fraction": "data.eval_share"}
"""Keys from earlier versions, still found in configurations and checkpoints."""


def current_name(key: str) -> str:
    """Return the current name for a key."""
    return _RENAMED.get(key.replace("-", "_"), key)


def equivalent_setting(name: str) -> str | None:
    """Return the equivalent here for a setting in another trainer: a key or an option, perhaps with a short remark."""
    return EQUIVALENT_SETTINGS.get(name.lower().replace("-", "_"))
