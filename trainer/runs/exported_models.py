"""Checkpoints, models and adapters in another form: the work of the command `export`. Nothing here communicates."""

import importlib.util
import json
import os
import shutil
from typing import Optional

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GgufConfig

from trainer.checkpoints import checkpoint_store as store
from trainer.checkpoints.piece_index import INDEX as PIECES
from trainer.checkpoints.piece_index import PieceIndex
from trainer.checkpoints.run_state import HF_FOLDER, STATE
from trainer.checkpoints.shards import ShardReader, full_shards, write_shards
from trainer.errors import UserError, one_line
from trainer.limits import read_model_config, read_text
from trainer.metrics import counted
from trainer.model_folders.adapter_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trainer.model_folders.folder_names import INDEX, find_weights, is_gguf
from trainer.model_folders.gguf_header import check_gguf, check_size
from trainer.model_folders.model_folder import all_tensors, open_files
from trainer.model_folders.model_writer import (
    EDGES,
    commit_folder,
    fresh_folder,
    in_hub_format,
    save_adapter,
    save_pretrained,
    save_safetensors_shards,
    save_source_config,
)
from trainer.models.model_loading import load_tokenizer, resolve_model_folder
from trainer.runs.output_folders import EXPORTED
from trainer.runs.outputs import card_of_merged, final_values, write_model_card
from trainer.runs.saved_run import SavedRun, build_saved_model, in_one_line, read_saved_run
from trainer.strategies.dtypes import DTYPES
from trainer.training.checkpointing import FOLDER

WEIGHT = "weight/"  # before the names of a model's tensors in a checkpoint
MAX_SHARD_GB = 2
FLAGS = {  # those that mean something, by the kind of SOURCE
    "a checkpoint": {"--portable", "--dtype", "--max_shard_gb"},
    "a portable checkpoint": {"--portable"},
    "an adapter": {"--base", "--dtype", "--max_shard_gb"},
    "a model": {"--dtype", "--max_shard_gb"},
    "a GGUF file": {"--dtype", "--max_shard_gb"},
}


def export(
    source: str,
    target: str,
    *,
    portable: bool = False,
    base: Optional[str] = None,
    dtype_name: Optional[str] = None,
    max_shard_gb: Optional[float] = None,
) -> None:
    """Find out what `source` is, and write it to the folder `target`. Raises UserError; then there is no `target`.

    `output_folders.check_places` has seen that `target` is new.
    """
    source, target = os.path.abspath(source), os.path.abspath(target)
    kind = kind_of(source)
    given = {"--portable": portable, "--base": base, "--dtype": dtype_name, "--max_shard_gb": max_shard_gb is not None}
    written = "a portable checkpoint" if portable and kind == "a checkpoint" else kind
    for flag, value in given.items():
        if value and flag not in FLAGS[written]:
            raise UserError(flag, f"has no meaning for {written}", ", ".join(sorted(FLAGS[written])))
    if max_shard_gb is not None and not 0 < max_shard_gb < float("inf"):
        raise UserError("--max_shard_gb", f"{max_shard_gb:g}", "a number above 0")
    dtype = DTYPES[dtype_name] if dtype_name else None
    max_shard_bytes = int((max_shard_gb or MAX_SHARD_GB) * (1 << 30))
    try:
        with in_one_line(f"SOURCE: {source}", "files as a run or a library writes them"):
            if portable:
                write_portable(source, target)
            elif kind == "a checkpoint":
                write_model_of_checkpoint(source, target, dtype, max_shard_bytes)
            elif kind == "an adapter":
                write_merged_model(source, base, target, dtype, max_shard_bytes)
            elif kind == "a GGUF file":
                write_model_of_gguf(source, target, dtype, max_shard_bytes)
            else:
                rewrite_model(source, target, dtype, max_shard_bytes)
    except OSError as error:
        if error.errno is None:  # what transformers says of a folder
            raise UserError("SOURCE", f"{source} cannot be read: {one_line(error)}") from None
        raise UserError("OUT", f"{error.filename or target}: {error.strerror or error}") from None
    except UserError as error:
        if error.where != "--load_checkpoint":  # the readers of checkpoints name the flag of a run
            raise
        raise UserError("SOURCE", error.found, error.allowed, error.instead) from None
    finally:
        shutil.rmtree(target + ".tmp", ignore_errors=True)
    print(f"{written} written to {target}" if portable else f"model written to {target}")


