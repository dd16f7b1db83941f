"""The start of a run: the strategy, the machine, the tokenizer and the attention function."""

import functools
import os
from dataclasses import dataclass
from typing import Any, Optional

import torch

from trainer.checkpoints.checkpoint_store import checkpoints_to_load
from trainer.datasets.conversations.templates import prepare_tokenizer
from trainer.datasets.demos.demo import make_demo
from trainer.distributed.collectives import broadcast_object, rank_0_first
from trainer.distributed.mesh_sizes import validate_batch_sizes
from trainer.errors import UserError
from trainer.flags.common_flags import DataArguments
from trainer.flags.groups import options_of_flags
from trainer.flags.parse_flags import DEMO_DIR
from trainer.flags.rules import refuse
from trainer.limits import raise_limits
from trainer.metrics import counted
from trainer.model_folders.model_folder import read_config
from trainer.models.added_tokens import folder_with_tokens
from trainer.models.attention.choice import resolve_attention, setup_attention
from trainer.models.attention.flash import use_flash_attention_3
from trainer.models.attention.varlen import no_search_for_packed_rows
from trainer.models.cpu_matmul import choose_cpu_matmul
from trainer.models.model_loading import check_code, load_tokenizer, resolve_model_folder
from trainer.strategies import get_strategy
from trainer.strategies.options import StrategyOptions
from trainer.training.checkpointing import FOLDER

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # of torch; the user's choice stays


@dataclass
class Setup:
    """What every part of a run shares."""

    strategy: Any
    folder: str  # of the model
    trust_remote_code: bool  # its code may run
    tokenizer: Any
    attention: str  # name of the attention function
    sp_group: Any  # the ranks that split each sequence, or None
    is_packed: bool  # rows hold several documents
    longest: int  # largest number of tokens in a text
    rolls_out: bool  # texts are prompts and generated responses
    resumes: bool  # a checkpoint will replace the weights of the models that train


def set_up(
    command: str, args, *, longest: int, is_demo: bool = False, rolls_out: bool = False, vllm: bool = False
) -> Setup:
    """Start the strategy, make the demo if it is requested, and load the tokenizer. `vllm` will run in this process."""
    no_search_for_packed_rows()
    raise_limits(args.data.limits or ())  # also in a rank, and for commands with checks of their own
    strategy = strategy_of(args)
    is_cpu, is_packed = strategy.device.type == "cpu", args.batch.packing_samples
    refuse(command, args, is_demo=is_demo, on_cpu=is_cpu, on_gpu=not is_cpu)
    if not args.batch.max_tokens_per_micro_batch:
        validate_batch_sizes(args.batch.train_batch_size, args.batch.micro_train_batch_size, strategy.sizes.dp)
    attention = choose_attention(args)
    strategy.setup_distributed()
    if strategy.device.type == "cpu":
        set_up_cpu(strategy, args.layout.cpu_matmul)
    else:
        set_up_gpu(args.layout.adam_offload, vllm)
        may_take_3 = args.model.attn_implementation == "auto" and not args.layout.deterministic
        takes_3 = may_take_3 and use_flash_attention_3(strategy.device)
        strategy.print(kernels_line(takes_3, args.layout.deterministic))
    if is_demo:
        strategy.print(f"neither --pretrain nor --dataset given: training on the embedded demo in {DEMO_DIR}/")
        rank_0_first(lambda: make_demo(DEMO_DIR))
    folder, sp_group = rank_0_first(lambda: resolve_model_folder(args.model.pretrain)), None
    check_code(folder, "--pretrain", args.model.trust_remote_code)
    if args.model.add_tokens:
        tokens = (args.model.add_tokens, args.model.trust_remote_code)
        folder, line = rank_0_first(functools.partial(folder_with_tokens, folder, *tokens), in_caches=True)
        strategy.print(line)
    if is_packed or args.layout.ring_attn_size > 1 or args.layout.exact:
        kind = {"packed": is_packed, "sp_mode": args.layout.sp_mode, "ring_attn_kernel": args.layout.ring_attn_kernel}
        kind |= {"trust_remote_code": args.model.trust_remote_code, "exact": args.layout.exact}
        kind["rolls_out"] = rolls_out
        attention, sp_group = setup_attention(strategy, folder, attention, **kind)
    where = tokenizer_folder(folder, args.lora.lora_adapter)
    tokenizer = prepared_tokenizer(where, args.model.trust_remote_code, args.data)
    return Setup(
        strategy=strategy,
        folder=folder,
        trust_remote_code=args.model.trust_remote_code,
        tokenizer=tokenizer,
        attention=attention,
        sp_group=sp_group,
        is_packed=is_packed,
        longest=longest,
        rolls_out=rolls_out,
        resumes=_resumes(args.output.output_dir, args.checkpoint.load_checkpoint, args.lora.lora_rank),
    )


