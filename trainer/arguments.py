"""Command-line arguments: dataclasses by concern, one flat set of flags, a YAML `--config`, and help grouped by concern.

Nothing here imports torch, so that `--help` and a wrong flag answer at once.
"""

import dataclasses
import difflib
import re
import typing
from dataclasses import dataclass
from typing import Literal, Optional

from trainer.errors import UserError


def arg(default, help: str, *aliases: str, type=None, **kwargs):
    """A dataclass field that carries its help text, aliases (without dashes) and further `add_argument` keywords."""
    metadata = {"help": help, "aliases": aliases, "type": type, "kwargs": kwargs}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class ModelArguments:
    """Model"""

    pretrain: Optional[str] = arg(None, "model folder or hub name; with neither this nor --dataset, the embedded demo")
    param_dtype: Literal["bf16", "fp16", "fp32"] = arg("bf16", "compute dtype; masters, Adam and reduction stay fp32")
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = arg("sdpa", "attention kernel")
    gradient_checkpointing: bool = arg(False, "recompute each decoder layer in the backward pass to save memory")
    selective_checkpointing: bool = arg(
        False, "as --gradient_checkpointing, but keep the results of attention and of matrix products"
    )
    activation_offload: bool = arg(
        False, "with --gradient_checkpointing on CUDA: keep each decoder layer's input in host memory"
    )
    compile: bool = arg(False, "torch.compile of each decoder layer: quicker steps after a slow first one")
    trust_remote_code: bool = arg(False, "run Python code that comes with the model or tokenizer")


@dataclass
class LoraArguments:
    """LoRA"""

    lora_rank: Optional[int] = arg(
        None,
        "train low-rank matrices of this rank beside frozen layers; save_path gets the adapter",
        type="PositiveInt",
    )
    lora_alpha: Optional[int] = arg(
        None, "their output is scaled by this over --lora_rank (default: twice the rank)", type="PositiveInt"
    )
    lora_dropout: float = arg(
        0.0, "dropout before them; above 0, layouts differ by its random numbers", type="ClosedUnitInterval"
    )
    target_modules: Optional[str] = arg(
        None, "comma-separated names of the layers, such as q_proj,v_proj (default: all linear ones but the head)"
    )
    load_in_4bit: bool = arg(False, "QLoRA: keep the frozen layers in 4 bits (bitsandbytes)")


@dataclass
class DataArguments:
    """Data"""

    dataset: Optional[str] = arg(None, "training data, or prompts: comma-separated files, folders or hub names")
    dataset_split: str = arg("train", "split of --dataset")
    dataset_probs: Optional[str] = arg(
        None, "mixing probabilities, one per set of --dataset; the mixture ends when one set is used up"
    )
    eval_dataset: Optional[str] = arg(None, "evaluation data, like --dataset; train_ppo answers it greedily")
    eval_split: str = arg("train", "split of --eval_dataset")
    max_samples: Optional[int] = arg(None, "at most this many rows of each set", type="PositiveInt")
    dataset_num_proc: int = arg(1, "processes that tokenize, at the first sight of a set", type="PositiveInt")
    input_template: Optional[str] = arg(None, "text around the prompt, with one {} for it")
    apply_chat_template: bool = arg(False, "render rows with the tokenizer's chat template")
    tokenizer_chat_template: Optional[str] = arg(None, "chat template to use instead: Jinja text or a file")


@dataclass
class LengthArguments:
    """Length"""

    max_len: int = arg(2048, "samples are cut to this many tokens (from the right)", type="PositiveInt")


@dataclass
class SFTDataArguments:
    """What to learn"""

    input_key: Optional[str] = arg(None, "column of the prompt, of the messages or (--pretrain_mode) of the text")
    output_key: Optional[str] = arg(None, "column of the answer")
    multiturn: bool = arg(False, "loss on every assistant turn, not only on the last")
    pretrain_mode: bool = arg(False, "plain text, loss on every token")


@dataclass
class BatchArguments:
    """Batches"""

    train_batch_size: int = arg(128, "samples per optimizer step, over all ranks", type="PositiveInt")
    micro_train_batch_size: int = arg(8, "samples per forward pass on one rank", type="PositiveInt")
    max_tokens_per_micro_batch: Optional[int] = arg(
        None, "cut micro-batches by tokens (padding included) instead of by samples", type="PositiveInt"
    )
    packing_samples: bool = arg(
        False, "no padding: best-fit packing, up to micro_train_batch_size * max_len tokens a micro-batch"
    )
    max_epochs: int = arg(1, "passes over the data; train_ppo: over each rollout", type="PositiveInt")
    max_steps: Optional[int] = arg(None, "exactly this many optimizer steps, whatever --max_epochs", type="PositiveInt")
    seed: int = arg(42, "seed of the sample order and of every random generator", type="NonNegativeInt")
    no_shuffle: bool = arg(False, "keep the order of the data")


