"""Names from other trainers, and what to use here: for users of Ray Train, torchrun, Lightning, Accelerate, Keras."""

from __future__ import annotations

from collections.abc import Mapping

_STEPS = "epoch_samples= (steps times batch_size) with epochs=1, and checkpoint_steps="
_OPTIMIZER = "the function of optimizer=: lambda parameters: torch.optim.AdamW(parameters, lr=0.001)"
_BATCH = "batch_size=, the rows of a step over all workers"
_BEST = "best= for the checkpoint to keep, early_stop= to end: the name of a metric, with a minus where less is better"
_STOP = 'early_stop=tw.EarlyStop("accuracy", patience=3)'
_ACCUMULATION = "accumulation=: batch_size= stays the batch of a whole step, which it divides"
_STORAGE = "storage= (a folder or a URI) and name="
_RESUME = "no option is needed: the same command resumes a run; resume=True does it although the job changed"
_READ_AHEAD = "no option is needed: how far data is read ahead is planned"


def advice_of(name: str) -> str:
    """Return what to do instead of another trainer's option; empty for a name that none has."""
    advice = PEER_OPTIONS.get(name, "")
    return advice if advice.startswith("no option") or not advice else f"use {advice}"


PEER_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("num_workers", "num_processes", "nproc_per_node", "world_size", "num_gpus", "gpus"), "workers="),
    **dict.fromkeys(("num_nodes", "nnodes"), "workers=, over all nodes"),
    "use_gpu": 'accelerator="gpu"; by default GPUs are used where there are any',
    **dict.fromkeys(("max_epochs", "num_epochs", "num_train_epochs", "n_epochs"), "epochs="),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps", "num_train_steps", "max_train_steps"), _STEPS),
    **dict.fromkeys(("steps_per_epoch", "limit_train_batches"), "epoch_samples= (steps times batch_size)"),
    **dict.fromkeys(("learning_rate", "lr", "weight_decay", "momentum", "betas"), _OPTIMIZER),
    **dict.fromkeys(("lr_scheduler", "scheduler", "lr_scheduler_type", "warmup_steps", "warmup_ratio"), "schedule="),
    **dict.fromkeys(("fsdp", "deepspeed", "zero_stage"), 'strategy="sharded"'),
    "ddp": 'strategy="data_parallel"',
    **dict.fromkeys(("tensor_parallel", "tp_size", "tensor_model_parallel_size"), 'plan="tp=2"'),
    **dict.fromkeys(("pipeline_parallel", "pp_size", "pipeline_model_parallel_size"), 'plan="pp=2"'),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_batch_size", "train_batch_size"), _BATCH),
    **dict.fromkeys(("accumulate_grad_batches", "gradient_accumulation_steps", "grad_accum_steps"), _ACCUMULATION),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm", "clip_grad_norm", "gradient_clipping"), "clip_norm="),
    **dict.fromkeys(("fp16", "bf16", "amp", "mixed_precision"), 'precision="bf16", or "fp16"'),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), 'plan="recompute=full"'),
    **dict.fromkeys(("torch_compile", "compile_model"), "compile="),
    "sync_batchnorm": 'batch_norm="sync"',
    **dict.fromkeys(("monitor", "metric_for_best_model", "save_best_only"), _BEST),
    **dict.fromkeys(("patience", "early_stopping", "early_stopping_patience"), _STOP),
    **dict.fromkeys(("output_dir", "default_root_dir", "save_dir", "log_dir", "storage_path"), _STORAGE),
    **dict.fromkeys(("save_steps", "save_every", "every_n_train_steps", "checkpoint_interval"), "checkpoint_steps="),
    **dict.fromkeys(("save_total_limit", "save_top_k", "num_to_keep"), "keep="),
    **dict.fromkeys(
        ("eval_steps", "eval_interval"),
        "epoch_samples= (steps between evaluations times batch_size): the run evaluates after each such epoch",
    ),
    "check_val_every_n_epoch": "evaluate_epochs=",
    **dict.fromkeys(("resume_from_checkpoint", "ckpt_path", "auto_resume"), _RESUME),
    **dict.fromkeys(("max_restarts", "max_failures"), "failures="),
    **dict.fromkeys(("logger", "report_to", "log_with"), "trackers="),
    **dict.fromkeys(("train_dataset", "train_dataloader", "train_dataloaders", "train_data", "dataset"), "train="),
    **dict.fromkeys(("eval_dataset", "val_dataset", "val_dataloaders", "validation_data", "val_data"), "evaluate="),
    **dict.fromkeys(("prefetch_factor", "dataloader_num_workers", "pin_memory", "prefetch"), _READ_AHEAD),
    **dict.fromkeys(
        ("backend", "process_group_backend"),
        "no option is needed: it is gloo on CPUs and NCCL on GPUs; for TensorFlow communication=",
    ),
    "ema": "weight_average=",
    "seed_everything": "seed=",
}
"""What to use here, by the option's name elsewhere; dashes are underscores."""

PEER_STRATEGIES: Mapping[str, str] = {
    **dict.fromkeys(("ddp", "dp", "horovod", "distributed_data_parallel"), "data_parallel"),
    **dict.fromkeys(("fsdp", "fsdp2", "fully_shard", "deepspeed", "zero", "zero3"), "sharded"),
    **dict.fromkeys(("tp", "megatron"), "tensor_parallel"),
    **dict.fromkeys(("pp", "gpipe", "pipedream"), "pipeline"),
    **dict.fromkeys(("ps", "async", "parameter_servers"), "parameter_server"),
    **dict.fromkeys(("diloco", "post_local_sgd"), "local_sgd"),
    "mirrored": "tf_mirrored",
    "multi_worker_mirrored": "tf_multi_worker_mirrored",
    "central_storage": "tf_central_storage",
    "tpu": "tf_tpu",
}
"""Strategies here, by their names elsewhere."""

PEER_COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("train", "run", "launch", "start", "resume"), "fit"),
    **dict.fromkeys(("list", "ls", "ps"), "runs"),
    **dict.fromkeys(("status", "info", "describe", "inspect"), "show"),
    **dict.fromkeys(("delete", "remove"), "rm"),
    **dict.fromkeys(("cancel", "kill"), "stop"),
    **dict.fromkeys(("log", "tail"), "logs"),
    **dict.fromkeys(("test", "validate"), "evaluate"),
    **dict.fromkeys(("monitor", "top"), "watch"),
}
"""Commands here, by their names elsewhere."""
