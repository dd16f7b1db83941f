"""Models that DeepSpeed does not train yet or never: loading under ZeRO 3, and frozen models of every stage."""

import functools

import torch

from trainer.checkpoints import model_folder
from trainer.distributed.host_offload import keep_on_host
from trainer.distributed.mesh import Meshes
from trainer.strategies.autotp import hpz_group

# These call layers as often as their tokens ask for: an expert that is the identity, blocks of keys. Ranks would gather
# different weights, so each of these is gathered as a whole.
LEAVES = ("LongcatFlashExperts", "Qwen4ExpTextQSAIndexer")


def load_partitioned(
    folder: str,
    config,
    auto_class,
    options: dict,
    *,
    engine_config: dict,
    dtype: torch.dtype,
    meshes: Meshes,
    device: torch.device,
) -> torch.nn.Module:
    """Build under zero.Init, so no rank holds the whole model. Then fill the parameters, one at a time, from the first rank of each dp x sp group (broadcast).

    `options` go to `auto_class.from_config`.
    """
    import deepspeed
    from transformers.initialization import no_init_weights

    partitioned = deepspeed.zero.Init(
        config_dict_or_path=engine_config,
        data_parallel_group=meshes.loss.get_group(),
        zero_param_parallel_group=hpz_group(meshes),
    )
    build = functools.partial(auto_class.from_config, config, **options)
    # The module that defines the model must be imported before. zero.Init undoes what decorators did to the
    # __init__ of classes that are defined inside it. The next model of experts would then lack its config.
    with torch.device("meta"), no_init_weights():
        dtypes = {name: buffer.dtype for name, buffer in build(dtype=torch.float32).named_buffers()}
    with partitioned, no_init_weights():
        model = build(dtype=dtype)
    for module in model.modules():
        module._z3_leaf = type(module).__name__ in LEAVES
    model_folder.read_generation_config(model, folder)
    model.tie_weights(recompute_mapping=False)  # skipped by no_init_weights
    names = list(model_folder.stored_tensors(model))
    weights = model_folder.open_weights(model, folder, names, new={})
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    with torch.no_grad():
        for name in names:
            if name in buffers:
                buffers[name].copy_(weights.read(name))
                continue
            with deepspeed.zero.GatheredParameters([parameters[name]], modifier_rank=0):
                if meshes.loss.get_local_rank() == 0:
                    parameters[name].copy_(weights.read(name))
    model_folder.restore_computed_buffers(model, device, dtypes)
    return model


def prepare_frozen(
    model, config: dict, *, offload: bool, dtype: torch.dtype, device: torch.device, initialize
) -> torch.nn.Module:
    """A frozen model, ready to compute; `config` is that of an engine that `initialize` makes without an optimizer."""
    zero = config["zero_optimization"]
    if zero["stage"] < 3 and "tensor_parallel" not in config:
        for parameter in filter(torch.is_floating_point, model.parameters()):
            # not the RoPE tables: the trained model's are fp32
            parameter.data = parameter.data.to(dtype)
        model.eval()
        return keep_on_host(model, device) if offload else model.to(device=device)
    # without an optimizer ZeRO 1 and 2 have nothing to partition, and DeepSpeed refuses them
    zero["stage"] = 3 if zero["stage"] == 3 else 0
    if offload and zero["stage"] == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    engine = initialize(model=model, config=config)[0]
    engine.eval()  # an engine's eval() does not return the engine
    if offload and zero["stage"] < 3:
        keep_on_host(model, device)
    return engine
