"""Single lines and short conditions that only a GPU takes, each with a stand-in for what it asks of CUDA.

docs/gpu.md lists what each test executes. Larger pieces are in test_gpu_sides.py.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from deepspeed import accelerator

from scripts import measured_memory
from trainer import entry
from trainer.distributed import host_offload, mesh
from trainer.errors import UserError
from trainer.flags.common_flags import SFTArguments
from trainer.flags.groups import from_flat
from trainer.flags.rl_flags import PPOArguments
from trainer.metrics import counted
from trainer.models.layers import activation_offload
from trainer.models.losses import vocab_parallel
from trainer.planning import doctor_findings, doctor_machine, doctor_packages
from trainer.reports import certificate
from trainer.rollout.asynchronous import RolloutsAhead
from trainer.runs import run_models, run_record, start_line
from trainer.runs.start_line import multiplies_bf16

CARD = torch.device("cuda", 1)


@pytest.fixture
def cuda(monkeypatch):
    """Set functions of torch.cuda: `cuda(name=result)`. A result that is an error is raised. Returns the calls, in order."""
    calls = []

    def one(name, result):
        def called(*args):
            calls.append((name, *args))
            if isinstance(result, Exception):
                raise result
            return result

        return called

    def put(**results):
        for name, result in results.items():
            monkeypatch.setattr(torch.cuda, name, one(name, result))
        return calls

    return put


def test_a_gpu_that_is_not_there_is_named_and_one_that_is_has_fast_bf16(cuda):
    cuda(is_available=False)
    with pytest.raises(UserError, match="--device: cuda, but torch finds no CUDA device"):
        mesh.resolve_device("cuda")
    assert multiplies_bf16("cuda", cpu_facts="/dev/null")


class NVML:
    """The functions of libnvidia-ml for GPUs of these (capabilities, memory)."""

    def __init__(self, *cards):
        self.cards = cards

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.cards)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number, handle):
        handle._obj.value = number + 1
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = self.cards[handle.value - 1][0]
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total = self.cards[handle.value - 1][1]
        return 0


@pytest.fixture
def nvml(monkeypatch):
    """Set the GPUs that NVML names."""
    monkeypatch.setattr(start_line, "lacks_gpu", lambda: "")
    start_line.gpus.cache_clear()
    yield lambda *cards: monkeypatch.setattr(start_line.ctypes, "CDLL", lambda name: NVML(*cards))
    start_line.gpus.cache_clear()


def test_auto_is_fp32_on_a_gpu_without_bf16_and_the_first_line_says_it(nvml):
    nvml(((7, 5), 16 << 30), ((7, 5), 16 << 30))
    assert start_line.resolve_dtype("auto", "cuda") == "fp32" and start_line.resolve_dtype("bf16", "cuda") == "bf16"
    args = from_flat(SFTArguments, {"pretrain": "m", "device": "cuda", "learning_rate": 1e-5, "param_dtype": "fp32"})
    args.batch.micro_train_batch_size = 8
    line = start_line.start_line("train_sft", args, None)
    assert "fp32 (this GPU has no bf16 instructions; fp16 is faster), " in line, line
    for kind, refused in (
        (SFTArguments, {"fp8": "rowwise"}),
        (PPOArguments, {}),
        (SFTArguments, {"zero_stage": 0, "backend": "deepspeed"}),
    ):
        args = from_flat(
            kind, {"pretrain": "m", "device": "cuda", "learning_rate": 1e-5, "param_dtype": "fp32", **refused}
        )
        args.batch.micro_train_batch_size = 8
        assert "fp32 (this GPU has no bf16 instructions), " in start_line.start_line("x", args, None), refused
    start_line.gpus.cache_clear()
    nvml(((7, 5), 4 << 30), ((8, 0), 80 << 30))  # CUDA gives the faster one first
    assert start_line.resolve_dtype("auto", "cuda") == "bf16"


@pytest.mark.parametrize(
    ("flags", "ranks", "found"),
    [
        ({}, 2, "weights and gradients alone need 56 GB on this machine, and its 2 ranks on GPUs can have 34.4 GB"),
        ({"adam_offload": True}, 2, "weights and gradients alone need 56 GB on this machine, and it has 40 GB"),
        ({"adam_offload": True, "lora_rank": 8}, 1, ""),
        ({"adam_offload": True, "backend": "deepspeed"}, 2, ""),
        ({"adam_offload": True, "backend": "deepspeed", "param_dtype": "fp32"}, 1, "weights alone need 28 GB"),
        ({"lora_rank": 8}, 2, ""),
        (
            {"lora_rank": 8, "param_dtype": "fp32"},
            1,
            "weights alone need 28 GB on this machine, and its 1 rank on GPUs can have 17.2 GB",
        ),
        ({"lora_rank": 8, "load_in_4bit": True}, 1, ""),
        ({"device": "cpu"}, 2, "weights and gradients alone need 56 GB on this machine, and it has 40 GB"),
    ],
)
def test_a_model_beyond_the_memory_is_warned_of_before_it_loads(nvml, monkeypatch, flags, ranks, found):
    nvml(((9, 0), 16 << 30), ((9, 0), 16 << 30))
    monkeypatch.setattr(start_line.os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 40e9}.get)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    args = from_flat(SFTArguments, {"device": "cuda", "param_dtype": "bf16", **flags})
    warning = start_line.memory_warning(args, 7_000_000_000, trains=True)
    assert found in warning and bool(found) == warning.startswith("\nwarning: "), warning
    assert start_line.memory_warning(args, None, trains=True) == ""


def test_sizes_are_read_at_a_glance():
    found = [start_line.shown_gb(size) for size in (5e8, 56e9, 999.4e9, 999.6e9, 5.3e12, 1.2e15)]
    assert found == ["0.5 GB", "56 GB", "999 GB", "0.9996 TB", "5.3 TB", "1,200 TB"]
    assert (counted(1, "GPU"), counted(0, "GPU"), counted(2, "GPU")) == ("1 GPU", "0 GPUs", "2 GPUs")


def test_two_ranks_on_one_gpu_are_one_line(monkeypatch, capsys):
    """The message is that of NCCL's init.cc."""
    codes, text = [], "ncclInvalidUsage\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
    monkeypatch.setattr(entry, "leave", lambda code: codes.append(code) or sys.exit(code))
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))

    def fail(argv):
        raise RuntimeError(text)

    with pytest.raises(SystemExit):
        entry.run_command(fail, [])
    line = "error: --nproc: ranks 1 and 0 have the same GPU (allowed: one rank per GPU, --device cpu)\n"
    assert codes == [2] and capsys.readouterr().err == line


