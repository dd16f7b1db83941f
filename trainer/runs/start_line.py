"""The first line of a run, and the dtype that this machine multiplies fast. Both are known before torch is imported."""

import ctypes
import functools
import importlib.metadata
import json
import math
import os
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from trainer.checkpoints.checkpoint_store import LATEST, list_checkpoints
from trainer.comma_separated import names_in
from trainer.distributed.mesh_sizes import MICRO_BATCH_SIZE
from trainer.entry import end_in_a_line_at_sigterm, quiet_libraries
from trainer.errors import UserError
from trainer.flags.common_flags import CheckpointArguments
from trainer.flags.groups import options_of_flags, with_flags
from trainer.flags.names.repeats import ANNOUNCED
from trainer.flags.rules import COMMANDS, refuse
from trainer.limits import read_model_config, read_text
from trainer.metrics import counted, shown_number
from trainer.model_folders.adapter_folder import cached_folder
from trainer.model_folders.folder_names import INDEX, SINGLE
from trainer.planning.versions import certified_line, installed, read_cards
from trainer.strategies import offloads_weights, refuse_options
from trainer.strategies.options import StrategyOptions
from trainer.terminal import fitted

BF16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}  # of x86, of x86, of ARM, as Linux names them
NO_BF16 = "this CPU has no bf16 instructions"
NO_BF16_ON_GPU = "this GPU has no bf16 instructions"
FIRST_WITH_BF16 = 8  # compute capability: Ampere
GB = 1e9


def resolve_dtype(wanted: str, device: str) -> str:
    """--param_dtype, where auto is bf16 if the device multiplies it fast, else fp32.

    Without bf16 instructions, a step in bf16 took more than 20 times as long as one in fp32.
    """
    return ("bf16" if multiplies_bf16(device) else "fp32") if wanted == "auto" else wanted


def multiplies_bf16(device: str, cpu_facts: str = "/proc/cpuinfo") -> bool:
    """Whether a run on `--device` has fast products in bf16. GPUs that NVML says nothing about have them."""
    if runs_on_gpu(device):
        return max((gpu.capability for gpu in gpus()), default=FIRST_WITH_BF16) >= FIRST_WITH_BF16
    try:
        with open(cpu_facts) as lines:
            return any(
                line.partition(":")[0].strip() in ("flags", "Features") and BF16_INSTRUCTIONS & set(line.split())
                for line in lines
            )
    except OSError:  # not Linux
        return True


def runs_on_gpu(device: str) -> bool:
    """Whether a run on `--device` is on GPUs, as far as this is seen without torch."""
    return device == "cuda" or (device == "auto" and has_gpu())


class GPU(NamedTuple):
    """What NVML tells of a GPU."""

    capability: int  # the major number
    memory: int  # bytes


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


@functools.cache
def gpus() -> tuple[GPU, ...]:
    """The GPUs of this machine, from NVML, which needs no torch and starts no CUDA. Empty if it is silent."""
    try:
        nvml, count, found = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint(), []
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return ()
        for number in range(count.value):
            handle, memory, major, minor = ctypes.c_void_p(), _Memory(), ctypes.c_int(), ctypes.c_int()
            capability = ctypes.byref(major), ctypes.byref(minor)
            if (
                nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle))
                or nvml.nvmlDeviceGetCudaComputeCapability(handle, *capability)
                or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
            ):
                return ()
            found.append(GPU(major.value, memory.total))
    except (OSError, AttributeError):  # no such library, or no such function in it
        return ()
    return tuple(found)


def num_gpus() -> int:
    """The GPUs that torch will see: those of CUDA_VISIBLE_DEVICES, which ends at the first that is none."""
    if lacks_gpu():
        return 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(gpus()) if named is None else min(len(gpus()), len(names_in(named.partition("-1")[0])))


def has_gpu() -> bool:
    """Whether torch will find a GPU, as far as this is seen without torch."""
    return os.path.exists("/dev/nvidiactl") and not lacks_gpu()


