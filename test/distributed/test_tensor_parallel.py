"""Tensor-parallel plans, and their exactness on every architecture. The runs are in tensor_parallel_checks.py."""

import pytest
import torch
from launch import FULL, ROOT, forked
from tiny_models import CONFIGS, EVEN_CONFIGS, save_models
from transformers import AutoModelForCausalLM, Olmo2Config

from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.model_parallel import tensor_parallel
from trainer.model_parallel.tensor_parallel import complete_plan, resolve_tp_plan
from trainer.model_parallel.tp_plans import get_hf_tp_plan, get_llama_tp_plan, get_optimized_tp_plan
from trainer.strategies.options import StrategyOptions, refuse_on_fsdp2

QWEN3_PLAN = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.input_layernorm": "replicated",
    "model.layers.*.self_attn": "block_input",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "model.layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.post_attention_layernorm": "replicated",
    "model.layers.*.mlp": "block_input",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "model.norm": "replicated",
    "lm_head": "colwise_vocab",
}


def meta_model(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def unheard_of(model):
    """Give the same modules a name that no plan knows."""
    model.config.model_type = "unheard_of"
    model.tp_plan = {}
    return model


@pytest.fixture
def qwen3():
    return meta_model(CONFIGS["qwen3"]())


def test_qwen3_plan_is_complete(qwen3):
    assert resolve_tp_plan(qwen3) == QWEN3_PLAN


@pytest.mark.parametrize("architecture", ["llama", "llama_bias", "qwen2", "qwen3", "gemma3", "mistral"])
def test_our_plan_and_the_models_own_cut_the_same_way(architecture):
    model = meta_model(CONFIGS[architecture]())
    assert get_optimized_tp_plan(model) != get_hf_tp_plan(model)
    assert resolve_tp_plan(model) == resolve_tp_plan(model, use_hf_tp_plan=True)


def test_sequence_parallel_shards_norms_and_residuals(qwen3):
    plan = resolve_tp_plan(qwen3, sequence_parallel=True)
    changed = {pattern: style for pattern, style in plan.items() if style != QWEN3_PLAN[pattern]}
    norms = ["model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"]
    rows = ["model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj"]
    assert changed == {
        **dict.fromkeys(norms, "sequence_parallel"),
        **dict.fromkeys(rows, "rowwise_to_sequence"),
        "model.embed_tokens": "embedding_rowwise_to_sequence",
        "lm_head": "colwise_vocab_from_sequence",
    }


@pytest.mark.parametrize("dropped", ["self_attn.q_norm", "self_attn.k_norm", "self_attn.v_proj", "mlp.down_proj"])
def test_a_parameter_that_the_plan_leaves_out_is_named(qwen3, dropped):
    plan = get_hf_tp_plan(qwen3)
    del plan[f"model.layers.*.{dropped}"]
    with pytest.raises(UserError, match=f"does not cover the parameter model.layers.0.{dropped}.weight"):
        complete_plan(qwen3, plan)


@pytest.mark.parametrize("style", ["moe_tp_experts", "sequence_parallel", "local_colwise"])
def test_a_style_that_would_not_mean_the_same_here_is_an_error(qwen3, style):
    qwen3._tp_plan["model.layers.*.mlp.up_proj"] = style
    with pytest.raises(UserError, match=f"gives model.layers.\\*.mlp.up_proj the style {style}"):
        resolve_tp_plan(qwen3, use_hf_tp_plan=True)


def test_the_llama_layout_serves_models_without_a_plan():
    llama = meta_model(CONFIGS["llama"]())
    expected = resolve_tp_plan(llama)
    assert resolve_tp_plan(unheard_of(llama)) == expected
    with pytest.raises(UserError, match="--use_hf_tp_plan: no tensor-parallel plan for LlamaForCausalLM"):
        resolve_tp_plan(llama, use_hf_tp_plan=True)


def test_the_llama_layout_is_not_used_where_the_modules_do_not_fit():
    # OLMo2 norms all heads together: the LLaMA layout would norm the heads of each rank separately
    small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 97}
    olmo2 = unheard_of(meta_model(Olmo2Config(num_attention_heads=4, num_key_value_heads=4, **small)))
    with pytest.raises(UserError, match=r"does not cover the parameter model.layers.0.self_attn.q_norm.weight"):
        complete_plan(olmo2, get_llama_tp_plan(olmo2))
    assert resolve_tp_plan(olmo2)["model.layers.*.self_attn.q_proj"] == "colwise_gather_output"