def kind_of(source: str) -> str:
    """What `source` is, one of FLAGS. Raises UserError for a damaged checkpoint, and for anything else."""
    if is_gguf(source):
        return "a GGUF file"
    held = set(os.listdir(source))
    if held & {store.MANIFEST, STATE, PIECES}:
        if damage := store.find_damage(source):
            raise UserError("SOURCE", f"{source}: {damage}", "a complete checkpoint")
        return "a checkpoint"
    if ADAPTER_CONFIG in held:
        if ADAPTER_WEIGHTS not in held:
            raise UserError("SOURCE", f"{source} holds no {ADAPTER_WEIGHTS}", "a complete adapter")
        return "an adapter"
    if "config.json" in held:
        if find_weights(source, "SOURCE") == "bin":
            raise UserError("SOURCE", f"{source} holds .bin files", "safetensors files")
        return "a model"
    if held & {"checkpoints", "metrics.jsonl"}:
        raise UserError("SOURCE", f"{source} is a run", f"{source}/checkpoints/step_N or {source}/model")
    if checkpoints := store.list_checkpoints(source):
        raise UserError("SOURCE", f"{source} holds several checkpoints", f"one of them, such as {checkpoints[-1]}")
    raise UserError("SOURCE", f"{source} is no checkpoint, model or adapter", EXPORTED)


# --- checkpoints


def write_portable(source: str, target: str) -> None:
    """Write a checkpoint with whole tensors, which torch's HuggingFaceStorageReader can also read.

    It holds the tensors of one file in memory at a time.
    """
    temporary = target + ".tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary, ignore=shutil.ignore_patterns("pieces-*", "full-*", store.MANIFEST, PIECES))
    entries, pieces = write_shards(full_shards(ShardReader(source)), temporary, "full-00000")
    entries[PIECES] = PieceIndex.of_pieces(pieces).write(temporary)
    store.commit(temporary, target, entries)


def write_model_of_checkpoint(source: str, target: str, dtype: Optional[torch.dtype], max_shard_bytes: int) -> None:
    """Write the model folder of a checkpoint, or the adapter folder of a LoRA run. `dtype`: None for that of the run."""
    reader, temporary, run = ShardReader(source), target + ".tmp", read_saved_run(source)
    names = {key: key.removeprefix(WEIGHT) for key in sorted(reader.shapes) if key.startswith(WEIGHT)}
    texts, folder = _copy_texts(source, temporary), os.path.join(source, HF_FOLDER)
    has_config = "config.json" in texts  # an adapter has none, and is in fp32
    written = dtype or (config_dtype(folder) if has_config else torch.float32)
    weights = ((name, cast(reader.read_full(key), written)) for key, name in names.items())
    if ADAPTER_CONFIG in texts:
        save_adapter(weights, temporary)
    else:
        model = build_saved_model(folder, {name: reader.shapes[key] for key, name in names.items()})
        if dtype:
            set_config_dtype(temporary, dtype)
        if model:
            model.config.dtype = written
            model.name_or_path = pretrained_folder(run.flags)
            limits = {name: run.flags.get(f"image_{name}") for name in EDGES}
            model.image_pixels = {name: value for name, value in limits.items() if value}
        tensors = in_hub_format(model, weights, written) if model else weights
        save_safetensors_shards(tensors, temporary, max_shard_bytes)
        if model:
            save_source_config(model, written, temporary)
    write_card(source, run, temporary)
    commit_folder(temporary, target)


def _copy_texts(source: str, temporary: str) -> set[str]:
    """Copy the config, the tokenizer and the code of a checkpoint's model. Returns the names.

    Only files of the manifest count: their hashes fit, so a link to another file brings nothing from this machine.
    """
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    held = {os.path.relpath(name, HF_FOLDER) for name in store.read_manifest(source)}
    held = {name for name in held if not name.startswith("..") and name != INDEX and not name.endswith(".safetensors")}
    for name in held:
        os.makedirs(os.path.dirname(os.path.join(temporary, name)), exist_ok=True)
        shutil.copy2(os.path.join(source, HF_FOLDER, name), os.path.join(temporary, name))
    return held


