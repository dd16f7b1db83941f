"""Exactness of tensor parallelism on two ranks for models without a usable plan in transformers.

test_odd_plans.py runs it by torchrun with FOLDER. Each check prints "ok ...". The plain loop and the runs of the
strategies are those of tensor_parallel_checks.py.
"""

import sys

import torch
import torch.distributed as dist
import transformers
from tensor_parallel_checks import make_samples, plain_run, strategy_run
from transformers import AutoModelForCausalLM

from trainer.cli.entry import end_well
from trainer.distributed import tensor_parallel
from trainer.distributed.mesh import build_meshes, resolve_device, resolve_mesh_sizes
from trainer.errors import UserError

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 128,
    "initializer_range": 0.2,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
DELTA_NET = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MODELS = {
    "gpt2": ("GPT2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": 96}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 16, "init_std": 0.2}),
    "falcon": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),  # no plan of ours: every linear layer gathers its output
    "stablelm": ("StableLm", {"qk_layernorm": True}),
    "apertus": ("Apertus", {}),
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {}),
    "gemma2": ("Gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}),
    "falcon_h1": ("FalconH1", {"head_dim": 8, "mamba_d_ssm": 64, **MAMBA}),
    "granitemoehybrid": ("GraniteMoeHybrid", {
        "layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 48, **MAMBA,
    }),
    "nemotron_h": ("NemotronH", {
        "num_hidden_layers": None, "layers_block_type": ["mamba", "mlp", "attention", "mlp"], "mamba_num_heads": 4,
        "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16, "head_dim": 8,
    }),
    "qwen3_5": ("Qwen3_5Text", {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"], **DELTA_NET}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16}),
}  # fmt: skip
LAYOUTS = {
    "fsdp2": {"tensor_parallel_size": 2},
    "z1": {"tensor_parallel_size": 2, "zero_stage": 1},
}
EXTRA = [("gpt2", "z3", {"tensor_parallel_size": 2, "zero_stage": 3})]
# a softmax does not change if all keys get the same bias: the gradient of these is rounding noise
NOISE = ("k_proj.bias", "c_attn.bias", "query_key_value.bias")


def make_config(name: str):
    kind, options = MODELS[name]
    options = {key: value for key, value in (SIZES | options).items() if value is not None}
    return getattr(transformers, f"{kind}Config")(**options)


def save_model(name: str, folder: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(name), dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "A_log" not in parameter_name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(f"{folder}/{name}")


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
        for layout, options in (LAYOUTS | extra).items():
            run = strategy_run(f"{folder}/{name}", samples, packed=False, **options)
            worst = {key: worst_of(run, expected, key) for key in ("losses", "norms", "grads", "weights")}
            assert worst["losses"] <= 1e-5 and worst["norms"] <= 1e-4, (name, layout, worst)
            if dist.get_rank() == 0:
                print(f"ok {name} {layout} " + " ".join(f"{key} {x:.1e}" for key, x in worst.items()), flush=True)


def check_a_plan_that_does_not_fit_is_refused() -> None:
    """StableLM counts its heads itself. Heads over tp must be found out before the first step."""
    sizes = resolve_mesh_sizes(2, tp=2)
    tp_mesh = build_meshes(sizes, resolve_device("auto")).params["tp"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config("stablelm"))
        uneven = AutoModelForCausalLM.from_config(make_config("gpt2"))
    heads = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    heads |= {f"model.layers.*.self_attn.{name}_layernorm": "replicated_with_grad_allreduce" for name in "qk"}
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