def prepared_tokenizer(folder: str, trust_remote_code: bool, data: DataArguments):
    """The tokenizer of a folder, as the flags about texts want it. Raises UserError."""
    tokenizer = load_tokenizer(folder, trust_remote_code)
    prepare_tokenizer(tokenizer, data.tokenizer_chat_template, data.template_args, data.read_control_tokens)
    return tokenizer


def tokenizer_folder(folder: str, adapter: Optional[str]) -> str:
    """The folder of the tokenizer: that of the adapter if it has one, with its chat template, or of the model."""
    return adapter if adapter and "tokenizer_config.json" in os.listdir(adapter) else folder


def check_vocabulary(
    setup: Setup, name: str, folder: str, flag: str, allowed: str = "", instead: str = "", tokenizer: Any = None
) -> None:
    """Raise UserError if the tokenizer in `folder`, of the model `name`, has other ids than that of --pretrain.

    `tokenizer` is that of the folder, if it is loaded already. A folder without a tokenizer is compared by the number of
    ids in its config.
    """
    if tokenizer is None and any(file.startswith(("tokenizer", "vocab")) for file in os.listdir(folder)):
        tokenizer = load_tokenizer(folder, setup.trust_remote_code)
    if tokenizer is not None:
        is_same = tokenizer.get_vocab() == setup.tokenizer.get_vocab()
    else:
        configs = [read_config(place, setup.trust_remote_code).get_text_config() for place in (folder, setup.folder)]
        is_same = configs[0].vocab_size == configs[1].vocab_size
    if not is_same:
        raise UserError(flag, f"{name} has another vocabulary than --pretrain", allowed, instead)


def strategy_of(args):
    """The strategy of these flags, before its process group starts. Raises UserError for flags that it cannot do."""
    return get_strategy(args.layout.backend, options_of_flags(StrategyOptions, args))


def choose_attention(args) -> str:
    """The name of the attention function. Without packing and splitting, it is a function of transformers."""
    wanted = "sdpa" if args.model.attn_implementation == "auto" else args.model.attn_implementation
    is_split = args.layout.ring_attn_size > 1
    if not (args.batch.packing_samples or is_split or wanted.startswith("flash")):
        return wanted
    return resolve_attention(wanted, args.batch.packing_samples, args.layout.device)


def _resumes(output_dir: Optional[str], load_checkpoint: Optional[str], lora_rank: Optional[int]) -> bool:
    """Whether a checkpoint will replace all trained weights (broadcast). It has none of those below an adapter."""
    if load_checkpoint is None or lora_rank:
        return False
    return broadcast_object(bool(checkpoints_to_load(os.path.join(output_dir or "", FOLDER), load_checkpoint)))


# --- the machine


def set_up_cpu(strategy, cpu_matmul: str) -> None:
    """Choose the library for matrix products. With several ranks, print a hint if cores stay idle."""
    choose_cpu_matmul(cpu_matmul)
    hint = idle_cores(_num_local_ranks(), torch.get_num_threads(), _num_cores())
    if hint and strategy.sizes.world_size > 1 and not strategy.options.exact:  # which has one thread
        strategy.print(hint)


def set_up_gpu(adam_offload: bool, vllm: bool) -> None:
    """Allocate in expandable segments: batches differ in size, and less memory is lost between their tensors.

    vLLM's sleep mode keeps its weights in a pool of its own, which cannot have such segments. Convolutions in fp32, such
    as those of Mamba, are exact like matrix products: torch would compute them with 10 bits. An Adam in host memory gets
    this rank's share of the cores if torchrun gave it one thread. OMP_NUM_THREADS above 1 sets another number.
    """
    torch.backends.cudnn.allow_tf32 = False
    if not vllm and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if adam_offload and torch.get_num_threads() == 1:
        torch.set_num_threads(max(1, _num_cores() // _num_local_ranks()))


def kernels_line(flash_3: bool, deterministic: bool) -> str:
    """Which kernels a run on GPUs takes, and what determinism costs. A person may not expect either."""
    attention = "FlashAttention 3" if flash_3 else "that of torch"
    if not deterministic:
        return f"attention: {attention}; no two runs have the same bits (--deterministic false)"
    return f"attention: {attention}, deterministic: its backward pass is slower than with --deterministic false"


def idle_cores(num_ranks: int, num_threads: int, num_cores: int) -> Optional[str]:
    """Return a hint if the ranks use a quarter of the cores or less, as with torchrun's one thread per rank.

    A larger share gives no hint, because half of the cores may be hyperthreads.
    """
    if num_ranks == 1 or 4 * num_ranks * num_threads > num_cores:
        return None
    used = f"{counted(num_ranks, 'rank')} of {counted(num_threads, 'thread')} on {counted(num_cores, 'core')}"
    return f"{used}: more threads (OMP_NUM_THREADS in the environment) would be quicker"


def _num_local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