@dataclass
class OptimizerArguments:
    """Optimization"""

    learning_rate: float = arg(5e-6, "peak learning rate", type="NonNegativeFloat")
    lr_scheduler: str = arg("cosine_with_min_lr", "a scheduler name of transformers.get_scheduler")
    lr_warmup_ratio: float = arg(0.03, "share of all steps that warms up", type="ClosedUnitInterval")
    min_lr_ratio: float = arg(
        0.1, "lowest rate of *_with_min_lr schedulers, relative to the peak", type="ClosedUnitInterval"
    )
    optim: Literal["adamw", "adamw_8bit", "muon", "adafactor"] = arg("adamw", "the others: fsdp2, or ZeRO 0 without tp")
    adam_betas: list[float] = arg([0.9, 0.95], "AdamW betas", type=float, nargs=2)
    weight_decay: float = arg(0.0, "decoupled weight decay (not on norms and biases)", type="NonNegativeFloat")
    max_norm: float = arg(1.0, "clip gradients to this global norm; 0 turns it off", type="NonNegativeFloat")
    max_skipped_steps: int = arg(10, "end after this many non-finite steps in a row", type="PositiveInt")


@dataclass
class LayoutArguments:
    """Backend and layout"""

    backend: Literal["deepspeed", "fsdp2"] = arg("fsdp2", "which strategy runs the distributed training")
    zero_stage: Optional[int] = arg(
        None, "deepspeed: 0-3, default 2; fsdp2: 3 (default) or 2 (weights stay gathered)", type="NonNegativeInt"
    )
    adam_offload: bool = arg(False, "keep masters and optimizer states in host memory")
    tensor_parallel_size: int = arg(
        1, "ranks that split each layer", "fsdp_tensor_parallel_size", "ds_tensor_parallel_size", type="PositiveInt"
    )
    use_hf_tp_plan: bool = arg(False, "tensor-parallel plan of the model class instead of ours")
    print_tp_plan: bool = arg(False, "print the tensor-parallel plan, completed, before it is applied")
    sequence_parallel: bool = arg(False, "shard norms and residuals over the tensor-parallel ranks")
    ring_attn_size: int = arg(1, "ranks that split each sequence", type="PositiveInt")
    sp_mode: Literal["ring", "ulysses"] = arg(
        "ring", "how those ranks attend: keys and values travel, or heads are exchanged for tokens"
    )
    dp_replicate_size: int = arg(1, "groups that each hold a full set of shards (hybrid sharding)", type="PositiveInt")
    reduce_once: bool = arg(
        False, "reduce gradients after the last micro-batch of a step alone; until then each rank holds them whole"
    )
    device: Literal["auto", "cpu", "cuda"] = arg("auto", "auto takes CUDA where there is one")
    dist_backend: Literal["auto", "gloo", "nccl"] = arg("auto", "auto: nccl on CUDA, gloo on CPU")
    cpu_matmul: Literal["auto", "mkl", "onednn"] = arg(
        "auto", "fp32 products on CPU; auto: oneDNN on AMD's processors with AVX-512, which MKL does not use"
    )
    check_replicas_every: Optional[int] = arg(
        None, "every N steps, compare bit by bit what ranks should hold alike", type="PositiveInt"
    )
    deterministic: bool = arg(True, "deterministic CUDA kernels (false may be faster)")


@dataclass
class OutputArguments:
    """Output"""

    output_dir: Optional[str] = arg(None, "run folder (default: runs/<command>-<time>)")
    overwrite: bool = arg(False, "write into an --output_dir that holds another run, replacing it")
    save_path: Optional[str] = arg(None, "where the final Hugging Face model goes (default: <output_dir>/model)")
    no_save: bool = arg(False, "do not write the final model")
    eval_steps: Optional[int] = arg(None, "evaluate every N steps as well as at the end", type="PositiveInt")
    logging_steps: int = arg(1, "print every N-th step (metrics.jsonl holds every step)", type="PositiveInt")
    use_wandb: bool = arg(False, "mirror the metrics to Weights & Biases (WANDB_MODE=offline works)")
    wandb_project: str = arg("trainer", "wandb project")
    use_tensorboard: bool = arg(False, "mirror the metrics to TensorBoard, under <output_dir>/tensorboard")
    parity_dump: Optional[str] = arg(None, "folder for the full gradients of step 1 and the final weights")


@dataclass
class CheckpointArguments:
    """Checkpoints"""

    save_steps: Optional[int] = arg(None, "checkpoint every N steps", type="PositiveInt")
    save_interval_minutes: Optional[float] = arg(None, "checkpoint every N minutes as well", type="PositiveFloat")
    max_ckpt_num: Optional[int] = arg(None, "keep at most N checkpoints (and the best)", type="PositiveInt")
    max_ckpt_mem: Optional[float] = arg(None, "keep at most N GB of checkpoints", type="PositiveFloat")
    load_checkpoint: Optional[str] = arg(
        None, "go on from a checkpoint: a path, or without a value the latest in --output_dir, if there is one yet",
        nargs="?", const="latest",
    )  # fmt: skip
    ckpt_format: Literal["native", "portable"] = arg(
        "native", "native: each rank writes its parts; portable: whole tensors. Every layout and backend reads both"
    )
    async_save: bool = arg(False, "go on training while a checkpoint is written (takes host memory for a copy)")
    save_hf_ckpt: bool = arg(False, "put the Hugging Face model into each checkpoint, under hf/")
    best_metric_key: Optional[str] = arg(
        None, "keep the checkpoint with the best value of this evaluation metric as checkpoints/best"
    )
    verify_resume: Optional[int] = arg(
        None,
        "train N steps, checkpoint, train N more, reload, repeat them, compare bitwise and end",
        type="PositiveInt",
    )


