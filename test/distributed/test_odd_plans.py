"""Tensor parallelism of models for which transformers has no plan or an odd one. The runs are in odd_plan_checks.py.

Each model runs on one backend, in turn; with `PARITY=full` on both.
"""

import odd_plan_models
import pytest
import torch
from launch import FULL, ROOT, forked
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

from trainer.errors import UserError
from trainer.model_parallel.expert_parallel import are_experts
from trainer.model_parallel.tensor_parallel import resolve_tp_plan


def resolve(config) -> dict[str, str]:
    with torch.device("meta"):
        return resolve_tp_plan(AutoModelForCausalLM.from_config(config))


def test_the_same_name_may_be_a_scan_in_one_layer_and_attention_in_another():
    plan = resolve(odd_plan_models.make_config("nemotron_h"))  # mamba, mlp, attention, mlp
    mixers = [plan[f"model.layers.{number}.mixer"] for number in range(4)]
    assert mixers == ["replicated_block", "block_input", "block_input", "block_input"]


def test_a_gated_delta_net_gathers_its_projections_and_keeps_the_rest_whole():
    plan = resolve(odd_plan_models.make_config("qwen3_5"))
    inside = {pattern for pattern in plan if pattern.startswith("model.layers.*.linear_attn.")}
    assert {plan[pattern] for pattern in inside} == {"colwise_gather_output"}
    assert plan["model.layers.*.linear_attn"] == "replicated_block"
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise"


def test_a_mixture_of_experts_is_no_whole_block():
    config = odd_plan_models.make_config("granitemoehybrid").to_dict()
    config = GraniteMoeHybridConfig(**config | {"num_local_experts": 4, "num_experts_per_tok": 2})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert resolve_tp_plan(model)["model.layers.*.block_sparse_moe.experts"] == "experts"
    for module in filter(are_experts, model.modules()):
        del module._is_expert_parallel  # as in a model whose experts transformers does not stack
    with pytest.raises(UserError, match=r"does not cover the parameter model.layers.0.block_sparse_moe"):
        resolve_tp_plan(model)


def test_a_vision_tower_stays_whole():
    plan = resolve(odd_plan_models.make_config("gemma4_images"))
    towers = {style for pattern, style in plan.items() if "vision" in pattern}
    assert towers == {"replicated"} and plan["model.language_model.layers.*.self_attn.q_proj"] == "colwise"


def test_every_model_is_exact(tmp_path):
    for name in odd_plan_models.MODELS:
        odd_plan_models.save_model(name, str(tmp_path))
    script = str(ROOT / "test/distributed/odd_plan_checks.py")
    code, output = forked(2, script, str(tmp_path), timeout=400)
    assert code == 0, output[-6000:]
    runs = [(name, layout) for name in odd_plan_models.MODELS for layout in odd_plan_models.layouts_of(name)]
    assert len(runs) == len(odd_plan_models.MODELS) * (2 if FULL else 1)
    for name, layout in [*runs, *((name, layout) for name, layout, _ in odd_plan_models.EXTRA)]:
        assert f"ok {name} {layout} losses" in output, (name, layout)
    assert "ok refused" in output