def write_card(checkpoint: str, run: SavedRun, folder: str) -> None:
    """Write the card of a model that is made of a checkpoint: the flags of its run, and what had come out by then."""
    place, name = os.path.split(os.path.realpath(checkpoint))
    if {"pretrain", "dataset", "lora_rank"} <= run.flags.keys():  # of a version that noted them
        in_run = os.path.basename(place) == FOLDER
        results = final_values(os.path.dirname(place), run.progress.step) if in_run else {}
        write_model_card(folder, run.command, run.flags, run.progress, f"that of the run until {name}", results)


def pretrained_folder(flags: dict) -> str:
    """The folder that a run with these flags began with. A saved model has the names of its tensors. "" if it is not here."""
    name = flags.get("pretrain") or ""
    if os.path.isdir(name) or not name:
        return name
    try:
        return snapshot_download(name, local_files_only=True)
    except (OSError, ValueError):  # its errors for a snapshot that is not in the cache, and for a path
        return ""


# --- models


def rewrite_model(source: str, target: str, dtype: Optional[torch.dtype], max_shard_bytes: int) -> None:
    """Write a model folder again, in `dtype` (None: as it is) and in files of another size, one tensor at a time.

    Weights in FP8 and mxfp4 become full precision.
    """
    files = open_files(source, "SOURCE")
    temporary = fresh_folder(target)
    for name in os.listdir(source):
        path = os.path.join(source, name)
        if os.path.isfile(path) and name != INDEX and not name.endswith((".safetensors", ".bin")):
            shutil.copy(path, temporary)
    dtype = dtype or (config_dtype(temporary) if files.is_quantized else None)
    if dtype:
        set_config_dtype(temporary, dtype)
    tensors = ((name, files.read(name)) for name in sorted(files.names()))
    save_safetensors_shards(((name, cast(tensor, dtype)) for name, tensor in tensors), temporary, max_shard_bytes)
    commit_folder(temporary, target)


