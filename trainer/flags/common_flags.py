"""The groups of flags that several commands have, and the command `train_sft`."""

from dataclasses import dataclass
from typing import Literal, Optional

from trainer.flags.groups import arg, group, limits_flag, set_names

# of transformers.get_scheduler, without those that need a metric of the run, or the gradients
SCHEDULES = (
    "constant", "constant_with_warmup", "cosine", "cosine_warmup_with_min_lr", "cosine_with_min_lr",
    "cosine_with_restarts", "inverse_sqrt", "linear", "polynomial", "warmup_stable_decay",
)  # fmt: skip


@dataclass
class ModelArguments:
    """Model"""

    pretrain: Optional[str] = arg(
        None, "model folder or hub name, or adapter folder; without this and --dataset, the embedded demo"
    )
    add_tokens: Optional[str] = arg(
        None, "tokens to add to the vocabulary (comma-separated); each gets a row that is the mean of the embedding"
    )
    param_dtype: Literal["auto", "bf16", "fp16", "fp32"] = arg(
        "auto",
        "compute dtype; auto: bf16, or fp32 on a CPU or a GPU without bf16 instructions; "
        "master weights, Adam and reduction stay fp32",
    )
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = arg(
        "auto", "attention kernel; auto: sdpa, or eager for a model that has no sdpa"
    )
    gradient_checkpointing: bool = arg(False, "recompute each decoder layer in the backward pass to save memory")
    selective_checkpointing: bool = arg(
        False, "like --gradient_checkpointing, but keep the results of attention and matrix products"
    )
    activation_offload: bool = arg(
        False, "with --gradient_checkpointing on CUDA: keep each decoder layer's input in host memory"
    )
    compile: bool = arg(False, "torch.compile layers, and decoding by the hf engine: slow at first, then faster")
    fp8: Optional[Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]] = arg(
        None, "multiply in decoder layers in float8, by this recipe of torchao; emulated on a CPU, which is slow"
    )
    trust_remote_code: bool = arg(False, "run Python code that comes with the model or tokenizer")
    print_model: bool = arg(
        False, "print the layers and sizes of the model before training, and which flags it refuses"
    )


@dataclass
class LoraArguments:
    """LoRA"""

    lora_rank: Optional[int] = arg(
        None,
        "train an adapter of low-rank matrices of this rank on frozen layers; save_path gets the adapter",
        type="PositiveInt",
    )
    lora_alpha: Optional[int] = arg(
        None, "scale the adapter's output by this / --lora_rank (default: twice the rank)", type="PositiveInt"
    )
    lora_dropout: float = arg(
        0.0, "dropout before the adapter; above 0, layouts draw different random numbers", type="ClosedUnitInterval"
    )
    target_modules: Optional[str] = arg(
        None, "comma-separated names of the layers, such as q_proj,v_proj (default: all-linear, without the head)"
    )
    use_dora: bool = arg(False, "DoRA: also train the length of each row of an adapted weight")
    use_rslora: bool = arg(False, "rsLoRA: scale by --lora_alpha / square root of --lora_rank")
    lora_experts: bool = arg(False, "also adapt the experts of a mixture, each one with its own matrices")
    lora_adapter: Optional[str] = arg(
        None, "adapter folder to go on training, on the base --pretrain; --pretrain ADAPTER names both"
    )
    merge_adapter: bool = arg(
        False,
        "add the adapter of --pretrain to the weights first, then train these, or with --lora_rank a new adapter on them",
    )
    load_in_4bit: bool = arg(False, "QLoRA: keep the frozen layers in 4 bits (bitsandbytes)")


