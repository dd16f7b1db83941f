"""Tensor parallelism of unusual configs: odd head counts, one KV head, odd vocabularies, layer patterns, experts in the layer."""

from launch import ROOT, in_fork

NAMES = (
    "llama-9-heads", "llama-321-tied", "gemma3-1-kv-head", "gemma4-experts", "gemma4-keys-as-values", "gpt_oss-1-kv-head",
    "qwen3_5-3-key-heads", "nemotron_h-experts", "falcon_h1-3-heads", "llama4-nope", "gpt2-3-heads", "deepseek_v3-3-heads",
)  # fmt: skip


def test_the_sharded_model_is_the_whole_one():
    code, output = in_fork(str(ROOT / "test/distributed/unusual_plan_checks.py"), *NAMES, timeout=300)
    assert code == 0, output[-6000:]
    assert [line.split()[1] for line in output.splitlines() if line.startswith("ok ")] == list(NAMES), output