def test_the_name_of_the_card_is_recorded(cuda):
    calls = cuda(get_device_name="NVIDIA H100")
    assert certificate.hardware("cuda:1")["device"] == run_record.device_name(CARD) == "NVIDIA H100"
    assert calls == [("get_device_name", "cuda:1"), ("get_device_name", CARD)]


def test_the_identity_of_a_run_names_the_card_and_no_cpu_kernels(cuda, monkeypatch):
    cuda(get_device_name="NVIDIA H100")
    records = []
    monkeypatch.setattr(run_record, "contents", lambda run, flags: {})
    monkeypatch.setattr(run_record, "sealed", records.append)
    strategy = SimpleNamespace(device=CARD, is_rank_0=lambda: True)
    setup = SimpleNamespace(strategy=strategy, attention="sdpa")
    run_record.identity_of(SimpleNamespace(setup=setup, method=SimpleNamespace(command="train_sft")), SFTArguments())
    assert records[0]["kernels"] == {"attention": "sdpa", "device": "NVIDIA H100"}


@pytest.mark.parametrize(
    "dtype, on", [(torch.bfloat16, CARD), (torch.float32, CARD), (torch.bfloat16, torch.device("cpu"))]
)
def test_widths_of_experts_are_asked_in_half_precision_on_a_gpu(monkeypatch, dtype, on):
    asked = []
    for name in (
        "find_weights",
        "weights_size",
        "check_code",
        "refuse_encoder",
        "has_sdpa",
        "disable_dropout",
        "change_layers",
    ):
        monkeypatch.setattr(run_models, name, lambda *_: True)
    monkeypatch.setattr(run_models.model_folder, "check_weights", lambda *_: [])
    monkeypatch.setattr(run_models, "validate_expert_widths", lambda model, flag: asked.append((model, flag)))
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=3))
    model = SimpleNamespace(config=config)
    strategy = SimpleNamespace(device=on, param_dtype=dtype, print=print, load_model=lambda *_, **__: model)
    setup = SimpleNamespace(strategy=strategy, attention="sdpa", resumes=False, tokenizer="abc")
    assert run_models.load_model(SFTArguments().model, setup, "folder", None) is model
    assert asked == ([(model, "--pretrain")] if on == CARD and dtype == torch.bfloat16 else [])


