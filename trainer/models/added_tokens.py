"""`--add_tokens`: a model folder whose tokenizer knows more tokens, and whose embedding has a row for each of them."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Optional

import datasets
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.datasets.conversations.control_tokens import CONTROL_LIKE
from trainer.errors import UserError
from trainer.limits import read_model_config
from trainer.model_folders.folder_names import find_weights
from trainer.model_folders.model_folder import FULL_PRECISION, quantization
from trainer.models.model_loading import load_tokenizer

FLAG = "--add_tokens"
EVEN = 8  # a longer embedding has a multiple of so many rows: tp of 2, 4 and 8 divides it
CHUNK = 4096  # rows that are added up at once


def folder_with_tokens(folder: str, names: str, trust_remote_code: bool = False) -> tuple[str, str]:
    """Return a copy of a model folder with the tokens of `names` (commas between them), and a line that says their ids.

    A new row is the mean of the rows of the old tokens, in the input embedding and in the output layer. The embedding
    grows only if it has no spare rows. Files that do not change are links. The copy is in the cache of datasets; the
    same tokens and files give the same copy. If all tokens are there already, `folder` itself is returned.

    Raises: UserError for names that are empty, and for weights that cannot be changed.
    """
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",")))
    if "" in wanted:
        raise UserError(FLAG, repr(names), "tokens with commas between them")
    tokenizer = load_tokenizer(folder, trust_remote_code)
    known = {token: number for token in wanted if (number := _id_of(tokenizer, token)) is not None}
    new, num_old = [token for token in wanted if token not in known], len(tokenizer)
    last = max(tokenizer.get_vocab().values())
    tokenizer.add_tokens([_added(token) for token in new])
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in new}
    said = [f"{token} is {number}" for token, number in ids.items()]
    said += [f"{token} is in the vocabulary already, as {number}" for token, number in known.items()]
    if not new:
        return folder, f"{FLAG}: {', '.join(said)}"
    if min(ids.values()) <= last:
        found = f"the ids of the tokenizer have gaps: {said[0]}, and there is an older token with id {last}"
        raise UserError(FLAG, found, "a tokenizer without gaps")
    target = _place(folder, wanted)
    if not os.path.isdir(target):
        _write(folder, target, tokenizer, list(ids.values()), num_old, trust_remote_code)
    return target, f"{FLAG}: {', '.join(said)}; new rows are the mean of the old ones"


def _id_of(tokenizer: Any, token: str) -> Optional[int]:
    """The id of a text that is one token already, or None."""
    if token in tokenizer.get_vocab():
        return tokenizer.convert_tokens_to_ids(token)
    ids = tokenizer.encode(token, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and ids[0] != tokenizer.unk_token_id else None


def _added(token: str) -> AddedToken:
    """A token that texts may hold. One like <|call|> is a control token, which texts of rows cannot forge."""
    return AddedToken(token, normalized=False, special=CONTROL_LIKE.fullmatch(token) is not None)


def _place(folder: str, tokens: list[str]) -> str:
    """The folder of the copy in the cache, by the names, sizes and times of the files, and by the tokens."""
    facts = [(entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in os.scandir(folder)]
    key = json.dumps([os.path.realpath(folder), sorted(facts), tokens])
    name = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return os.path.join(datasets.config.HF_DATASETS_CACHE, "trainer_added_tokens", name)


def _write(folder: str, target: str, tokenizer: Any, ids: list[int], num_old: int, trust_remote_code: bool) -> None:
    if find_weights(folder, "--pretrain") == "bin" or quantization(folder):
        found = f"{folder} holds {'quantized weights' if quantization(folder) else '.bin files'}"
        raise UserError(FLAG, found, "a model folder with safetensors in full precision")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(target)) as temporary:
        made = os.path.join(temporary, "model")
        os.mkdir(made)
        for entry in os.scandir(folder):
            if entry.is_file():
                os.symlink(os.path.realpath(entry.path), os.path.join(made, entry.name))
        num_rows = _write_config(made, max(ids) + 1)
        before, after = (_shapes(path, trust_remote_code) for path in (folder, made))
        _write_weights(made, before, after, ids, num_old, num_rows)
        _write_tokenizer(tokenizer, made)
        try:
            os.replace(made, target)
        except OSError:
            if not os.path.isdir(target):  # else another run was quicker
                raise


def _write_config(folder: str, num_needed: int) -> int:
    """Write config.json with rows for all tokens. Returns the number of rows."""
    path = Path(folder, "config.json")
    config = read_model_config(folder)
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict) and "vocab_size" in part]
    if not parts:
        raise UserError(FLAG, f"{path.resolve()} says no vocab_size", "a language model")
    num_rows = parts[-1]["vocab_size"]
    if num_needed > num_rows:
        num_rows = -(-num_needed // EVEN) * EVEN
    for part in parts:
        part["vocab_size"] = num_rows
    path.unlink()  # the link, not the file
    path.write_text(json.dumps(config, indent=2), "utf-8")
    return num_rows


def _shapes(folder: str, trust_remote_code: bool) -> dict[str, tuple[tuple[int, ...], bool]]:
    """{name: (shape, whether it belongs to the input embedding or the output layer)} of a language model's tensors."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    own = {id(tensor) for layer in layers if layer is not None for tensor in layer.parameters()}
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return {name: (tuple(tensor.shape), id(tensor) in own) for name, tensor in held.items()}