def test_sizes_that_do_not_fit_are_told_with_those_that_do():
    for architecture in CONFIGS:
        tensor_parallel.validate_tp_sizes(CONFIGS[architecture](), 4, 2)
    tensor_parallel.validate_tp_sizes(CONFIGS["llama"](), 3, 1)  # 8 heads, 4 KV heads, MLP width 48
    with pytest.raises(UserError) as error:
        tensor_parallel.validate_tp_sizes(CONFIGS["llama"](), 5, 1)
    assert str(error.value) == (
        "--tensor_parallel_size: 5 does not divide intermediate_size 48 (allowed: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48)"
    )
    # with an uneven vocabulary, the sharding ranks must divide the hidden size: each of the two is cut once
    with pytest.raises(
        UserError,
        match=r"2 does not divide vocab_size 97; 3 sharding ranks do not divide hidden_size 32 .*: 1\)",
    ):
        tensor_parallel.validate_tp_sizes(CONFIGS["llama"](), 2, 3)


@pytest.mark.parametrize("flag", ["use_hf_tp_plan", "sequence_parallel", "print_tp_plan"])
def test_flags_of_tensor_parallelism_need_tensor_parallelism(flag):
    refuse_on_fsdp2(StrategyOptions(tensor_parallel_size=2, **{flag: True}))
    with pytest.raises(UserError, match=f"--{flag} with --tensor_parallel_size 1"):
        refuse_on_fsdp2(StrategyOptions(tensor_parallel_size=1, **{flag: True}))


DEEPSPEED_RUNS = [
    f"{architecture}:{('z1-dp2-tp2:padded', 'z3-tp4:packed')[number % 2]}"
    for number, architecture in enumerate(EVEN_CONFIGS)
] + ["qwen3_even:z3-dp2-tp2-hf:packed", "gemma3_even:z0-dp2-tp2:padded"]
# two layouts of each architecture in turn, for `PARITY=full`; `torchrun tensor_parallel_checks.py` also takes any other
EXACT_RUNS = [
    f"{architecture}:{run}"
    for number, architecture in enumerate(CONFIGS)
    for run in (("dp2-tp2:padded", "tp4:packed"), ("dp2-tp2-sequence:packed", "dp2-tp2-hf:padded"))[number % 2]
    if not (architecture == "olmo2" and "hf" in run)  # OLMo2 uses the model's own plan in both cases
] + ["llama_bias:tp4-sequence:padded", "gemma3:hsdp2-tp2:packed", "qwen3:hsdp2-tp2:padded", "qwen2:hsdp2-dp2:padded"]
# each architecture and each layout of FSDP2; each stage and each kind of layer that DeepSpeed cuts
SAMPLE = [
    "llama:dp2-tp2:padded", "llama_bias:tp4-sequence:padded", "qwen2:tp4:packed", "qwen3:dp2-tp2-hf:padded",
    "gemma3:hsdp2-tp2:packed", "mistral:dp2-tp2-sequence:packed", "olmo2:dp2-tp2:padded",
    "llama_bias_even:z3-tp4:packed", "qwen2_even:z1-dp2-tp2:padded", "qwen3_even:z3-dp2-tp2-hf:packed",
    "gemma3_even:z0-dp2-tp2:padded",
]  # fmt: skip
RUNS = EXACT_RUNS + DEEPSPEED_RUNS if FULL else SAMPLE


def test_the_sample_has_every_architecture_and_layout():
    def layouts(runs: list[str]) -> set[str]:
        return {run.split(":")[1] for run in runs}

    assert {run.split(":")[0].removesuffix("_even") for run in SAMPLE} == CONFIGS.keys()
    assert set(SAMPLE) < {*EXACT_RUNS, *DEEPSPEED_RUNS}
    # check_chunked_loss has this one
    assert layouts(EXACT_RUNS + DEEPSPEED_RUNS) - layouts(SAMPLE) == {"hsdp2-dp2"}


def test_every_architecture_is_exact_and_the_sentinel_works(tmp_path):
    save_models(str(tmp_path))
    make_demo(str(tmp_path / "demo"))
    script = str(ROOT / "test/distributed/tensor_parallel_checks.py")
    code, output = forked(4, script, str(tmp_path), ",".join(RUNS), timeout=900)
    assert code == 0, output[-6000:]
    for run in RUNS:  # anywhere in a line: a progress bar may come before it
        assert f"ok {run.replace(':', ' ')} losses" in output, run
    assert output.count("ok check_") == 6
