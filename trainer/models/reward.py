"""The reward model: a causal LM with one score per token, saved as a sequence classifier with one label.

`AutoModelForSequenceClassification` scores a sequence at its last token. Training needs the scores of all tokens:
packed rows hold several sequences, and split rows hold only a part of one. `return_token_scores` changes no weight and
no name.
"""

import json
import os
import shutil

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from trainer.datasets.batches.packing import model_inputs
from trainer.errors import UserError
from trainer.model_folders.adapter_tensors import read_tensors
from trainer.model_folders.folder_names import INDEX, SINGLE, find_weights
from trainer.models.model_loading import load_tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
HEAD = "score.weight"  # transformers' name; the checkpoint that a run starts from may use another name
HEAD_FILE = "score.safetensors"


def return_token_scores(model, fp32: bool = False) -> None:
    """Make `model(**inputs)` return the score of every token (rows, tokens, 1) instead of one score per row.

    With `fp32`, the head multiplies and sums in fp32 for every compute dtype: bf16 scores near 1 are 0.008 apart. Call
    this before a strategy wraps the model: the strategy's hooks go around this forward.
    """
    if fp32:
        head = model.score

        def head_forward(hidden: torch.Tensor) -> torch.Tensor:  # no matmul: autocast would lower its dtype
            return (hidden.float() * head.weight.float()).sum(-1, keepdim=True)

        head.forward = head_forward
    base = getattr(model, model.base_model_prefix)

    def forward(**inputs) -> torch.Tensor:
        return model.score(base(**inputs).last_hidden_state)

    model.forward = forward


def token_scores(model, batch: dict) -> torch.Tensor:
    """Return the scores (rows, tokens) of a padded or packed micro-batch, fp32."""
    return model(**model_inputs(batch)).squeeze(-1).float()


def scoring_pad(model, tokenizer) -> int:
    """Return the config's pad token, or else the tokenizer's. transformers uses it to find the token to score."""
    pad_token_id = model.config.get_text_config().pad_token_id
    return tokenizer.pad_token_id if pad_token_id is None else pad_token_id


def make_initial_reward_model(
    source: str,
    folder: str,
    seed: int,
    trust_remote_code: bool = False,
    head_prefix: str = "score",
    flag: str = "--pretrain",
) -> None:
    """Make a model folder `folder`: links to the weights of `source`, and a reward head from `source` or a new one.

    The head is `head_prefix`.weight in `source`, and score.weight, (1, hidden_size), in `folder`. A new head depends
    only on the seed: it is the same on every layout. Its standard deviation is 1 / sqrt(hidden_size + 1) (Stiennon et
    al. 2020, appendix B.1).

    Raises:
        UserError: transformers has no sequence classifier for the model, or `source` has no safetensors.
    """
    config, weight_map, named = read_source(source, trust_remote_code, head_prefix, flag)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    for name in os.listdir(source):
        if name not in ("config.json", INDEX, SINGLE):
            os.symlink(os.path.abspath(os.path.join(source, name)), os.path.join(folder, name))
    if SINGLE in weight_map.values():
        os.symlink(os.path.abspath(os.path.join(source, SINGLE)), os.path.join(folder, "weights.safetensors"))
        weight_map = dict.fromkeys(weight_map, "weights.safetensors")
    if HEAD not in weight_map:
        hidden_size = config.get_text_config().hidden_size
        head = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(seed)) * (hidden_size + 1) ** -0.5
        head = head if named is None else named
        save_file({HEAD: head}, os.path.join(folder, HEAD_FILE), metadata={"format": "pt"})
        weight_map[HEAD] = HEAD_FILE
    with open(os.path.join(folder, INDEX), "w") as file:
        json.dump({"metadata": {}, "weight_map": weight_map}, file)
    _save_config(config, source, folder, trust_remote_code)


def read_source(source: str, trust_remote_code: bool, head_prefix: str, flag: str) -> tuple:
    """(config, {tensor: file}, head under another name or None) of the model that a reward model starts from.

    Raises UserError as `make_initial_reward_model` does. It is fast: no weights but those of the head are read.
    """
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    if getattr(config, "is_encoder_decoder", False):
        found = f"{source}: {config.model_type} is an encoder-decoder, which scores no tokens of a text"
        raise UserError(flag, found, "a causal language model")
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UserError(flag, f"transformers has no sequence classifier for {config.model_type}", "another model")
    weight_map = _weight_map(source, flag)
    named = None if f"{head_prefix}.weight" == HEAD else _named_head(source, weight_map, head_prefix, config)
    return config, weight_map, named


def check_head(folder: str, flag: str) -> None:
    """Raise UserError if the model that `flag` named has no score head. transformers would make a random one."""
    if find_weights(folder, flag) == "safetensors" and HEAD not in _weight_map(folder, flag):
        raise UserError(flag, f"{folder} is no reward model: it has no {HEAD}", "a model that train_rm has trained")


def lacks_head(base: str, adapter: str, flag: str) -> bool:
    """Whether the base model of a reward adapter has no head, so that one must be made for the adapter's own to replace.

    Raises UserError if neither of the two has a head.
    """
    if HEAD in _weight_map(base, flag):
        return False
    if f"base_model.model.{HEAD}" not in read_tensors(adapter, flag):
        found = f"{adapter} has no {HEAD}, and neither has its base model {base}"
        raise UserError(flag, found, "an adapter of a reward model, as train_rm --lora_rank saves it")
    return True


def _named_head(source: str, weight_map: dict[str, str], prefix: str, config) -> torch.Tensor:
    """Return the head that `source` has under another name: (1, hidden_size) fp32. Raises UserError if it is unfit."""
    name, shape = f"{prefix}.weight", [1, config.get_text_config().hidden_size]
    if name not in weight_map or HEAD in weight_map:
        known = ", ".join(key.removesuffix(".weight") for key in weight_map if not key.startswith("model."))
        found = f"{HEAD} exists as well" if name in weight_map else f"no {name} in {source}"
        raise UserError(
            "--value_head_prefix", found, f"score (the default; created if it is missing){', ' * bool(known)}{known}"
        )
    with safe_open(os.path.join(source, weight_map[name]), framework="pt") as weights:
        head = weights.get_tensor(name).float()
    if list(head.shape) != shape:
        raise UserError("--value_head_prefix", f"{name} of shape {list(head.shape)}", f"{shape}")
    return head


def _save_config(config, source: str, folder: str, trust_remote_code: bool) -> None:
    config.num_labels = 1
    # a critic may have no tokenizer; it is scored at every token
    if any(os.path.exists(os.path.join(source, name)) for name in TOKENIZER_FILES):
        # transformers scores a row at its last token that is not this one; training uses the tokenizer's pad token
        config.get_text_config().pad_token_id = load_tokenizer(source, trust_remote_code).pad_token_id
    config.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].__name__]
    config.save_pretrained(folder)


def _weight_map(folder: str, flag: str) -> dict[str, str]:
    """Return {weight: file} of a folder of safetensors. Raises UserError if there are none."""
    if os.path.exists(os.path.join(folder, INDEX)):
        with open(os.path.join(folder, INDEX)) as file:
            return json.load(file)["weight_map"]
    if not os.path.exists(os.path.join(folder, SINGLE)):
        raise UserError(flag, f"{folder} contains no safetensors", f"a folder with {SINGLE} or {INDEX}")
    with safe_open(os.path.join(folder, SINGLE), framework="pt") as weights:
        return dict.fromkeys(weights.keys(), SINGLE)
