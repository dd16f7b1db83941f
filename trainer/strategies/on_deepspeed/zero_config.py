"""DeepSpeed's configuration. It turns off everything that would change the mathematics."""

from typing import Optional

from trainer.distributed.mesh_sizes import MeshSizes
from trainer.strategies.on_deepspeed.autotp_layers import tensor_parallel_config
from trainer.strategies.options import StrategyOptions, bucket_elements


def engine_config(
    options: StrategyOptions,
    stage: int,
    sizes: MeshSizes,
    *,
    on_cpu: bool,
    num_trained: int,
    plan: Optional[dict[str, str]] = None,
) -> dict:
    """The configuration of an engine that trains `num_trained` parameters. A frozen model has none, and no optimizer.

    `plan` is the tensor-parallel plan, or None without tp.
    """
    zero = {
        "stage": stage,
        "use_multi_rank_bucket_allreduce": False,
    }  # one reduce to each owner sends half of an all-reduce
    zero["reduce_bucket_size"] = bucket_elements(num_trained)
    if sizes.dp_replicate > 1:
        zero["zero_hpz_partition_size"] = sizes.dp_shard * sizes.sp
    if options.adam_offload and num_trained:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": not on_cpu}
    config = {
        # the loader makes the batch; DeepSpeed sees single micro-batches, and the strategy says when a step ends
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # torch AdamW on both backends, offloaded or not
        # ZeRO 0 does not clip: its gradients are whole on every rank, and optimizer_step clips them
        "gradient_clipping": options.max_norm if stage and not options.exact else 0.0,
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": options.reduce_dtype,
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # it waits for the GPU twice in every micro-batch
    }
    if options.exact:
        config["zero_allow_untested_optimizer"] = True  # it is torch's AdamW with a step of its own
        zero["memory_efficient_linear"] = False  # ZeRO 3's own linear layer multiplies in another order than torch's
    if plan:
        config["tensor_parallel"] = tensor_parallel_config(plan, sizes.tp)
    if options.param_dtype == "bf16" and stage:  # at stage 0 the engine has no masters; `zero_0` adds them
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
    elif options.param_dtype == "fp16":
        scaling = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}
        config["fp16"] = {"enabled": True, **scaling}
    return config
