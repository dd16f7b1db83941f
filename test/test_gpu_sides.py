"""What the trainer asks of CUDA besides kernels: each call, its order and its device. No GPU is here, so calls are noted.

docs/gpu.md lists what each test executes.
"""

import contextlib
import mmap
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig, masking_utils

from trainer.checkpoints import run_state
from trainer.checkpoints.shards import whole_shard
from trainer.cli import serve_engine
from trainer.datasets.batches.global_batches import copied
from trainer.datasets.demos.demo import make_demo
from trainer.distributed import mesh, pinned_memory
from trainer.distributed.host_offload import keep_on_host
from trainer.errors import UserError
from trainer.flags.common_flags import SFTArguments
from trainer.flags.parse_flags import from_flat
from trainer.flags.rl_flags import RolloutArguments
from trainer.metrics import Rows
from trainer.model_parallel import expert_parallel
from trainer.models.attention import flash
from trainer.models.attention.flash import use_flash_attention_3
from trainer.planning import auto_layout, doctor_findings, doctor_machine, plan_inputs
from trainer.rollout.engines.hf import HFEngine
from trainer.rollout.engines.on_vllm import vllm
from trainer.rollout.engines.on_vllm.vllm import VLLMEngine
from trainer.runs import run_setup
from trainer.runs.features import reference
from trainer.runs.rl import rl_engines
from trainer.runs.run_setup import kernels_line, set_up, set_up_gpu
from trainer.training import loop
from trainer.training.checkpointing import Progress, SavePolicy

CARD = torch.device("cuda", 1)


class OnCuda(torch.Tensor):
    """A tensor that says it is on CUDA."""

    is_cuda = True


@pytest.fixture
def calls(monkeypatch):
    """The calls of functions that need a GPU, in order."""
    found = []

    def note(owner, name, result=None):
        monkeypatch.setattr(
            owner, name, lambda *args, **kwargs: (found.append((name, *args, *kwargs.values())), result)[1]
        )

    found_and_note = SimpleNamespace(found=found, note=note)
    note(torch.cuda, "is_available", True)
    note(torch.cuda, "device_count", 2)
    note(torch.cuda, "set_device")
    found.clear()
    return found_and_note


def test_a_rank_takes_its_gpu_before_it_joins_the_process_group(calls, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    calls.note(dist, "init_process_group")
    calls.note(dist, "get_world_size", 1)
    for host_tensors, backend in ((False, "nccl"), (True, "cpu:gloo,cuda:nccl")):
        calls.found.clear()
        mesh.start_process_group(CARD, host_tensors=host_tensors)
        assert calls.found == [("set_device", CARD), ("init_process_group", backend, CARD), ("get_world_size",)]


def test_fp32_is_exact_also_in_convolutions(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    set_up_gpu(adam_offload=False, vllm=True)
    assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32


def test_the_random_state_of_the_gpu_is_saved_and_restored(calls):
    state = torch.arange(16, dtype=torch.uint8)
    calls.note(torch.cuda, "get_rng_state", state)
    calls.note(torch.cuda, "set_rng_state")
    saved = run_state.random_states(CARD)
    run_state.restore_random_states(saved, CARD)
    (_, device), (_, restored, target) = calls.found
    assert device == target == CARD and restored.equal(state) and restored.device.type == "cpu"
    run_state.restore_random_states(saved, torch.device("cpu"))  # a run that goes on without a GPU
    assert len(calls.found) == 2


def test_a_copy_to_a_gpu_is_pinned_and_nobody_waits_for_it(monkeypatch):
    given = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: (given.append("pinned"), tensor)[1])
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *args, **options: given.append((*args, options)))
    copied(torch.ones(3), CARD)
    copied(torch.ones(3), torch.device("cpu"))
    assert given == ["pinned", (CARD, {"non_blocking": True}), (torch.device("cpu"), {"non_blocking": True})]


@pytest.fixture
def pins(monkeypatch):
    """Calls of cudaHostRegister and cudaHostUnregister, as (name, bytes or None). Pinned memory of torch has no bytes."""
    found, empty = [], torch.empty

    def ours(*shape, pin_memory=False, **options):
        found.extend([("torch's own", None)] if pin_memory else ())
        return empty(*shape, **options)

    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: found.append(("registered", size)),
        cudaHostUnregister=lambda address: found.append(("released", None)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch, "empty", ours)
    return found