@dataclass
class DataArguments:
    """Data"""

    dataset: Optional[str] = arg(None, "training data or prompts: comma-separated files, folders or hub names; #500 after one takes 500 rows", type=set_names)  # fmt: skip
    dataset_flags: Optional[str] = arg(None, "JSON list: flags of their own for the sets of --dataset; a list under dataset: in a file of --config gives it")  # fmt: skip
    dataset_split: str = arg("train", "split of --dataset")
    dataset_probs: Optional[str] = arg(
        None,
        "mixing probabilities, comma-separated, one per set in --dataset; the mixture ends when one set is used up",
    )
    eval_dataset: Optional[str] = arg(None, "evaluation data, like --dataset; train_ppo answers it, see --eval_samples", type=set_names)  # fmt: skip
    eval_dataset_flags: Optional[str] = arg(None, "like --dataset_flags, for the sets of --eval_dataset")
    eval_split: str = arg("train", "split of --eval_dataset")
    eval_fraction: Optional[float] = arg(
        None, "take this share of the rows of --dataset, by --seed, for evaluation only", type="OpenUnitInterval"
    )
    max_eval_samples: Optional[int] = arg(
        None, "evaluate on at most this many rows of each set (default: --max_samples)", type="PositiveInt"
    )
    max_samples: Optional[int] = arg(None, "use at most this many rows of each set", type="PositiveInt")
    limits: Optional[list[str]] = limits_flag()
    dataset_num_proc: int = arg(1, "processes that tokenize a set at its first use", type="PositiveInt")
    ignore_columns: Optional[str] = arg(
        None, "columns and keys of messages to leave out, though they would change the text (comma-separated)"
    )
    system: Optional[str] = arg(None, "system text of the conversations that have none")
    input_template: Optional[str] = arg(None, "text around the prompt; one {} stands for the prompt")
    apply_chat_template: bool = arg(False, "render rows with the tokenizer's chat template")
    tokenizer_chat_template: Optional[str] = arg(None, "chat template instead of the tokenizer's: name, file or Jinja")
    template_args: Optional[str] = arg(
        None, 'JSON object of arguments for the chat template, such as {"enable_thinking": false}'
    )
    read_control_tokens: bool = arg(
        False, "control tokens such as <|im_end|> that texts of rows hold stay tokens (default: plain text)"
    )


@dataclass
class LengthArguments:
    """Length"""

    max_len: int = arg(2048, "longer samples are cut at their end to this many tokens", type="PositiveInt")


@dataclass
class EpochArguments:
    """By epoch"""

    evals_per_epoch: Optional[int] = arg(None, "evaluate N times in an epoch, and at the end", type="PositiveInt")
    saves_per_epoch: Optional[int] = arg(None, "checkpoint N times in an epoch", type="PositiveInt")


@dataclass
class SFTDataArguments:
    """What to learn"""

    input_key: Optional[str] = arg(None, "column of the prompt, the messages or (--pretrain_mode) the text")
    output_key: Optional[str] = arg(None, "column of the answer")
    train_on: Optional[Literal["last", "all"]] = arg(
        None, "assistant turns of a conversation that have a loss: the last one (the default), or all"
    )
    multiturn: bool = arg(False, "the same as --train_on all")
    pretrain_mode: bool = arg(False, "train on plain text, with loss on every token")
    allow_no_stop: bool = arg(False, "train though the chat template ends no answer with a stop token")


@dataclass
class StreamingArguments:
    """Streaming"""

    streaming: bool = arg(False, "read the rows of --dataset while training, and never copy them; needs --max_steps")
    streaming_buffer: int = arg(10_000, "with --streaming: shuffle this many rows at a time", type="PositiveInt")


@dataclass
class ExpertArguments:
    """Mixtures of experts"""

    aux_loss_coef: float = arg(
        0.0, "mixture of experts: add this times the load-balancing loss of the batch", type="NonNegativeFloat"
    )


@dataclass
class RouterArguments(ExpertArguments):
    """Mixtures of experts"""

    expert_bias_update_rate: float = arg(
        0.0, "routers with e_score_correction_bias: move it so far after each step", type="NonNegativeFloat"
    )


