"""The reward model: a causal LM whose head gives each token one score, saved as a sequence classifier with one label.

`AutoModelForSequenceClassification` scores a sequence at its last token. Training needs the scores of all tokens, since
packed rows hold several sequences and split rows only a part of one; `return_token_scores` changes no weight and no name.
"""

import json
import os
import shutil

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trainer.datasets.packing import model_inputs
from trainer.errors import UserError
from trainer.models.model_loading import load_tokenizer

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
HEAD = "score.weight"  # what transformers calls it; a checkpoint to start from may call it otherwise
HEAD_FILE = "score.safetensors"


def return_token_scores(model, fp32: bool = False) -> None:
    """Make `model(**inputs)` return the score of every token (rows, tokens, 1) instead of one score per row.

    With `fp32` the head multiplies and sums in fp32, whatever the compute dtype: bf16 scores near 1 are 0.008 apart. To be
    called before a strategy wraps the model: its hooks go around this forward.
    """
    if fp32:
        head = model.score

        def head_forward(hidden: torch.Tensor) -> torch.Tensor:  # no matmul, which autocast would lower again
            return (hidden.float() * head.weight.float()).sum(-1, keepdim=True)

        head.forward = head_forward
    base = getattr(model, model.base_model_prefix)

    def forward(**inputs) -> torch.Tensor:
        return model.score(base(**inputs).last_hidden_state)

    model.forward = forward


def token_scores(model, batch: dict) -> torch.Tensor:
    """Scores (rows, tokens) of a padded or packed micro-batch, fp32."""
    return model(**model_inputs(batch)).squeeze(-1).float()


def scoring_pad(model, tokenizer) -> int:
    """The pad token by which transformers finds the token that this classifier scores; the tokenizer's if it names none."""
    pad_token_id = model.config.get_text_config().pad_token_id
    return tokenizer.pad_token_id if pad_token_id is None else pad_token_id


def make_initial_reward_model(
    source: str, folder: str, seed: int, trust_remote_code: bool = False, head_prefix: str = "score"
) -> None:
    """A model folder `folder` with the weights of `source`, by links, and a reward head; as `source` has it, or new.

    `source` has it as `head_prefix`.weight; the folder as score.weight, (1, hidden_size). A new head is drawn from the seed alone, with the standard deviation 1 / sqrt(hidden_size + 1) (Stiennon et al. 2020,
    appendix B.1), so that it is the same on every layout. Raises UserError where transformers has no sequence classifier
    for the model, or `source` no safetensors.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UserError(
            "--pretrain", f"transformers has no sequence classifier for {config.model_type}", "another model"
        )
    weight_map = _weight_map(source)
    named = None if f"{head_prefix}.weight" == HEAD else _named_head(source, weight_map, head_prefix, config)
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


def _named_head(source: str, weight_map: dict[str, str], prefix: str, config) -> torch.Tensor:
    """(1, hidden_size) fp32, the head that `source` has under another name. Raises UserError if that is no such weight."""
    name, shape = f"{prefix}.weight", [1, config.get_text_config().hidden_size]
    if name not in weight_map or HEAD in weight_map:
        known = ", ".join(key.removesuffix(".weight") for key in weight_map if not key.startswith("model."))
        found = f"{HEAD} beside it" if name in weight_map else f"no {name} in {source}"
        raise UserError(
            "--value_head_prefix",
            found,
            f"score (the default; made anew where it is missing){', ' * bool(known)}{known}",
        )
    with safe_open(os.path.join(source, weight_map[name]), framework="pt") as weights:
        head = weights.get_tensor(name).float()
    if list(head.shape) != shape:
        raise UserError("--value_head_prefix", f"{name} of shape {list(head.shape)}", f"{shape}")
    return head


def _save_config(config, source: str, folder: str, trust_remote_code: bool) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    config.num_labels = 1
    # a critic may come without a tokenizer; it is scored at every token
    if any(os.path.exists(os.path.join(source, name)) for name in TOKENIZER_FILES):
        # transformers scores a row at its last token that is not this one, and training at the last that is not the tokenizer's
        config.get_text_config().pad_token_id = load_tokenizer(source, trust_remote_code).pad_token_id
    config.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].__name__]
    config.save_pretrained(folder)


def _weight_map(folder: str) -> dict[str, str]:
    """{weight: file} of a folder of safetensors; raises UserError where there are none."""
    if os.path.exists(os.path.join(folder, INDEX)):
        with open(os.path.join(folder, INDEX)) as file:
            return json.load(file)["weight_map"]
    if not os.path.exists(os.path.join(folder, SINGLE)):
        raise UserError("--pretrain", f"{folder} holds no safetensors", f"a folder with {SINGLE} or {INDEX}")
    with safe_open(os.path.join(folder, SINGLE), framework="pt") as weights:
        return dict.fromkeys(weights.keys(), SINGLE)