def write_model_of_gguf(source: str, target: str, dtype: Optional[torch.dtype], max_shard_bytes: int) -> None:
    """Write the model folder of a GGUF file, whose quantized weights become full ones, in `dtype` (None: fp32).

    transformers reads the file, and needs the package gguf for it. Host memory holds the model in fp32.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError("SOURCE", f"{source} is a GGUF file, and gguf is not installed", "pip install -e '.[gguf]'")
    where = {"pretrained_model_name_or_path": os.path.dirname(source), "gguf_file": os.path.basename(source)}
    options = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True), "output_loading_info": True}
    check_gguf(source)
    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(**where, trust_remote_code=False)
            tensors = all_tensors(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
        check_size(sum(tensor.numel() for tensor in tensors.values()), source)
        tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=False)
        model, info = AutoModelForCausalLM.from_pretrained(**where, **options, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # of many types: a broken header, an architecture that transformers cannot read
        raise UserError("SOURCE", f"{source} cannot be read: {one_line(error)}") from None
    if info["missing_keys"]:
        raise UserError("SOURCE", f"{source} holds no {min(info['missing_keys'])}", "a GGUF file with the whole model")
    save_pretrained(all_tensors(model).items(), model, tokenizer, target, dtype or torch.float32, True, max_shard_bytes)


def cast(tensor: torch.Tensor, dtype: Optional[torch.dtype]) -> torch.Tensor:
    return tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor


def config_dtype(folder: str) -> torch.dtype:
    """The dtype that a config.json names, or else bf16."""
    config = read_model_config(folder)
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if not isinstance(found := getattr(torch, str(name), None), torch.dtype):
        raise UserError(f"{folder}/config.json", f"dtype {name}", "bfloat16, float16, float32")
    return found


def set_config_dtype(folder: str, dtype: torch.dtype) -> None:
    """Note in config.json that the weights are in `dtype` and not quantized."""
    config = read_model_config(folder)
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        part.pop("quantization_config", None)
        if part is config or part.keys() & {"dtype", "torch_dtype"}:
            part.pop("torch_dtype", None)
            part["dtype"] = str(dtype).removeprefix("torch.")
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)


# --- adapters


def write_merged_model(
    source: str, base: Optional[str], target: str, dtype: Optional[torch.dtype], max_shard_bytes: int
) -> None:
    """Write the model folder of a base model with an adapter's update added. `base`: None for the one that it names.

    It adds in fp32 and writes in `dtype`, by default that of the base. Host memory holds the model in fp32.
    """
    if importlib.util.find_spec("peft") is None:
        raise UserError("SOURCE", f"{source} is an adapter, and peft is not installed", "pip install -e '.[lora]'")
    try:
        named = json.loads(read_text(os.path.join(source, ADAPTER_CONFIG), "SOURCE")).get("base_model_name_or_path")
    except (ValueError, AttributeError, RecursionError):
        raise UserError(
            "SOURCE", f"{source}/{ADAPTER_CONFIG} holds no JSON object", "the file as it was written"
        ) from None
    named = named if isinstance(named, str) else None
    if not (base or named):
        raise UserError("--base", f"missing, and {source} names no base model", "a model folder or hub name")
    if not base and not os.path.isdir(named):  # data grants no network
        found = f"missing, and {source} names {named}, which is no folder here"
        raise UserError("--base", found, "a model folder or hub name")
    base = resolve_model_folder(base or named, "--base")
    has_tokenizer = os.path.exists(os.path.join(source, "tokenizer_config.json"))
    tokenizer = load_tokenizer(source if has_tokenizer else base)
    model = merged_model(base, source)
    model = model.to(dtype or model.dtype)
    tensors = all_tensors(model).items()
    whole = target + ".tmp"  # OUT appears with its card
    save_pretrained(tensors, model, tokenizer, whole, model.dtype, True, max_shard_bytes)
    card = os.path.join(source, "README.md")
    if os.path.exists(card):  # the adapter's, which says how it was trained
        with open(card, encoding="utf-8") as file, open(os.path.join(whole, "README.md"), "w", encoding="utf-8") as out:
            out.write(card_of_merged(file.read(), whole, type(model).__name__.endswith("ForSequenceClassification")))
    commit_folder(whole, target)


def merged_model(base: str, source: str) -> torch.nn.Module:
    """Load the model of `base`, add the adapter of `source`, and return it in the dtype of `base`."""
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict  # an optional extra

    is_classifier = PeftConfig.from_pretrained(source).task_type == "SEQ_CLS"
    auto_class = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    # the config.json next to the adapter describes the head that a reward model adds to its base
    has_config = os.path.exists(os.path.join(source, "config.json"))
    config = AutoConfig.from_pretrained(source if has_config else base, trust_remote_code=False)
    if hasattr(config, "quantization_config"):  # from --load_in_4bit; the adapter is merged into the unquantized base
        del config.quantization_config
    try:
        options = {"dtype": torch.float32, "output_loading_info": True, "trust_remote_code": False}
        model, info = auto_class.from_pretrained(base, config=config, **options)
        odd = {name for kind in ("missing_keys", "unexpected_keys") for name in info[kind]}
        odd -= {name for name in odd if is_classifier and name.startswith(("score.", "lm_head."))}
        if odd:
            raise ValueError(
                f"{counted(len(odd), 'weight is', 'weights are')} in only one of the two, such as {min(odd)}"
            )
        adapted = PeftModel.from_pretrained(model, source)
        with safe_open(os.path.join(source, ADAPTER_WEIGHTS), framework="pt") as file:  # peft drops what has no place
            odd = set(file.keys()) ^ get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
        if odd:
            raise ValueError(
                f"{counted(len(odd), 'tensor of the adapter is', 'tensors of the adapter are')} in only one of the two, such as {min(odd)}"
            )
        model = adapted.merge_and_unload(safe_merge=True)
    except (RuntimeError, ValueError) as error:
        raise UserError("SOURCE", f"{source} does not fit {base}: {one_line(error)}") from None
    return model.to(AutoConfig.from_pretrained(base, trust_remote_code=False).dtype or torch.float32)