@dataclass
class VisionArguments:
    """Rows with images"""

    freeze_vision: bool = arg(True, "do not train the vision tower; its projector and the language model train")
    vision_learning_rate: Optional[float] = arg(None, "peak learning rate of a tower that trains", type="PositiveFloat")
    cache_pixels: bool = arg(False, "keep the tensors of each image in a file, to make them only once")
    image_max_pixels: Optional[int] = arg(
        None, "shrink larger images to this many pixels (default: that of the model folder)", type="PositiveInt"
    )
    image_min_pixels: Optional[int] = arg(
        None, "enlarge smaller images to this many pixels (default: that of the model folder)", type="PositiveInt"
    )


@dataclass
class BatchArguments:
    """Batches"""

    train_batch_size: int = arg(128, "samples per optimizer step, over all ranks", type="PositiveInt")
    micro_train_batch_size: Optional[int] = arg(
        None, "samples per forward pass on one rank (default: up to 8 that fit --train_batch_size)", type="PositiveInt"
    )
    max_tokens_per_micro_batch: Optional[int] = arg(
        None, "limit micro-batches by tokens (with padding) instead of by samples", type="PositiveInt"
    )
    packing_samples: bool = arg(
        False, "best-fit packing without padding, up to micro_train_batch_size * max_len tokens per micro-batch"
    )
    max_epochs: int = arg(1, "passes over the data; train_ppo: over each rollout", type="PositiveInt")
    max_steps: Optional[int] = arg(None, "number of optimizer steps (default: from --max_epochs)", type="PositiveInt")
    seed: int = arg(42, "seed of the sample order and of every random generator", type="NonNegativeInt")
    no_shuffle: bool = arg(False, "keep the order of the data")


@dataclass
class OptimizerArguments:
    """Optimization"""

    learning_rate: Optional[float] = arg(
        None,
        "peak learning rate (default: sft, rm and kd 5e-6, with LoRA 2e-4; dpo 5e-7, LoRA 5e-6; RL 1e-6, LoRA 1e-5)",
        type="PositiveFloat",
    )
    lr_scheduler: str = arg("cosine_with_min_lr", "name of a scheduler of transformers.get_scheduler")
    lr_warmup_ratio: float = arg(
        0.03,
        "n warm-up steps, as a share of all steps; they have 1/(n+1), 2/(n+1) ... of the peak",
        type="ClosedUnitInterval",
    )
    warmup_steps: Optional[int] = arg(
        None, "number of warm-up steps (default: from --lr_warmup_ratio)", type="NonNegativeInt"
    )
    min_lr_ratio: float = arg(
        0.1, "lowest learning rate of *_with_min_lr schedulers, as a share of the peak", type="ClosedUnitInterval"
    )
    optim: Literal["adamw", "adamw_8bit", "muon", "adafactor"] = arg("adamw", "others need fsdp2, or ZeRO 0 without tp")
    adam_betas: list[float] = arg([0.9, 0.95], "AdamW betas", type=float, nargs=2)
    adam_eps: float = arg(1e-8, "AdamW epsilon: added to the root of the second moment", type="PositiveFloat")
    weight_decay: float = arg(0.0, "decoupled weight decay (not on norms and biases)", type="NonNegativeFloat")
    max_norm: float = arg(1.0, "clip gradients to this global norm; 0 turns it off", type="NonNegativeFloat")
    max_skipped_steps: int = arg(10, "end the run after this many non-finite steps in a row", type="PositiveInt")