def _write_weights(folder: str, before: dict, after: dict, ids: list[int], num_old: int, num_rows: int) -> None:
    """Write the files that hold a tensor with a row for each token. Published names may begin in another way."""
    tables = {}
    for name, (shape, is_table) in before.items():
        grown = after[name][0]
        if is_table or grown != shape:
            if grown[1:] != shape[1:] or grown[0] != num_rows:
                raise UserError(FLAG, f"{name} has no row for each token", "another model")
            tables[_end(name)] = shape
    found = set()
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            own = [n for n in weights.keys() if tuple(weights.get_slice(n).get_shape()) == tables.get(_end(n))]  # noqa: SIM118
            if not own:
                continue
            dtypes = {weights.get_slice(name).get_dtype() for name in own}
            if not dtypes <= set(FULL_PRECISION):
                raise UserError(FLAG, f"the embedding is in {', '.join(sorted(dtypes))}", "weights in full precision")
            tensors, metadata = {name: weights.get_tensor(name) for name in weights.keys()}, weights.metadata()  # noqa: SIM118
        for name in own:
            tensors[name] = with_rows(tensors[name], ids, num_old, num_rows)
        found |= {_end(name) for name in own}
        file.unlink()
        save_file(tensors, file, metadata)
    if not any("emb" in name or "wte" in name for name in found):
        raise UserError(FLAG, f"no file holds a tensor like {', '.join(tables)}", "the weights of a language model")


def _end(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def with_rows(table: torch.Tensor, ids: list[int], num_old: int, num_rows: int) -> torch.Tensor:
    """A table (rows, ...) with `num_rows` rows, in which the rows `ids` and all beyond the old end are the mean.

    The mean of the first `num_old` rows is computed in fp64, so that every machine gets the same.
    """
    old = table[:num_old]
    mean = sum(chunk.double().sum(0) for chunk in old.split(CHUNK)) / len(old)
    grown = table.new_empty((num_rows, *table.shape[1:]))
    grown[: len(table)] = table
    for rows in (ids, range(len(table), num_rows)):
        grown[list(rows)] = mean.to(table.dtype)
    return grown


def _write_tokenizer(tokenizer: Any, folder: str) -> None:
    with tempfile.TemporaryDirectory() as saved:
        tokenizer.save_pretrained(saved)
        for name in os.listdir(saved):
            path = os.path.join(folder, name)
            if os.path.lexists(path):
                os.unlink(path)
            shutil.move(os.path.join(saved, name), path)