@dataclass
class SFTArguments(
    CheckpointArguments,
    OutputArguments,
    LayoutArguments,
    OptimizerArguments,
    BatchArguments,
    SFTDataArguments,
    LengthArguments,
    DataArguments,
    LoraArguments,
    ModelArguments,
):  # a dataclass takes its bases' fields from the last base to the first, which is the order of --help
    """Supervised fine-tuning of a causal language model."""


ALLOWED = {
    "PositiveInt": "an integer above 0",
    "NonNegativeInt": "an integer of 0 or more",
    "PositiveFloat": "a number above 0",
    "NonNegativeFloat": "a number of 0 or more",
    "ClosedUnitInterval": "a number from 0 to 1",
}


def _add_field(group, field: dataclasses.Field, hint) -> None:
    from jsonargparse import typing as restricted

    flags = [f"--{name}" for name in (field.name, *field.metadata["aliases"])]
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    common = {"default": default, "help": field.metadata["help"], **field.metadata["kwargs"]}
    if hint is bool:
        # jsonargparse's ActionYesNo would take --no_save for "save: no" and leave it False
        group.add_argument(*flags, type=bool, nargs="?", const=True, **common)
        return
    kind = field.metadata["type"] or hint
    if kind == Optional[str]:
        kind = str  # else jsonargparse reads the text as YAML, and a template "### Question: {}" is but a comment
    if isinstance(kind, str):
        kind = getattr(restricted, kind)
        kind = Optional[kind] if default is None else kind
    group.add_argument(*flags, type=kind, **common)


def build_parser(arguments_class: type, command: str):
    """The parser of a command: one help group per base dataclass of `arguments_class`, flags without nesting."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog=command,
        usage="%(prog)s [--config FILE] [--flag value ...]",
        description=arguments_class.__doc__,
        exit_on_error=False,
        allow_abbrev=False,
        default_env=False,
    )
    parser.add_argument("--config", action="config", help="YAML file of flags; flags after it override it")
    for base in reversed(arguments_class.__mro__[:-1]):
        own = vars(base).get("__annotations__", {})
        group = parser.add_argument_group(base.__doc__.splitlines()[0]) if own else None
        for field in dataclasses.fields(base):
            if field.name in own:
                _add_field(group, field, typing.get_type_hints(base)[field.name])
    return parser


def parse_arguments(arguments_class: type, command: str, argv: list[str], defaults: Optional[dict] = None):
    """Parse `argv` into an `arguments_class` instance. `defaults` replaces field defaults.

    Raises UserError for anything that cannot be taken, in one line, with the nearest flag where one is misspelt.
    """
    parser = build_parser(arguments_class, command)
    parser.set_defaults(defaults or {})
    fields = {field.name: field for field in dataclasses.fields(arguments_class)}
    try:
        namespace = parser.parse_args(argv)
    except Exception as error:  # jsonargparse raises several types; all of them are about the user's input
        raise _as_user_error(re.sub(r"\s+", " ", str(error)).strip(), fields) from None
    return arguments_class(**{name: _plain(getattr(namespace, name)) for name in fields})


def _plain(value):
    """Numbers of jsonargparse's restricted types as the plain numbers that YAML and JSON know."""
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return value


def _as_user_error(message: str, fields: dict[str, dataclasses.Field]) -> UserError:
    """jsonargparse's message as one line that names the flag, what was found and what is allowed."""
    unknown = re.search(r"unrecognized arguments: ([^\s=]+)|Option '([^']+)' is not accepted", message)
    if unknown:
        name = (unknown.group(1) or unknown.group(2)).lstrip("-")
        nearest = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
        hint = f"did you mean --{nearest[0]}?" if nearest else "see --help"
        where = unknown.group(1) or f"--config: {name}"
        return UserError(where, f"no such flag; {hint}")
    named = re.search(r'Parser key "([^"]+)"(?: element \d+)?: ?(.*)|argument --(\w+)[^:]*: (.*)', message)
    if not named:
        return UserError("arguments", message)
    name, detail = named.group(1) or named.group(3), named.group(2) or named.group(4)
    value = re.search(
        r"(?:Got|Given) value: (.*)$|base 10: (.*?)(?: -|$)|to float: (.*?)(?: -|$)|: (\S+) does not conform", detail
    )
    field = fields.get(name)
    if not (value and field):
        return UserError(f"--{name}", detail)
    kind = field.metadata["type"] or field.type
    allowed = ALLOWED.get(kind) if isinstance(kind, str) else ", ".join(map(str, typing.get_args(kind)))
    return UserError(f"--{name}", next(filter(None, value.groups())), allowed or getattr(kind, "__name__", str(kind)))