def test_pinned_memory_is_as_large_as_needed_and_serves_again(pins):
    pool, page = pinned_memory.PinnedPool(), mmap.PAGESIZE
    first = pool.empty_like(torch.zeros(20001, 5))
    pages = -(-20001 * 5 * 4 // page) * page
    assert pins == [("registered", pages)] and pages < 20001 * 5 * 4 + page and first.shape == (20001, 5)
    first.fill_(3)
    view = first[7:]
    del first
    pool.empty_like(torch.zeros(20000, 5))  # the view still holds the first memory
    assert pins == [("registered", pages)] * 2 and (view == 3).all()
    del view
    pool.empty_like(torch.zeros(20001, 5))
    assert len(pins) == 2  # memory that is free is taken again
    pool.empty_like(torch.zeros(30000, 5))  # none is enough: the largest is released for it
    assert pins[2:] == [("released", None), ("registered", -(-30000 * 5 * 4 // page) * page)]
    pool.empty_like(torch.zeros(3))
    assert pins[4:] == [("torch's own", None)]
    assert pool.empty_like(torch.zeros(30000, 5), pin_memory=False).shape == (30000, 5) and len(pins) == 5


def test_a_background_save_is_staged_in_pinned_memory_with_one_wait(calls, pins):
    calls.note(torch.cuda, "synchronize")
    on_gpu, on_host = torch.arange(3.0).as_subclass(OnCuda), torch.arange(3.0) + 5
    shards = [whole_shard("a", on_gpu, True), whole_shard("b", on_host, True), whole_shard("c", on_host, False)]
    staged = run_state._staged(shards, CARD)
    assert pins == [("torch's own", None)] and calls.found == [("synchronize", CARD)]
    on_gpu.zero_(), on_host.zero_()
    assert [shard.tensor.tolist() for shard in staged] == [
        [0, 1, 2],
        [5, 6, 7],
        [0, 0, 0],
    ]  # c is written by another rank
    run_state._staged(shards, torch.device("cpu"))
    assert len(calls.found) == 1


def test_frozen_weights_wait_in_pinned_memory(pins):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(300, 200))
    expected = [parameter.clone() for parameter in model.parameters()]
    keep_on_host(model, torch.device("meta"))
    assert pins == []
    keep_on_host(model, CARD)
    pages = -(-300 * 200 * 4 // mmap.PAGESIZE) * mmap.PAGESIZE
    assert pins == [("torch's own", None), ("registered", pages), ("torch's own", None)]
    assert all(parameter.equal(own) for parameter, own in zip(model.parameters(), expected))


def test_ranks_on_one_gpu_are_named(calls, monkeypatch):
    calls.note(torch.cuda, "get_device_properties", SimpleNamespace(uuid="GPU-1"))
    calls.note(dist, "get_world_size", 2)
    others = iter(["GPU-2", "GPU-1"])

    def all_gather_object(cards, own):
        cards[:] = [own, (own[0], next(others))]

    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    assert doctor_findings._shared_gpus(CARD) is None
    assert doctor_findings._shared_gpus(CARD).startswith("ranks 0, 1 see the same GPU of ")
    assert ("set_device", CARD) in calls.found and ("get_device_properties", CARD) in calls.found


@pytest.mark.parametrize(
    ("name", "capability", "state", "text"),
    [("H100", (9, 0), "ok", "2 x H100, 80 GiB each"), ("T4", (7, 5), "note", "T4 has no bf16"), ("GB999", (13, 0), "FAIL", "GB999 has")],
)  # fmt: skip
def test_the_doctor_reads_the_cards(calls, name, capability, state, text):
    facts = SimpleNamespace(name=name, major=capability[0], minor=capability[1], total_memory=80 << 30)
    calls.note(torch.cuda, "get_device_properties", facts)
    calls.note(torch.cuda, "get_arch_list", ["sm_75", "sm_80", "sm_90", "sm_100a", "compute_90"])
    finding = doctor_machine.cuda()
    assert finding.state == state and text in finding.text, finding


def test_vllm_needs_a_gpu_for_each_rank(calls, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    setup = SimpleNamespace(strategy=SimpleNamespace(device=CARD))
    run = SimpleNamespace(args=SimpleNamespace(rollout=RolloutArguments()), setup=setup)
    with pytest.raises(UserError, match="vllm with 4 ranks on 2 GPUs"):
        rl_engines.vllm_engine(run, {})


def test_the_server_of_vllm_takes_its_share_of_a_gpu(calls):
    args = serve_engine.EngineArguments(pretrain="model", max_len=64, gpu_memory_utilization=0.7)
    flags = serve_engine.server_flags(args)
    assert (
        flags[-4:] == ["--gpu-memory-utilization", "0.7", "--moe-backend", "triton"] and "--enforce-eager" not in flags
    )


def test_vllm_chooses_its_batch_on_a_gpu_and_strict_mode_rests_while_it_starts(calls, monkeypatch, tmp_path):
    """vLLM itself is not needed: what it is asked for is noted. Random states and strict mode are as before."""
    LlamaConfig().save_pretrained(tmp_path)
    calls.note(torch.cuda, "get_rng_state", torch.zeros(16, dtype=torch.uint8))
    calls.note(torch.cuda, "set_rng_state")
    given, detached = {}, []

    def start(**options):
        given.update(options, strict=torch.are_deterministic_algorithms_enabled())
        core = SimpleNamespace(_finalizer=SimpleNamespace(detach=lambda: detached.append(True)))
        return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))

    monkeypatch.setattr(vllm, "_start", start)
    torch.use_deterministic_algorithms(True)
    try:
        VLLMEngine(str(tmp_path), dtype=torch.bfloat16, device=CARD, batch_size=4, max_len=64, tp_size=2)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert given["enable_sleep_mode"] and given["gpu_memory_utilization"] == 0.5 and given["tensor_parallel_size"] == 2
    assert not given["strict"] and not {"max_num_seqs", "enforce_eager"} & given.keys() and detached == [True]
    assert [call[0] for call in calls.found] == ["get_rng_state", "set_rng_state"]


def test_engines_give_the_gpu_back_while_training(calls):
    calls.note(torch.cuda, "empty_cache")
    hf, model = HFEngine.__new__(HFEngine), torch.nn.Linear(3, 2)
    model.all_tied_weights_keys = {}
    hf.model, hf.device, hf.dropped = model, CARD, []
    for _ in range(2):  # twice is once
        hf.sleep()
    assert [p.untyped_storage().nbytes() for p in model.parameters()] == [0, 0]
    for _ in range(2):
        hf.wake()
    assert [p.untyped_storage().nbytes() for p in model.parameters()] == [24, 8]  # update_weights fills them
    assert calls.found == [("empty_cache",)] * 2
    calls.found.clear()


@pytest.mark.parametrize("update, answer", [("update_weights", ("sum", 8)), ("update_slices", ({}, 8))])
def test_vllm_drops_its_weights_and_wakes_its_cache_behind_the_next_sync(calls, monkeypatch, update, answer):
    """The tensors of a sync need room, so the cache must not have it yet. The weights are renewed by the sync, whole."""
    engine = VLLMEngine.__new__(VLLMEngine)
    engine.device, engine._asleep, engine.slices, engine.ranks_per_engine, engine.dtype = (
        CARD,
        [],
        None,
        1,
        torch.bfloat16,
    )
    engine._llm = SimpleNamespace(
        sleep=lambda level: calls.found.append(("sleep", level)),
        wake_up=lambda tags: calls.found.append(("wake_up", *tags)),
        apply_model=lambda function: calls.found.append(("update",)) or [answer],
    )
    monkeypatch.setattr(vllm, "checksum_of_slices", lambda *sums: "sum")
    getattr(engine, update)([])  # the first sync of a run: nothing sleeps
    for act in (engine.sleep, engine.sleep, engine.wake, engine.wake):  # twice is once
        act()
    assert getattr(engine, update)([]) == ("sum", 8)
    engine.sleep()
    woken = [("sleep", 2), ("wake_up", "weights"), ("update",), ("wake_up", "kv_cache"), ("sleep", 2)]
    assert calls.found == [("update",), *woken]


def test_ranks_on_one_gpu_share_its_memory_in_a_plan(calls, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    calls.note(torch.cuda, "get_device_properties", SimpleNamespace(total_memory=80 * plan_inputs.GB))
    machine, reserve = auto_layout.machine_of_ranks(CARD), plan_inputs.RESERVE
    assert (machine.gpus, machine.nodes) == (8, 2) and machine.room == pytest.approx((40 - reserve) * plan_inputs.GB)
    assert ("get_device_properties", CARD) in calls.found


def test_the_memory_of_a_reference_is_free_before_the_policy_trains(calls, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    calls.note(torch.cuda, "empty_cache")
    calls.note(dist, "get_world_size", 1)
    setup = SimpleNamespace(strategy=SimpleNamespace(device=CARD, is_rank_0=lambda: True), folder=str(tmp_path))
    parts = {"args": SimpleNamespace(), "references": [(str(tmp_path), None)]}
    run = SimpleNamespace(setup=setup, samples=None, eval_samples=None, **parts)
    reference.add_log_probs(run)
    assert run.samples is None
    assert calls.found[-1] == ("empty_cache",)


def test_a_run_on_a_gpu_is_set_up_for_it(calls, monkeypatch, tmp_path):
    make_demo(str(tmp_path))
    strategy = SimpleNamespace(device=CARD, sizes=SimpleNamespace(dp=1, world_size=1))
    strategy.setup_distributed = lambda: calls.found.append(("setup_distributed",))
    monkeypatch.setattr(run_setup, "get_strategy", lambda backend, options: strategy)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", masking_utils.find_packed_sequence_indices)
    calls.note(dist, "get_world_size", 1)
    calls.note(dist, "get_rank", 0)
    calls.note(run_setup, "set_up_gpu")
    calls.note(run_setup, "use_flash_attention_3", True)
    strategy.print = lambda line: calls.found.append(("print", line))
    flags = {
        "pretrain": str(tmp_path / "model"),
        "adam_offload": True,
        "deterministic": False,
        "micro_train_batch_size": 8,
    }
    args = from_flat(SFTArguments, flags)
    setup = set_up("train_sft", args, longest=8)
    made = [call for call in calls.found if call[0].startswith("set")]
    assert made == [("setup_distributed",), ("set_up_gpu", True, False)] and setup.attention == "sdpa"
    assert ("use_flash_attention_3", CARD) in calls.found
    assert [call[1] for call in calls.found if call[0] == "print"] == [kernels_line(True, False)]
    args.layout.cpu_matmul = "mkl"
    with pytest.raises(UserError, match="--cpu_matmul mkl on a GPU"):
        set_up("train_sft", args, longest=8)


@pytest.fixture
def flash_attention_3(monkeypatch):
    """A package flash-attn 3 without kernels."""
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    for name in ("fwd", "bwd"):
        library.define(f"{name}(Tensor query) -> Tensor")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    flash.flash_fault.cache_clear()
    yield
    flash.flash_fault.cache_clear()
    restore_flash_attention_impl(_raise_warn=False)


@pytest.mark.parametrize("capability, taken", [((9, 0), "FA3"), ((8, 0), None), ((10, 0), None)])
def test_torchs_attention_calls_flash_attention_3_where_it_can(monkeypatch, flash_attention_3, capability, taken):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert use_flash_attention_3(CARD) == bool(taken) and current_flash_attention_impl() == taken


def test_the_first_lines_say_which_kernels_a_gpu_takes():
    assert kernels_line(True, True) == (
        "attention: FlashAttention 3, deterministic: its backward pass is slower than with --deterministic false"
    )
    assert "no two runs have the same bits" in kernels_line(False, False)


def test_the_rate_of_a_step_is_a_share_of_the_peak_of_all_gpus(calls):
    for name, result in (("get_device_name", "NVIDIA H100 80GB HBM3"), ("max_memory_allocated", 5)):
        calls.note(torch.cuda, name, result)
    calls.note(dist, "get_world_size", 1)
    model, rows = torch.nn.Linear(2, 1), Rows()
    strategy = SimpleNamespace(device=CARD, is_rank_0=lambda: True, all_reduce=lambda sums: sums)
    strategy.backward = lambda loss, model, **_: loss.backward()
    strategy.unreached_parameters = lambda model: []
    strategy.optimizer_step = lambda *_: 1.0
    batch = SimpleNamespace(
        micro_batches=[torch.ones(3, 2)], num_targets=3, num_tokens=1000, epoch=0, batch_hash="", sample_ids=[]
    )
    scheduler = SimpleNamespace(get_last_lr=lambda: [0.1])
    checkpoints = SimpleNamespace(after_step=lambda *_: None, end=lambda _: None, policy=SavePolicy())
    options = {"metrics": rows, "checkpoints": checkpoints, "progress": Progress(), "flops_per_token": 6e9}
    loss = lambda model, rows: (model(rows).sum(), torch.tensor(len(rows)))  # noqa: E731
    loop.train(strategy, model, None, scheduler, [batch], loss, loop.LoopOptions(total_steps=1), **options)
    [row] = rows.found
    assert row["mfu"] == pytest.approx(6e9 * row["tokens_per_second"] / 989e12) and row["peak_memory_bytes"] == 5
    assert ("get_device_name", CARD) in calls.found and ("max_memory_allocated", CARD) in calls.found


def test_flash_attention_needs_a_gpu_of_its_time(calls, monkeypatch):
    monkeypatch.setattr(flash, "flash_fault", lambda version: None)  # the package is there
    calls.note(torch.cuda, "get_device_capability", (9, 0))
    flash.validate_flash_attention("flash_attention_2", "cuda")
    calls.note(torch.cuda, "get_device_capability", (7, 5))
    with pytest.raises(UserError, match=r"compute capability 7\.5; it needs 8\.0"):
        flash.validate_flash_attention("flash_attention_2", "cuda")


def test_experts_of_odd_widths_are_refused_where_a_gpu_would_fail():
    tiny = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "decoder_sparse_step": 1, "vocab_size": 8}
    for width, refused in ((32, False), (36, True)):
        config = Qwen3MoeConfig(**tiny, **experts, moe_intermediate_size=width)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert model.config._experts_implementation == "grouped_mm"
        with pytest.raises(UserError, match="multiples of 8") if refused else contextlib.nullcontext():
            expert_parallel.validate_expert_widths(model, "--pretrain")
