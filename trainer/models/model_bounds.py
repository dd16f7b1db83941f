"""What a model of a folder can take, from its config: the size of its embedding and the number of its positions."""

import re

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, AutoModel

from trainer.datasets.samples.bounds import Bounds
from trainer.errors import UserError
from trainer.model_folders.model_folder import read_config

TABLE = re.compile(r"(^|\.)(wpe|\w*position\w*)(\.|$)")  # the name of a table with one row for each position


def refuse_encoder(folder: str, auto_class, trust_remote_code: bool, flag: str) -> None:
    """Raise UserError for BERT and its kind as a language model: its attention sees the tokens that it should predict.

    transformers builds such a model without a word. Only `is_decoder` (XLM: `causal`) in its config masks later tokens.
    """
    config = read_config(folder, trust_remote_code)
    if auto_class._model_mapping is not MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        return
    if not any(getattr(config, name, False) for name in ("is_decoder", "causal", "is_encoder_decoder")):
        found = f"{folder}: {config.model_type} is an encoder, whose attention sees the tokens that it should predict"
        raise UserError(flag, found, "a decoder; or a config.json with is_decoder true")


def bounds_of(folder: str, trust_remote_code: bool) -> Bounds:
    """The bounds of a model's texts. Scaled rotary positions have no bound: the scaling is the user's choice.

    Models without rotary positions may have a table of them (GPT-2, OPT, GPT-J) or need none (Jamba).
    """
    config = read_config(folder, trust_remote_code)
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    parameters = getattr(text, "rope_parameters", None)
    if not limit:
        return Bounds(text.vocab_size)
    if parameters:
        entries = [parameters, *parameters.values()]
        kinds = {entry["rope_type"] for entry in entries if isinstance(entry, dict) and "rope_type" in entry}
        of_images = any(isinstance(entry, dict) and "mrope_section" in entry for entry in entries)
        return Bounds(text.vocab_size, limit if kinds <= {"default"} else None, of_images=of_images)
    has_table = _has_table(config, limit, trust_remote_code)
    return Bounds(text.vocab_size, limit if has_table else None, has_table)


def _has_table(config, limit: int, trust_remote_code: bool) -> bool:
    """Whether the model has a row for each position. OPT has two more rows than positions."""
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(config, trust_remote_code=trust_remote_code)
    except Exception:  # of many types: the message belongs to the loading of the model
        return False
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return any(
        TABLE.search(name) and limit <= tensor.shape[0] <= limit + 2 for name, tensor in tensors if tensor.dim() > 1
    )