@dataclass
class LayoutArguments:
    """Backend and layout"""

    layout: Literal["flags", "auto"] = arg(
        "flags", "auto: take the first layout that trainer.cli.plan finds for the model and these ranks"
    )
    backend: Literal["deepspeed", "fsdp2"] = arg("fsdp2", "strategy that runs the distributed training")
    zero_stage: Optional[int] = arg(
        None, "deepspeed: 0-3, default 2; fsdp2: 3 (default) or 2 (weights stay gathered)", type="NonNegativeInt"
    )
    adam_offload: bool = arg(False, "keep master weights and optimizer states in host memory")
    tensor_parallel_size: int = arg(
        1, "ranks that split each layer", "fsdp_tensor_parallel_size", "ds_tensor_parallel_size", type="PositiveInt"
    )
    use_hf_tp_plan: bool = arg(False, "use the tensor-parallel plan of the model class, not the trainer's")
    print_tp_plan: bool = arg(False, "print the complete tensor-parallel plan before it is applied")
    sequence_parallel: bool = arg(False, "shard norms and residuals over the tensor-parallel ranks")
    expert_parallel_size: int = arg(1, "fsdp2: ranks that share out the experts of each layer", type="PositiveInt")
    ring_attn_size: int = arg(1, "ranks that split each sequence", type="PositiveInt")
    sp_mode: Literal["ring", "ulysses"] = arg(
        "ring", "attention over those ranks; ring: keys and values travel; ulysses: ranks exchange heads for tokens"
    )
    ring_attn_kernel: Literal["native", "ring_flash_attn"] = arg("native", "the ring's code: ours or the package's")
    dp_replicate_size: int = arg(1, "groups that each hold a full set of shards (hybrid sharding)", type="PositiveInt")
    reduce_once: bool = arg(
        False, "reduce gradients only after the last micro-batch of a step; until then each rank holds full gradients"
    )
    reduce_dtype: Literal["fp32", "bf16"] = arg(
        "fp32", "dtype in which ranks add up their gradients; bf16 sends half the bytes, and rounds"
    )
    device: Literal["auto", "cpu", "cuda"] = arg(
        "auto", "auto: CUDA if there is a GPU, else the CPU; ranks speak over NCCL on CUDA, over gloo on CPU"
    )
    cpu_matmul: Literal["auto", "mkl", "onednn"] = arg(
        "auto", "fp32 matrix products on CPU; auto: oneDNN on AMD with AVX-512 (MKL does not use it there), else MKL"
    )
    heartbeat_timeout: Optional[float] = arg(
        None,
        "end a run that hangs, and print where each rank stands, if no forward pass begins for this many seconds; "
        "allow for the longest rollout, save and pause between two steps",
        type="PositiveFloat",
    )
    check_replicas_every: Optional[int] = arg(
        None, "every N steps, check that replicas on different ranks are bitwise equal", type="PositiveInt"
    )
    exact: bool = arg(False, "the same bits on every layout: samples run one by one, and sums are exact (CPU, fp32)")
    deterministic: bool = arg(True, "on CUDA: kernels that give the same bits in every run (false may be faster)")


@dataclass
class OutputArguments:
    """Output"""

    output_dir: Optional[str] = arg(None, "run folder (default: runs/<command>-<time>)")
    overwrite: bool = arg(False, "replace the run that --output_dir already holds")
    save_path: Optional[str] = arg(None, "folder of the final Hugging Face model (default: <output_dir>/model)")
    no_save: bool = arg(False, "do not write the final model")
    certificate: bool = arg(
        False, "write certificate.json when the run ends: hashes of what it read, did and saved, for verify_run"
    )
    sign_key: Optional[str] = arg(
        None, "sign the certificate with this ed25519 private key (a PEM or OpenSSH file); see docs/certificates.md"
    )
    eval_steps: Optional[int] = arg(None, "evaluate every N steps, and at the end", type="PositiveInt")
    logging_steps: int = arg(1, "print every N-th step (metrics.jsonl holds every step)", type="PositiveInt")
    report_to: Optional[str] = arg(
        None, "also send the metrics to these (comma-separated): wandb, tensorboard, trackio, mlflow, swanlab"
    )
    use_wandb: bool = arg(False, "like --report_to wandb: Weights & Biases (WANDB_MODE=offline works)")
    wandb_project: str = arg("trainer", "project in wandb, trackio, mlflow (experiment) or swanlab")
    run_name: Optional[str] = arg(None, "name of the run there (default: the name of --output_dir)")
    use_tensorboard: bool = arg(False, "like --report_to tensorboard: to <output_dir>/tensorboard")
    push_to_hub: bool = arg(False, "upload the final model to the Hugging Face Hub, with the token of hf auth login")
    hub_model_id: Optional[str] = arg(None, "its repository, OWNER/NAME (default: the name of --output_dir)")
    hub_private_repo: bool = arg(False, "make the repository private, if it is new")
    hub_dry_run: bool = arg(False, "with --push_to_hub: upload nothing, and print what would be uploaded")
    parity_dump: Optional[str] = arg(None, "folder for the full gradients of step 1 and the final weights")