def lacks_gpu() -> str:
    """Why torch will find no GPU, where this is sure without torch. Empty: it may find one."""
    version = importlib.metadata.version("torch")
    if "+cpu" in version:
        return f"torch {version} is a build without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs"
    try:
        ctypes.CDLL("libcuda.so.1" if "+rocm" not in version else None)
    except OSError:
        return "this machine has no NVIDIA driver (libcuda.so.1)"
    return ""


def check_device(device: str) -> None:
    """Raise UserError for --device cuda if torch will surely find no GPU."""
    if device == "cuda" and (reason := lacks_gpu()):
        raise UserError("--device", f"cuda, but {reason}", "cpu, auto")


def begin(command: str, args, trains: bool = True) -> None:
    """Say what will run, unless the command `trainer` has, then import torch and transformers, which takes seconds."""
    check_launcher()
    if int(os.environ.get("RANK", 0)) == 0 and ANNOUNCED not in os.environ:
        announce(command, args, trains)
    # one of several ranks would leave the others in a collective
    if trains and "TORCHELASTIC_RUN_ID" not in os.environ and int(os.environ.get("WORLD_SIZE", 1)) == 1:
        end_in_a_line_at_sigterm()
    quiet_libraries()


def check_launcher() -> None:
    """Raise UserError if the variables of torchrun are there in part: other tools and scripts of clusters leave some."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found, missing = [n for n in names if n in os.environ], [n for n in names if n not in os.environ]
    if missing and found and found[0] in ("RANK", "WORLD_SIZE"):
        cure = f"torchrun or trainer COMMAND --nproc N, which set all; or unset {found[0]}"
        raise UserError(found[0], f"is set without {', '.join(missing)}", cure)


def check_ranks_given() -> None:
    """Raise UserError for numbers of ranks that no launcher gives: a rank beyond the last one would wait for ever."""
    given = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE") if name in os.environ}
    for name, value in given.items():
        if not value.isdecimal() or (name != "RANK" and int(value) < 1):
            raise UserError(name, repr(value), f"a number, as torchrun sets it; or unset {name}")
    if {"RANK", "WORLD_SIZE"} <= given.keys() and int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        raise UserError("RANK", f"{given['RANK']} with WORLD_SIZE {given['WORLD_SIZE']}", "a number below WORLD_SIZE")


def announce(command: str, args, trains: bool) -> None:
    """Print what will run, and the versions of the libraries."""
    versions = certified_line(installed(), read_cards())[1]
    num_parameters = count_parameters(folder_here(args.model.pretrain))
    line, warning = start_line(command, args, num_parameters, trains), memory_warning(args, num_parameters, trains)
    print(fitted(f"{line}{warning}\nimporting libraries ({versions})"), flush=True)


def start_line(command: str, args, num_parameters: int | None, trains: bool = True) -> str:
    """What runs where, in one line: model, size, ranks, layout, dtype, folder. `args` are the checked flags."""
    model, layout, batch, dtype = args.model.pretrain, args.layout, args.batch, args.model.param_dtype
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    if args.lora.lora_adapter:
        model += f" with {args.lora.lora_adapter}"
    size = f" with {shown_number(num_parameters)} parameters" if num_parameters else ""
    axes = {"dp_replicate": layout.dp_replicate_size, "sp": layout.ring_attn_size, "tp": layout.tensor_parallel_size}
    axes["dp"] = num_ranks // math.prod(axes.values())
    shape = "".join(f" {name} {axes[name]}" for name in ("dp_replicate", "dp", "sp", "tp") if axes[name] > 1)
    where = f"{counted(num_ranks, 'rank')} of {layout.backend}{shape}"
    if layout.layout == "auto":
        where = f"{counted(num_ranks, 'rank')}, --layout auto"
    if dtype != "fp16" and not multiplies_bf16(layout.device):
        on_gpu = runs_on_gpu(layout.device)
        faster = "fp16" * takes_fp16(args) if on_gpu else "fp32" * (dtype == "bf16")
        faster = f"; {faster} is faster" if faster else ""
        dtype += f" ({NO_BF16_ON_GPU if on_gpu else NO_BF16}{faster})"
    if trains:
        dtype += f", learning rate {args.optimizer.learning_rate:g}"
        by_tokens = batch.max_tokens_per_micro_batch or batch.packing_samples or layout.exact
        micro = batch.micro_train_batch_size or MICRO_BATCH_SIZE
        at_once = micro * axes["dp_replicate"] * axes["dp"]
        if micro < MICRO_BATCH_SIZE and at_once < batch.train_batch_size and not by_tokens:
            samples = f"{micro} of the {counted(batch.train_batch_size, 'sample')} of a step"
            dtype += f", {samples} in a forward pass of a rank"
    folder = args.output.output_dir
    target = f"{folder or 'a new folder in runs/'}{going_on(args.checkpoint, folder) if trains else ''}"
    return f"{command}: {model}{size}, {where}, {dtype}, to {target}"


def going_on(flags: CheckpointArguments, output_dir: str | None) -> str:
    """Where a run that resumes goes on. Its checkpoint is read later, and may be found damaged."""
    if flags.load_checkpoint is None:
        return ""
    if flags.load_checkpoint != LATEST:
        return f", going on from {flags.load_checkpoint}"
    found = list_checkpoints(os.path.join(output_dir or "", "checkpoints"))
    return f", going on from {os.path.basename(found[-1])}" if found else ""


def takes_fp16(args) -> bool:
    """Whether these flags, which have been checked, also go with --param_dtype fp16."""
    other, command = with_flags(args, param_dtype="fp16"), next(c for c, kind in COMMANDS.items() if kind is type(args))
    try:
        refuse(command, other)
        refuse_options(args.layout.backend, options_of_flags(StrategyOptions, other))
    except UserError:
        return False
    return True


def memory_warning(args, num_parameters: int | None, trains: bool) -> str:
    """A line if this machine has less memory than the weights alone need, with their gradients if all are trained.

    Weights that train are there in fp32, as are their gradients. More is needed for AdamW and for activations.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))
    nodes = int(os.environ.get("WORLD_SIZE", 1)) // local or 1
    what, each, on_gpu = memory_of_weights(args, trains)
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if on_gpu:
        room = sum(sorted((gpu.memory for gpu in gpus()), reverse=True)[:local])
    needed = each * (num_parameters or 0) / nodes
    if not room or needed <= room:
        return ""
    where = f"its {counted(local, 'rank')} on GPUs can have" if on_gpu else "it has"
    found = f"{what} alone need {shown_gb(needed)} on this machine, and {where} {shown_gb(room)}"
    return f"\nwarning: {found}: take more ranks or machines, LoRA, or a smaller model"


