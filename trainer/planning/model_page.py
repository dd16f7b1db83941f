"""One page about a model: its kind, parameters and layers, and which flags it refuses. `--print_model` prints it.

What the model refuses comes from the functions that refuse in a run. What the layout excludes comes from the table of
rules. There is no second list.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from transformers import AutoConfig

from trainer.distributed.decoder_layers import decoder_layers
from trainer.distributed.mesh_sizes import resolve_mesh_sizes
from trainer.errors import UserError, one_line
from trainer.metrics import counted, full_size
from trainer.model_folders.model_folder import plain_class
from trainer.model_parallel.expert_parallel import validate_experts
from trainer.model_parallel.tensor_parallel import resolve_tp_plan, validate_tp_sizes
from trainer.models.attention.choice import validate_heads, validate_packed_model, validate_split_model
from trainer.models.attention.flash import validate_head_dims
from trainer.models.attention.varlen import NAME
from trainer.models.layers.head_shares import shared_over
from trainer.models.layers.recurrent_layers import mixers_of, restart_at_documents
from trainer.models.lora import LoraOptions, add_adapter

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
RANKS = 2  # the number of ranks for which flags of a layout are tried


def model_page(
    model, param_dtype: torch.dtype, *, tp: int, sp: int, use_hf_tp_plan: bool, sequence_parallel: bool,
    trust_remote_code: bool, excluded: Sequence[str] = (),
) -> str:  # fmt: skip
    """The page of a model that is loaded, and not yet sharded by `prepare`. No communication.

    `excluded` are the lines of `excluded_flags` in strategies/options.py.
    """
    folder, skeleton = model.name_or_path, skeleton_of(model)
    facts = model_facts(model, folder)
    facts += [("compute dtype", str(param_dtype).removeprefix("torch.")), ("master weights", "float32")]
    if tp > 1:
        plan = resolve_tp_plan(skeleton, use_hf_tp_plan=use_hf_tp_plan, sequence_parallel=sequence_parallel)
        styles = Counter(plan.values()).most_common()  # --print_tp_plan prints all entries
        facts.append((f"plan of tp {tp}", ", ".join(f"{count} {style}" for style, count in styles)))
    facts += shared_mixers(skeleton, tp, sp)
    refused = refusals(skeleton, folder, trust_remote_code)
    facts += [("refused", line) for line in refused or ["nothing"]]
    return format_facts([*facts, *(("excluded", line) for line in excluded)])


def skeleton_of(model) -> torch.nn.Module:
    """The same model on the meta device, without an adapter and not sharded."""
    with torch.device("meta"):
        return plain_class(model)(copy.deepcopy(model.config))


def model_facts(model, folder: str) -> list[tuple[str, str]]:
    """(name, text) of what the model is."""
    config, parameters = model.config.get_text_config(), list(model.parameters())
    sizes = [(full_size(parameter), parameter.requires_grad) for parameter in parameters]
    total, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    share = "all are trained" if trained == total else f"{trained:,} are trained ({100 * trained / total:.2g} %)"
    facts = [
        ("model", f"{plain_class(model).__name__}, model_type {model.config.model_type}, of {folder}"),
        ("parameters", f"{total:,}, of which {share}" if trained < total else f"{total:,}; {share}"),
    ]
    facts += [("layers", line) for line in layer_kinds(model)]
    experts, active = (_first(config, names) for names in (EXPERTS, EXPERTS_PER_TOKEN))
    sparse = sum(any("Experts" in type(part).__name__ for part in layer.modules()) for layer in outer_layers(model))
    if experts and sparse:
        chosen = f", {active} for each token" if active else ""
        facts.append(("experts", f"{experts} in each of {counted(sparse, 'layer')}{chosen}"))
    return [*facts, ("attention", str(model.config._attn_implementation))]


def _first(config, names: tuple[str, ...]):
    return next((getattr(config, name) for name in names if getattr(config, name, None)), None)


def outer_layers(model) -> list[torch.nn.Module]:
    """The decoder layers, without layers inside of another."""
    layers = list(decoder_layers(model).values())
    inner = {part for layer in layers for part in layer.modules() if part is not layer}
    return [layer for layer in layers if layer not in inner]


def layer_kinds(model) -> list[str]:
    """One line for each kind of decoder layer: how many, what the config calls it, and the classes of its blocks."""
    text, counts = model.config.get_text_config(), Counter()
    by_class: dict[str, list] = {}
    for layer in outer_layers(model):
        by_class.setdefault(type(layer).__name__, []).append(layer)
    window, depth = (getattr(text, name, None) for name in ("sliding_window", "num_hidden_layers"))
    everywhere = f" with a window of {window} tokens" if window else ""  # without a list of kinds, all layers have it
    names = next((found for name in ("layer_types", "layers_block_type") if (found := getattr(text, name, None))), ())
    for name, layers in by_class.items():
        plain = name + everywhere * (len(layers) == depth)
        kinds = names if len(names) == len(layers) else [plain] * len(layers)
        for kind, layer in zip(kinds, layers):
            counts[(_described(kind, text), _blocks(layer))] += 1
    return [f"{count} {kind}{f' ({blocks})' if blocks else ''}" for (kind, blocks), count in counts.items()]


def _described(kind: str, text) -> str:
    sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    size = getattr(text, sizes.get(kind, ""), None) if kind in sizes else None
    return f"{kind} of {counted(size, 'token')}" if size else kind


def _blocks(layer) -> str:
    """The classes of the parts of a layer, without norms."""
    parts = [type(part).__name__ for part in layer.children() if next(part.parameters(), None) is not None]
    return ", ".join(dict.fromkeys(part for part in parts if "Norm" not in part))


def shared_mixers(model, tp: int, sp: int) -> list[tuple[str, str]]:
    """How many ranks share the heads of linear attention, Mamba or convolutions. Empty without such layers."""
    found = Counter((type(mixer).__name__, shared_over(mixer, tp, sp)) for mixer in mixers_of(model))
    return [
        (f"heads of {kind}", f"{counted(count, 'layer')}, over {counted(ways[0], 'rank')} of tp and {ways[1]} of sp")
        for (kind, ways), count in found.items()
        if tp * sp > 1
    ]


def refusals(skeleton, folder: str, trust_remote_code: bool = False) -> list[str]:
    """One line for each flag that the model of `folder` refuses. Layouts are tried for two ranks on an axis.

    `skeleton` is this model on the meta device, and is not used afterwards: some checks change it.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    checks: list[Callable] = [
        lambda: validate_packed_model(folder, trust_remote_code, NAME),
        lambda: validate_split_model(config),
        lambda: validate_heads(config, RANKS, 1),
        lambda: validate_head_dims(config),
        lambda: validate_tp_sizes(config, RANKS, 1),
        lambda: resolve_tp_plan(skeleton),
        lambda: resolve_tp_plan(skeleton, sequence_parallel=True),
        lambda: restart_at_documents(skeleton),
        lambda: validate_experts(skeleton, min(RANKS, experts), resolve_mesh_sizes(RANKS)),
        lambda: add_adapter(skeleton, LoraOptions(8, 16), folder),
    ]
    experts, found = _first(config.get_text_config(), EXPERTS) or 1, []
    for check in checks:
        try:
            with torch.device("meta"):  # peft would give the adapter memory
                check()
        except UserError as error:
            found.append(str(error))
        except ImportError:  # peft is an extra
            continue
        except Exception as error:  # the page must not end a run; a run with the flag would show the error
            found.append(f"unknown, since a check fails with {type(error).__name__}: {one_line(error)}")
    return list(dict.fromkeys(found))


def format_facts(facts: list[tuple[str, str]]) -> str:
    """Two columns. A name that repeats is blank."""
    width = max(len(name) for name, _ in facts)
    before = [None, *(name for name, _ in facts)]
    return "\n".join(f"{'' if name == last else name:<{width}}  {text}" for last, (name, text) in zip(before, facts))
