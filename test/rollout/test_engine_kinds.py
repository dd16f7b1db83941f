"""The embedded engine with models that plain key-value caches do not fit: states of Mamba and linear attention, no sdpa.

Tiny random ones: against plain forward passes without a cache, and through train_ppo on two ranks. `PARITY=full` compiles
their decoding, too (half an hour).
"""

import json
import shutil

import pytest
import torch
import transformers
from launch import FULL, read_steps, train_many
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.datasets.demos.demo import make_demo
from trainer.rollout.engines.decoding import CachedRows, UncachedRows
from trainer.rollout.engines.hf import HFEngine
from trainer.rollout.engines.sampling import Sampling, sample_seed

SIZES = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "pad_token_id": 0, "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
CONFIGS = {
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(
        **SIZES, num_hidden_layers=4, linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8,
        linear_num_key_heads=2, linear_num_value_heads=4,
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **SIZES, layers_block_type=["mamba", "attention", "mlp", "mamba"], mamba_num_heads=4, mamba_head_dim=8,
        ssm_state_size=8, n_groups=1, chunk_size=16, conv_kernel=4,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **SIZES, num_hidden_layers=6, global_head_dim=16, num_global_key_value_heads=1, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=300, sliding_window=16, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 3,
    ),
    "falcon_h1": lambda: transformers.FalconH1Config(
        **SIZES, **{**MAMBA, "mamba_n_heads": 4}, num_hidden_layers=2, mamba_d_ssm=32,
        ssm_multipliers=[0.5, 0.7, 1.1, 1.3, 1.7],
    ),
    "falcon_h1-norm": lambda: transformers.FalconH1Config(
        **SIZES, **{**MAMBA, "mamba_n_heads": 4}, num_hidden_layers=2, mamba_d_ssm=32, mamba_rms_norm=True,
    ),
    "lfm2": lambda: transformers.Lfm2Config(**SIZES, num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2),
    "bamba": lambda: transformers.BambaConfig(**SIZES, **MAMBA, num_hidden_layers=3, attn_layer_indices=[1]),
    "recurrent_gemma": lambda: transformers.RecurrentGemmaConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, lru_width=32,
        attention_window_size=16, pad_token_id=0,
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=1,
        chunk_size=16, pad_token_id=0, initializer_range=0.2,
    ),
    "deepseek_v32": lambda: transformers.DeepseekV32Config(  # attends to the 4 tokens that its indexer selects
        **{**SIZES, "num_key_value_heads": 4, "head_dim": 4}, num_hidden_layers=2, first_k_dense_replace=2,
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4,
        index_n_heads=8, index_head_dim=8, index_topk=4,
    ),
}  # fmt: skip
UNCACHED = {"nemotron_h", "falcon_h1-norm", "recurrent_gemma", "mamba2", "deepseek_v32"}
CASES = [(kind, False) for kind in CONFIGS]
if FULL:
    CASES += [(kind, True) for kind in CONFIGS if kind not in UNCACHED]
# one is shorter than the convolutions, one longer than the windows and chunks; two are equal
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11], list(range(40, 62)), [5, 6, 7]]
TRAINED = ("qwen3_5", "nemotron_h", "gpt_oss", "gemma4", "lfm2")
BACKENDS = {"fsdp2": ["fsdp2"], "z3": ["deepspeed", "--zero_stage", "3"]}


def make(kind: str, folder) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    make_demo(str(folder / "demo"))
    return folder


@pytest.mark.parametrize("kind, compiled", CASES)
def test_log_probs_are_those_of_a_plain_forward_pass(kind, compiled, demo, tmp_path):
    model, tokenizer = make(kind, tmp_path), AutoTokenizer.from_pretrained(demo / "demo/model")
    sampling, seeds = Sampling(0.8, 24, tuple(range(1, 40))), [sample_seed(0, 0, n) for n in range(len(PROMPTS))]
    tokens = {}
    for batch_size in (8, 1):
        options = {"dtype": torch.float32, "device": torch.device("cpu"), "batch_size": batch_size}
        engine = HFEngine(str(tmp_path), tokenizer, **options, compiled=compiled)
        weights = {name: value for name, value in model.state_dict().items() if name not in model.all_tied_weights_keys}
        engine.update_weights(weights.items())
        assert engine.kind_of_rows is (UncachedRows if kind in UNCACHED else CachedRows)
        completions = engine.generate(PROMPTS, sampling, seeds)
        tokens[batch_size] = [completion.token_ids for completion in completions]
        for prompt, completion in zip(PROMPTS, completions):
            with torch.no_grad():
                ids = torch.tensor([prompt + completion.token_ids])
                logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            expected = (logits / 0.8).log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-4)
    assert tokens[8] == tokens[1] and max(map(len, tokens[8])) > 5


@pytest.fixture(scope="module")
def trained(demo):
    """Two ranks, three steps of each kind on each backend."""
    lines = []
    for kind in TRAINED:
        make(kind, demo / kind)
        for path in (demo / "demo/model").iterdir():
            if path.name.startswith(("tokenizer", "chat_template")):
                shutil.copy(path, demo / kind)
        for name, backend in BACKENDS.items():
            line = ["train_ppo", "--pretrain", f"{demo}/{kind}", "--dataset", f"{demo}/demo/prompts.jsonl"]
            line += ["--label_key", "label", "--reward_func", f"{demo}/digits.py", "--param_dtype", "fp32", "--no_save"]
            line += ["--max_samples", "16", "--prompt_max_len", "64", "--generate_max_len", "12"]
            line += ["--rollout_batch_size", "4", "--n_samples_per_prompt", "2", "--advantage_estimator", "dr_grpo"]
            line += ["--train_batch_size", "8", "--micro_train_batch_size", "2", "--learning_rate", "1e-4"]
            lines.append([*line, "--max_steps", "3", "--backend", *backend, "--output_dir", f"{demo}/{kind}-{name}"])
    body = "    return [sum(word in label for word in r) / 32 for r, label in zip(responses, labels)]\n"
    (demo / "digits.py").write_text(f"def reward_func(prompts, responses, labels):\n{body}")
    output = train_many(2, lines, demo, timeout=400)
    assert "rollout engine: no cache for NemotronHForCausalLM, so each token reads the whole text again" in output
    return demo


@pytest.mark.parametrize("kind", TRAINED)
def test_the_log_probs_of_the_engine_are_those_of_training(trained, kind):
    first, second = (read_steps(trained / f"{kind}-{name}") for name in BACKENDS)
    assert len(first) == len(second) == 3
    for row, other in zip(first, second):
        assert row["rollout_logprob_diff_max"] < 1e-4 and row["ratio_deviation"] == 0
        assert row["batch_hash"] == other["batch_hash"], "the same samples on both"
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4) and row["grad_norm"] > 0
    rows = [json.loads(line) for line in (trained / f"{kind}-fsdp2/rollouts.jsonl").read_text().splitlines()]
    assert len({tuple(row["response_ids"]) for row in rows}) == len(rows) == 24