def memory_of_weights(args, trains: bool) -> tuple[str, float, bool]:
    """(what a run holds, bytes of each parameter, whether this is on GPUs) for the memory that is full first."""
    lora, layout = args.lora, args.layout
    on_gpu = runs_on_gpu(layout.device)
    offload = on_gpu and trains and layout.adam_offload
    frozen = 0.5 if lora.load_in_4bit else 4 if args.model.param_dtype == "fp32" else 2
    stays = on_gpu and not (offload and offloads_weights(layout.backend))
    if not trains or lora.lora_rank or lora.load_in_4bit or (offload and stays):
        return "weights", frozen, stays
    return "weights and gradients", 8, stays


def shown_gb(size: float) -> str:
    """Bytes as "56 GB", or "1.34 TB" from 1000 GB on."""
    return f"{size / GB:.3g} GB" if size < 999.5 * GB else f"{size / GB / 1000:,.4g} TB"


def folder_here(name: str) -> Path:
    """The folder of a model: `name` itself, or its snapshot in the cache of Hugging Face. No network is asked."""
    return Path(cached_folder(name, "config.json") or name)


def count_parameters(folder: Path) -> int | None:
    """The parameters in the safetensors files of a model folder, from their headers. None if this is not known."""
    try:
        config = read_model_config(str(folder))
        files = {SINGLE}
        if (folder / INDEX).exists():
            files = set(json.loads(read_text(str(folder / INDEX)))["weight_map"].values())
        if not all((folder / file).is_file() for file in files):
            return None
        opened = [safe_open(folder / file, framework="np") for file in files]
        sizes = [math.prod(file.get_slice(name).get_shape()) for file in opened for name in file.keys()]  # noqa: SIM118
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError, UserError):
        return None  # not here, or broken: the run will say so
    return None if "quantization_config" in config else sum(sizes)