def test_peaks_of_a_phase_are_those_of_the_allocator(cuda):
    calls = cuda(memory_allocated=5, max_memory_allocated=9, reset_peak_memory_stats=None, empty_cache=None)
    watch = measured_memory.Watch(on_gpu=True)
    watch.begin()
    with watch.phase("step"):
        pass
    assert watch.peaks == {"step": 4, "state": 0}
    names = [name for name, *_ in calls]
    assert (
        names.index("reset_peak_memory_stats") < names.index("max_memory_allocated") and names.count("empty_cache") == 2
    )


def test_storages_of_a_gpu_are_copied_to_the_host_before_they_are_freed():
    calls = []
    storage = SimpleNamespace(device=CARD, data_ptr=lambda: 1, resizable=lambda: True)
    storage.cpu, storage.resize_ = lambda: calls.append("cpu") or "copy", lambda size: calls.append(size)
    tensor = SimpleNamespace(untyped_storage=lambda: storage, numel=lambda: 3)
    assert host_offload.take_to_host([tensor, tensor]) == [(storage, "copy")] and calls == ["cpu", 0]


def test_a_copy_from_a_gpu_takes_a_stream_of_that_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(activation_offload, "_streams", lambda device: asked.append(device.type) or torch.cpu)
    monkeypatch.setattr(torch.cpu.Stream, "record_event", lambda stream: "event", raising=False)
    monkeypatch.setattr(torch.cpu.Stream, "wait_stream", lambda stream, other: None, raising=False)
    source = torch.ones(3, device="meta")  # as on a GPU: not on the CPU
    assert activation_offload.HostCopies()._copy(torch.empty(3, device="meta"), source) == "event" and asked == ["meta"]


def test_probabilities_of_a_sharded_vocabulary_are_one_piece_on_a_gpu():
    logits = SimpleNamespace(is_cuda=True, shape=(2, 10**6))
    assert vocab_parallel._num_pieces(logits, group=None) == 1


def test_samples_of_a_thread_are_made_on_a_stream_of_its_own(cuda):
    calls = cuda(Stream="own", stream="entered")
    ahead = RolloutsAhead.__new__(RolloutsAhead)
    ahead.engine = SimpleNamespace(device=CARD)
    assert ahead._stream() == "entered" and calls == [("Stream", CARD), ("stream", "own")]


def test_the_doctor_names_a_driver_without_devices_and_nccl(cuda, monkeypatch):
    monkeypatch.setattr(doctor_machine, "NVIDIA_DRIVER", SimpleNamespace(exists=lambda: True))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cuda(is_available=False, init=RuntimeError("the driver is too old\nmore"))
    found = doctor_machine.cuda()
    assert found.state == "FAIL" and "the driver is too old" in found.text and "CUDA 13.0" in found.cure
    cuda(is_available=True, device_count=2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    assert doctor_machine._num_seen() == 2 and doctor_machine.nccl().text == "2.27.5"


def test_the_doctor_names_an_accelerator_that_is_not_the_gpu(cuda, monkeypatch):
    cuda(is_available=True)
    monkeypatch.setattr(accelerator, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cpu"))
    found = doctor_packages.deepspeed()
    assert found.state == "FAIL" and "it takes the cpu instead of the GPU" in found.text


def test_the_doctor_asks_nccl_on_a_gpu(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no network")

    monkeypatch.setattr(doctor_findings, "resolve_device", lambda wanted: CARD)
    monkeypatch.setattr(dist, "init_process_group", fail)
    [found] = doctor_findings.network_findings()
    assert (found.state, found.text) == ("FAIL", "nccl: no network")
