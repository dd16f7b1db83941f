"""Experts shared out over ranks: every mixture equals the plain loop. The runs are in expert_parallel_checks.py."""

import json
import sys
import types

import pytest
import torch
from launch import FULL, ROOT, in_fork, run_process
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from scripts.zoo_models import tiny_config
from trainer.distributed.mesh_sizes import MeshSizes
from trainer.errors import UserError
from trainer.model_parallel import expert_parallel
from trainer.model_parallel.expert_parallel import local_experts_forward, validate_experts
from trainer.model_parallel.tensor_parallel import resolve_tp_plan
from trainer.strategies.deepspeed import DeepspeedStrategy
from trainer.strategies.on_deepspeed.autotp_layers import validate_experts as validate_autotp
from trainer.strategies.options import StrategyOptions

# One of each kind of router and of expert weights. `scripts/docs/mixtures_table.py` runs all families in all layouts.
MODELS = ("qwen3_moe", "deepseek_v3", "gpt_oss", *["mixtral"] * FULL)
HYBRID = ("qwen3_next", "granitemoehybrid")
OFTEN = ("ep2-ring2-packed",)  # the script also takes any other cell
ONCE = ("ep2-tp2", "save", "ep2-lora-experts", "ep2-once", "ep4-gathered", "fsdp2-3r")
ONCE += (
    ("ep4-packed", "ep2-hsdp2-packed", "tp2-ring2", "tp2-z3-gathered") if FULL else ()
)  # `PARITY=full`, which also resumes all on all
# DeepSpeed cuts them over tp. The first cell of a part is the one that "save" judges.
PARTS = {",".join(HYBRID): ("tp2-z3-packed",), "mixtral,gpt_oss" if FULL else "mixtral": ("tp2-z2", "save")}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(verdicts by model and cell, verdicts of resumed checkpoints, losses of DPO by layout, facts of an adapter)"""
    folder = tmp_path_factory.mktemp("experts")
    parts = {",".join(MODELS): OFTEN, "qwen3_moe": ONCE, **PARTS}
    parts = [f"{models}:{','.join(cells)}" for models, cells in parts.items()]
    parts += ["qwen3_moe", "all"] if FULL else ["qwen3_moe"]
    script = str(ROOT / "test/distributed/expert_parallel_checks.py")
    code, output = in_fork(script, str(folder), *parts, timeout=900)
    assert code == 0, output[-6000:]
    return tuple(json.loads((folder / f"{name}.json").read_text()) for name in ("rows", "resumed", "frozen", "adapter"))


@pytest.mark.parametrize("model", dict.fromkeys((*MODELS, "mixtral", *HYBRID)))
def test_every_mixture_equals_the_plain_loop(found, model):
    cells = found[0][model]
    expected = {*(OFTEN if model in MODELS else ()), *(ONCE if model == "qwen3_moe" else ())}
    assert set(cells) == expected.union(*(cells for models, cells in PARTS.items() if model in models.split(",")))
    assert {name: cell for name, cell in cells.items() if cell["verdict"] != "pass"} == {}
    assert max(cell.get("worst_expert", 0.0) for cell in cells.values()) <= 1e-4


def test_checkpoints_resume_on_every_layout(found):
    assert len(found[1]) == (81 if FULL else 6)
    for pair, worst in found[1].items():
        source, target = pair.split(" to ")
        assert worst["loss"] <= 1e-5 and worst["grad_norm"] <= 1e-4 and worst["weights"] <= 1e-4, (pair, worst)
        assert worst["bitwise"] or source != target, pair


def test_a_frozen_reference_is_cut_like_the_policy(found):
    fsdp2, tp = (found[2][name] for name in ("fsdp2", "tp2-z3"))
    assert tp == pytest.approx(fsdp2, rel=1e-5) and len(tp) == 2 and abs(tp[1] - tp[0]) > 1e-3


def test_an_adapter_on_experts_is_merged_by_the_formula(found):
    assert found[3]["error"] <= 1e-7 and found[3]["update"] > 1e-4


class NoWaits(TorchDispatchMode):
    """Raises for an operation whose result has a size that a GPU would have to tell the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func is torch.ops.aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        name = func.overloadpacket.__name__
        assert not by_mask and name not in ("bincount", "nonzero", "masked_select", "_local_scalar_dense"), name
        return func(*args, **(kwargs or {}))


