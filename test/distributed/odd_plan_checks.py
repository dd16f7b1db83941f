"""Exactness of tensor parallelism on two ranks for models without a usable plan in transformers.

test_odd_plans.py runs it by torchrun with FOLDER. Each check prints "ok ...". The plain loop and the runs of the
strategies are those of tensor_parallel_checks.py.
"""

import sys

import tensor_parallel_checks
import torch
import torch.distributed as dist
from odd_plan_models import EXTRA, MODELS, SIZES, layouts_of, make_config
from tensor_parallel_checks import make_samples, plain_run, strategy_run
from transformers import AutoModelForCausalLM

from trainer.distributed.mesh import build_meshes, resolve_device
from trainer.distributed.mesh_sizes import resolve_mesh_sizes
from trainer.entry import end_well
from trainer.errors import UserError
from trainer.model_parallel import tensor_parallel

# at 1e-2, each step of the tiny Qwen3.5 makes the rounding of the one before some 50 times larger
tensor_parallel_checks.LR = 1e-3
# a softmax does not change if all keys get the same bias: the gradient of these is rounding noise
NOISE = ("k_proj.bias", "c_attn.bias", "query_key_value.bias")


def worst_of(run: dict, expected: dict, key: str) -> float:
    """Return the largest difference, relative to each tensor's own norm."""
    if isinstance(run[key], list):
        return max(abs(a - b) / abs(b) for a, b in zip(run[key], expected[key], strict=True))
    missing = expected[key].keys() - run[key].keys()
    assert not missing, missing
    names = [name for name in expected[key] if not name.endswith(NOISE)]
    differences = {n: float((run[key][n] - expected[key][n]).norm() / expected[key][n].norm()) for n in names}
    worst = max(differences, key=differences.get)
    assert differences[worst] <= 1e-4, (key, worst, differences[worst])
    return differences[worst]


def check_exactness(folder: str) -> None:
    for name in MODELS:
        samples = make_samples(SIZES["vocab_size"])
        expected = plain_run(f"{folder}/{name}", samples)
        extra = {layout: options for model, layout, options in EXTRA if model == name}
        for layout, options in (layouts_of(name) | extra).items():
            run = strategy_run(f"{folder}/{name}", samples, packed=False, **options)
            worst = {key: worst_of(run, expected, key) for key in ("losses", "norms", "grads", "weights")}
            assert worst["losses"] <= 1e-5 and worst["norms"] <= 1e-4, (name, layout, worst)
            if dist.get_rank() == 0:
                print(f"ok {name} {layout} " + " ".join(f"{key} {x:.1e}" for key, x in worst.items()), flush=True)


def check_a_plan_that_does_not_fit_is_refused() -> None:
    """StableLM counts its heads itself. Heads over tp must be found out before the first step."""
    sizes = resolve_mesh_sizes(2, tp=2)
    tp_mesh = build_meshes(sizes, resolve_device("auto")).params["tp"]
    config = make_config("stablelm")
    config.qk_layernorm = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        uneven = AutoModelForCausalLM.from_config(make_config("gpt2"))
    heads = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    model.tp_plan = {**heads, "model.layers.*.self_attn.o_proj": "rowwise"}
    model.config.model_type = "unheard_of"
    try:
        tensor_parallel.resolve_tp_plan(model, tp_mesh, use_hf_tp_plan=True)
    except UserError as error:
        told = str(error)
    else:
        raise AssertionError("a plan that does not fit was accepted")
    assert "the layers of StableLmForCausalLM do not work with their plan" in told, told
    # the model trains without its plan: every linear layer gathers its output
    plan = tensor_parallel.resolve_tp_plan(model, tp_mesh)
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise_gather_output", plan
    images = make_config("gemma4_images")  # with this, Gemma 4 reads the embedding's weight beside the embedding
    images.text_config.hidden_size_per_layer_input, images.text_config.vocab_size_per_layer_input = 8, 96
    with torch.device("meta"):
        images = AutoModelForCausalLM.from_config(images)
    try:
        tensor_parallel.resolve_tp_plan(images, tp_mesh)
    except UserError as error:
        assert "their code reads a weight of another layer" in str(error), error
    else:
        raise AssertionError("a plan that cuts a weight for other layers was accepted")
    uneven.config.n_inner = 49
    try:
        tensor_parallel.resolve_tp_plan(uneven, tp_mesh)
    except UserError as error:
        assert "2 does not divide the 49 of transformer.h.0.mlp.c_fc.weight" in str(error), error
    else:
        raise AssertionError("a part of 24.5 columns was accepted")


def main(folder: str) -> None:
    check_exactness(folder)
    check_a_plan_that_does_not_fit_is_refused()
    if dist.get_rank() == 0:
        print("ok refused", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
    end_well()
