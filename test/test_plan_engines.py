"""`plan --rollout_engine`: sizes are those of real engines and messages, and idle shares those counted by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from plan_models import meta_model

from trainer.cli import plan
from trainer.errors import UserError
from trainer.model_folders.model_folder import stored_tensors
from trainer.planning import layout_plan
from trainer.planning.plan_engines import (
    SIMULATED,
    cache_bytes,
    engine_needs,
    folder_copies,
    message_bytes,
    predicted_idle,
    received_bytes,
    sync_seconds,
    writing_machines,
)
from trainer.planning.plan_memory import Layout, sizes_of
from trainer.rollout.engines.decoding import CachedRows
from trainer.rollout.engines.hf import HFEngine
from trainer.rollout.engines.on_vllm.vllm_cpu import CPU_BLOCK, cpu_cache_bytes
from trainer.rollout.engines.weight_stream import LastSync, packed

COMMON = {
    "vocab_size": 600,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
CONFIGS = {
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    "Llama": {"num_key_value_heads": 1},
    "DeepseekV3": LATENT,
}


def config_of(name: str):
    return getattr(transformers, f"{name}Config")(**COMMON, **CONFIGS[name])


def plan_of(line: str):
    """(machine, work, rollouts) of a command line."""
    _, machine, _, work, rollouts = plan.parse(["MODEL", *line.split()])
    return machine, work, rollouts


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_copy_and_cache_of_the_hf_engine_have_the_predicted_bytes(tmp_path, name, dtype):
    config_of(name).save_pretrained(tmp_path)
    s = sizes_of(layout_plan.meta_model(str(tmp_path)))
    machine, _, rollouts = plan_of(
        "--gpus 2 --rollout_engine hf --micro_rollout_batch_size 3 --max_len 48 --prompt_len 8"
    )
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    engine = HFEngine(
        str(tmp_path), SimpleNamespace(pad_token_id=0), dtype=kind, device=torch.device("cpu"), batch_size=3
    )
    held = {tensor.data_ptr(): tensor.nbytes for tensor in stored_tensors(engine.model).values()}
    needs = engine_needs(s, machine, rollouts, dtype)
    # buffers of a model, such as the biases of a router, are no parameters
    assert needs.weights == pytest.approx(sum(held.values()), rel=0.001)
    rows = CachedRows(engine.model, [[1] * 8, [2] * 8, [3] * 5], 0, 40)
    with torch.no_grad():
        rows.first()
    cache = sum(room.nbytes for layer in rows.cache.layers for room in layer._rooms)
    assert needs.generating - needs.weights == cache == 3 * 48 * cache_bytes(s, kind.itemsize)
    assert (needs.training, needs.host) == (0, 0), "in lock step, it is only there while it generates"
    _, _, stale = plan_of(
        "--gpus 2 --rollout_engine hf --micro_rollout_batch_size 3 --max_len 48 --prompt_len 8 --max_staleness 1"
    )
    needs = engine_needs(s, machine, stale, dtype)
    assert (needs.training, needs.host) == (needs.generating, needs.weights), "two copies for two ranks"


@pytest.mark.parametrize("name", ["Qwen3", "Llama"])
def test_a_token_in_the_cache_of_vllm_has_the_bytes_that_its_cpu_cache_counts(tmp_path, name):
    config_of(name).save_pretrained(tmp_path)
    s = sizes_of(layout_plan.meta_model(str(tmp_path)))
    blocks = 900 * (10_000 // CPU_BLOCK + 2)  # large enough to be above the least cache
    counted = cpu_cache_bytes(str(tmp_path), torch.bfloat16, 900, 10_000, False)
    assert counted == blocks * CPU_BLOCK * cache_bytes(s, 2)


def test_engines_of_vllm_by_hand():
    s, w = sizes_of(meta_model("qwen3-8b")), 2 * 8_190_735_360
    machine, _, rollouts = plan_of("--gpus 8 --rollout_engine vllm --engine_tensor_parallel_size 2")
    needs = engine_needs(s, machine, rollouts)
    assert (needs.generating, needs.training, needs.host, needs.on_engine) == (40e9, 0, 0, w / 2), (
        "asleep at level 2, an engine keeps nothing on the host"
    )
    token = 2 * 36 * 8 * 128 * 2  # keys and values of 36 layers, 8 heads of 128
    assert needs.cache_tokens == pytest.approx((40e9 - w / 2) / (token / 2))
    machine, _, rollouts = plan_of("--gpus 8 --rollout_engine vllm_server --servers 3 --max_staleness 1 --sync_deltas")
    needs = engine_needs(s, machine, rollouts)
    assert (needs.generating, needs.training, needs.host, needs.server_host) == (0, 0, 2 * w / 8 + w, w)
    assert needs.cache_tokens == pytest.approx((72e9 - w) / token)
    # more ranks than KV heads hold the same heads
    _, _, rollouts = plan_of("--gpus 8 --rollout_engine vllm_server --servers 1 --engine_tensor_parallel_size 16")
    assert engine_needs(s, machine, rollouts).cache_tokens == pytest.approx((72e9 - w / 16) / (token / 8))
    latent = sizes_of(meta_model("deepseek-v3"))
    assert cache_bytes(latent, 2) == 61 * (512 + 64) * 2
    _, _, rollouts = plan_of("--gpus 8 --rollout_engine vllm_server --servers 1 --engine_tensor_parallel_size 8")
    assert "of 8 GPUs needs 167.8 GB on each" in engine_needs(latent, machine, rollouts).problem


def test_bytes_of_messages_are_those_of_a_stream():
    """Changes at random places of the tensors of a model, and all of them."""
    model = transformers.Qwen3ForCausalLM(config_of("Qwen3")).bfloat16()
    s, last, chance = sizes_of(model), LastSync(), torch.Generator().manual_seed(0)
    tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    def sent() -> int:
        updates = [last.update(name, tensor) for name, tensor in tensors.items()]
        return sum(message.nbytes for _, message in packed(updates, 2**26))

    assert sent() == message_bytes(s, 2)
    for share in (0.0, 0.02, 0.3, 0.6):
        for tensor in tensors.values():
            places = torch.randperm(tensor.numel(), generator=chance)[: math.ceil(share * tensor.numel())]
            tensor.view(-1).view(torch.int16)[places] ^= 1
        assert sent() == message_bytes(s, 2, share), share
    assert message_bytes(s, 2, 0.6) == message_bytes(s, 2), "changes of 4 bytes for more than half of the values"
    # measured on a model of 135 M weights by scripts/bench/weight_deltas.py: 10,477,448 bytes at a density of 1.95 %
    shape = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    shape |= {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    with torch.device("meta"):
        s = sizes_of(transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)))
    assert message_bytes(s, 2) == 269_030_016
    assert message_bytes(s, 2, 0.0195) == pytest.approx(10_477_448, rel=0.01)


def test_seconds_of_a_sync_by_hand():
    s, w = sizes_of(meta_model("qwen3-8b")), 2 * 8_190_735_360
    sharded, replicated = Layout("fsdp2", 3, dp_shard=8), Layout("deepspeed", 1, dp_shard=4, tp=2)
    machine, _, lockstep = plan_of("--gpus 8 --rollout_engine hf")
    assert received_bytes(sharded, s, lockstep, 2).bytes == w * 7 / 8
    assert received_bytes(replicated, s, lockstep, 2).bytes == w / 2, "dp ranks have the same weights"
    assert sync_seconds(sharded, s, machine, lockstep) == pytest.approx(w * 7 / 8 / 300e9)
    _, _, served = plan_of("--gpus 8 --rollout_engine vllm_server --servers 24 --engine_tensor_parallel_size 2")
    # three servers of two GPUs get whole weights over one network card
    assert sync_seconds(sharded, s, machine, served) == pytest.approx(w * 7 / 8 / 300e9 + w / 20e9 + 6 * w / 40e9)


def test_the_folder_of_sglang_by_hand():
    """12 servers on 8 ranks of 2 nodes: each rank has one or two, and each node writes the weights once."""
    s, w = sizes_of(meta_model("qwen3-8b")), 2 * 8_190_735_360
    line = "--gpus 8 --nodes 2 --rollout_engine sglang"
    layout = Layout("fsdp2", 3, dp_shard=8)
    machine, _, rollouts = plan_of(f"{line} --servers 12")
    needs = engine_needs(s, machine, rollouts)
    assert (needs.generating, needs.training, needs.host, needs.server_host, needs.on_engine) == (0, 0, 0, 0, w)
    assert (folder_copies(machine, rollouts), writing_machines(machine, rollouts)) == (1, 2)
    gathering = received_bytes(layout, s, rollouts, 2)
    copied = gathering.bytes / gathering.rate(machine) + w / 20e9
    assert sync_seconds(layout, s, machine, rollouts) == pytest.approx(copied + w / 2e9 + w / 2e9)
    machine, _, quick = plan_of(f"{line} --servers 12 --folder_rate 8")
    assert sync_seconds(layout, s, machine, quick) == pytest.approx(copied + w / 4e9)
    for flags, copies, machines in (
        ("--servers 12 --max_staleness 2", 3, 2),
        ("--servers 12 --max_staleness 9", 4, 2),
        ("--servers 1 --max_staleness 2", 1, 1),
    ):
        machine, _, rollouts = plan_of(f"{line} {flags}")
        assert (folder_copies(machine, rollouts), writing_machines(machine, rollouts)) == (copies, machines), flags
    model = meta_model("qwen3-8b")
    for flags, shown in (
        (
            "--servers 12",
            "2 nodes with servers each write 16.4 GB a sync, and each keeps up to 16.4 GB; 12 servers read 16.4 GB each",
        ),
        ("--servers 1", "1 node with servers writes 16.4 GB a sync, and it keeps up to 16.4 GB; 1 server read"),
    ):
        machine, work, rollouts = plan_of(f"{line} {flags}")
        text = layout_plan.report(model, "MODEL", machine, 80, work, rollouts)
        assert f"- --sync_folder: {shown}" in text and "a process of it keeps" not in text


def test_idle_shares_by_hand():
    """Responses of 100 tokens at 10 tokens/s. A rollout has 64 of them: on 16 slots 4 times 10 s."""
    same = "--gpus 2 --rollout_batch_size 16 --n_samples_per_prompt 4 --response_median 100 --response_spread 0 --token_rate 10 "
    same += "--micro_rollout_batch_size 8 --prompt_len 60 "
    for engine in ("hf", "vllm"):  # 64 x 160 tokens train for 20 s, and then the next rollout begins
        machine, _, rollouts = plan_of(same + f"--rollout_engine {engine}")
        idle = predicted_idle(rollouts, machine, 64 * 160 / 20)
        assert idle.seconds == pytest.approx(SIMULATED * 60)
        assert (idle.generating, idle.training) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    machine, _, rollouts = plan_of(same + "--rollout_engine vllm_server --servers 4 --max_staleness 2")
    idle = predicted_idle(rollouts, machine, 64 * 160 / 20)  # 32 slots: 20 s, while the last rollout is trained
    assert idle.seconds == pytest.approx(SIMULATED * 20 + 20)


@pytest.mark.parametrize(("held", "waves"), [(10, 4), (8, 4), (4.5, 8), (2, 16), (0.5, 32)])
def test_a_cache_of_fewer_responses_than_asked_generates_fewer_at_a_time(held, waves):
    """64 responses of 100 tokens at 10 tokens/s on 2 engines that are asked for 8 at a time each."""
    machine, _, rollouts = plan_of(
        "--gpus 2 --rollout_batch_size 16 --n_samples_per_prompt 4 --response_median 100 --response_spread 0 --token_rate 10 "
        "--micro_rollout_batch_size 8 --prompt_len 60 --rollout_engine vllm"
    )
    idle = predicted_idle(rollouts, machine, 64 * 160 / 20, held * rollouts.longest)
    assert idle.seconds == pytest.approx(SIMULATED * (10 * waves + 20))


def test_the_report_simulates_what_the_cache_holds():
    """40 GB for an engine of Qwen3-8B hold 23.6 GB of cache: 39 responses of 4096 tokens."""
    model = meta_model("qwen3-8b")
    for asked, shown in ((100, 39), (8, 8)):
        machine, work, rollouts = plan_of(f"--gpus 8 --rollout_engine vllm --micro_rollout_batch_size {asked}")
        text = layout_plan.report(model, "MODEL", machine, 80, work, rollouts)
        assert "or 39 responses of full length" in text and f"{shown} responses at a time of 40 tokens/s" in text
        assert "while it trains, and 0.0 GB more of host memory" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--servers 3", "--servers: 3 without --rollout_engine"),
        ("--sync_deltas", "--sync_deltas: True without --rollout_engine"),
        ("--rollout_engine hf --engine_memory 0.4", "--engine_memory: 0.4 with --rollout_engine hf"),
        ("--rollout_engine vllm --max_staleness 1", "--max_staleness: 1 with --rollout_engine vllm"),
        ("--rollout_engine vllm --engine_tensor_parallel_size 3", "--engine_tensor_parallel_size: 3 .*a divisor of 8"),
        ("--rollout_engine vllm_server", "--servers: 0"),
        ("--rollout_engine sglang", "--servers: 0"),
        ("--rollout_engine sglang --servers 1 --sync_deltas", "--sync_deltas: True with --rollout_engine sglang"),
        (
            "--rollout_engine vllm_server --servers 1 --folder_rate 3",
            "--folder_rate: 3.0 with --rollout_engine vllm_server",
        ),
        ("--folder_rate 3", "--folder_rate: 3.0 without --rollout_engine"),
        ("--rollout_engine vllm_server --servers 1 --changed_share 0.1", "--changed_share: 0.1 without --sync_deltas"),
        ("--rollout_engine hf --token_rate 0", "--token_rate: 0"),
        ("--rollout_engine hf --prompt_len 4096", "--prompt_len: 4096"),
    ],
)
def test_flags_that_mean_nothing_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        plan_of(f"--gpus 8 {flags}")


def test_an_engine_without_room_rules_every_layout_out():
    model = meta_model("qwen3-8b")
    for flags, problem in (
        ("--rollout_engine hf --micro_rollout_batch_size 512", "generate needs"),
        ("--rollout_engine vllm --engine_memory 0.1", "an engine of 1 GPU needs 16.4 GB"),
    ):
        machine, work, rollouts = plan_of(f"--gpus 8 {flags}")
        choices = layout_plan.make_plan(model, machine, work, rollouts)
        assert all(choice.problem for choice in choices) and any(problem in choice.problem for choice in choices)
        assert "Rollouts by" not in layout_plan.report(model, "MODEL", machine, 80, work, rollouts)