def test_the_exchange_of_tokens_has_the_sums_of_its_experts_and_waits_once(monkeypatch):
    """Two tp ranks with three experts each, one after the other. An expert multiplies by its weight; one has no token."""
    monkeypatch.setattr(expert_parallel.Sum, "apply", lambda tensor, group: tensor)
    torch.manual_seed(0)
    weights, hidden, gates = torch.randn(6, 8), torch.randn(10, 8), torch.rand(10, 2)
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(10)])  # expert 5 has none
    total = 0
    for rank in range(2):
        group = types.SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
        own = weights[3 * rank : 3 * rank + 3]
        module = types.SimpleNamespace(num_experts=3, _parameters={})
        forward = lambda tokens, ids, ones, own=own: tokens * own[ids[:, 0]]  # noqa: E731
        with NoWaits():
            total = total + local_experts_forward(module, forward, None, group, hidden, chosen, gates)
    expected = sum(gates[:, [k]] * hidden * weights[chosen[:, k]] for k in range(2))
    assert torch.allclose(total, expected, atol=1e-6)


def test_no_rank_holds_more_than_its_share():
    code, output = run_process([sys.executable, str(ROOT / "test/distributed/expert_memory.py")])
    assert code == 0, output[-3000:]
    ratios = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("ratio")]
    assert len(ratios) == 5 and max(ratios) <= 1.1, output


def check(name: str, ep: int, **sizes: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(name))
    validate_experts(model, ep, MeshSizes(**{"dp_replicate": 1, "dp_shard": 1, "sp": 1, "tp": 1} | sizes))


def test_layouts_that_do_not_fit_are_refused_in_one_line():
    check("qwen3_moe", 4, dp_shard=2, sp=2)
    check("qwen3_moe", 2, dp_shard=16)  # 2 experts on 8 ranks: each is cut over 4
    with pytest.raises(UserError, match=r"3 does not divide the 4 ranks .* \(allowed: 1, 2, 4\)"):
        check("qwen3_moe", 3, dp_shard=2, sp=2)
    with pytest.raises(UserError, match="8 does not divide the 4 experts of Qwen3MoeForCausalLM"):
        check("qwen3_moe", 8, dp_shard=8)
    with pytest.raises(UserError, match=r"5 ranks cannot share an expert tensor .* \(2, 48, 32\)"):
        check("qwen3_moe", 2, dp_shard=10)
    with pytest.raises(UserError, match="--expert_parallel_size: LlamaForCausalLM has no experts"):
        check("llama", 2, dp_shard=2)
    check("qwen3_moe", 2, dp_shard=2, tp=2)
    with pytest.raises(
        UserError, match=r"--expert_parallel_size \* --tensor_parallel_size: 2 \* 4 does not divide the 4 exp"
    ):
        check("qwen3_moe", 2, dp_shard=2, tp=4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    with pytest.raises(
        UserError, match=r"--tensor_parallel_size: 8 does not divide the 4 experts .* \(allowed: 1, 2, 4\)"
    ):
        validate_autotp(model, 8)


def test_the_plan_of_a_mixture_has_whole_experts_and_replicated_routers():
    def plan(name: str, **options) -> dict[str, str]:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config(name))
        found = resolve_tp_plan(model, **options)
        return {k.removeprefix("model.layers.*."): style for k, style in found.items() if ".mlp" in k}

    qwen3 = {"mlp.experts": "experts", "mlp.gate": "replicated"}
    assert plan("qwen3_moe") == plan("qwen3_moe", use_hf_tp_plan=True) == qwen3
    shared = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    assert plan("qwen3_5_moe_text") == {
        **qwen3,
        "mlp.shared_expert": "block_input",
        "mlp.shared_expert_gate": "replicated",
        **{f"mlp.shared_expert.{name}": style for name, style in shared.items()},
    }
    assert plan("gpt_oss") == {"mlp.experts": "experts", "mlp.router": "replicated"}
    with pytest.raises(UserError, match="--sequence_parallel: with Qwen3MoeForCausalLM"):
        plan("qwen3_moe", sequence_parallel=True)


def test_backends_and_flags_that_do_not_go_with_it():
    with pytest.raises(UserError, match="--expert_parallel_size 2 with --backend deepspeed"):
        DeepspeedStrategy(StrategyOptions(expert_parallel_size=2))
    with pytest.raises(UserError, match="--lora_experts with --zero_stage 3"):
        DeepspeedStrategy(StrategyOptions(lora_rank=4, lora_experts=True, zero_stage=3))