@dataclass
class CheckpointArguments:
    """Checkpoints"""

    save_steps: Optional[int] = arg(None, "checkpoint every N steps", type="PositiveInt")
    save_interval_minutes: Optional[float] = arg(None, "also checkpoint every N minutes", type="PositiveFloat")
    max_ckpt_num: Optional[int] = arg(None, "keep at most N checkpoints (and the best)", type="PositiveInt")
    max_ckpt_mem: Optional[float] = arg(None, "keep at most N GB of checkpoints", type="PositiveFloat")
    load_checkpoint: Optional[str] = arg(
        None, "resume from this checkpoint; without a value: from the latest one in --output_dir, if there is one",
        nargs="?", const="latest",
    )  # fmt: skip
    allow_change: Optional[list[str]] = arg(
        None,
        "with --load_checkpoint: names of flags whose change is allowed although it changes the objective, such as beta; "
        "see docs/checkpoints.md",
        type=str,
        nargs="+",
    )
    ckpt_format: Literal["native", "portable"] = arg(
        "native", "native: each rank writes its parts; portable: whole tensors. Every layout and backend reads both"
    )
    async_save: bool = arg(False, "keep training while a checkpoint is written (needs host memory for a copy)")
    save_only_model: bool = arg(
        False, "checkpoints without the optimizer: a third of the size; no run can resume from them"
    )
    save_hf_ckpt: bool = arg(False, "also save the Hugging Face model in each checkpoint, under hf/")
    best_metric_key: Optional[str] = arg(
        None, "keep the checkpoint with the best value of this evaluation metric as checkpoints/best"
    )
    load_best_model_at_end: bool = arg(
        False, "save the model of the best evaluation, not the last one; by the first metric, or --best_metric_key"
    )
    early_stopping_patience: Optional[int] = arg(
        None, "end the run after N evaluations in a row without a new best, and save the best model", type="PositiveInt"
    )
    verify_resume: Optional[int] = arg(
        None,
        "test a resume: train N steps, checkpoint, train N more, reload, repeat them, compare bitwise, end",
        type="PositiveInt",
    )


@dataclass
class TraceArguments:
    """Finding a fault"""

    parity_trace: Optional[str] = arg(
        None,
        "folder for signatures of every module's output and gradient in step 1; with --exact, of each sample's gradient",
    )
    certify: Optional[int] = arg(
        None, "write the certificate, with K steps replayed by the plain loop", type="PositiveInt"
    )


@dataclass
class FixedDataArguments:
    """The first groups of every command that trains on rows as they are."""

    model: ModelArguments = group(ModelArguments)
    lora: LoraArguments = group(LoraArguments)
    data: DataArguments = group(DataArguments)
    length: LengthArguments = group(LengthArguments)
    epochs: EpochArguments = group(EpochArguments)


@dataclass
class SFTArguments(FixedDataArguments):
    """Supervised fine-tuning of a causal language model."""

    sft: SFTDataArguments = group(SFTDataArguments)
    streaming: StreamingArguments = group(StreamingArguments)
    experts: RouterArguments = group(RouterArguments)
    vision: VisionArguments = group(VisionArguments)
    batch: BatchArguments = group(BatchArguments)
    optimizer: OptimizerArguments = group(OptimizerArguments)
    layout: LayoutArguments = group(LayoutArguments)
    output: OutputArguments = group(OutputArguments)
    checkpoint: CheckpointArguments = group(CheckpointArguments)
    trace: TraceArguments = group(TraceArguments)
