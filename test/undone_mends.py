"""Undo each mend of a fault on GPUs, in a copy of the checkout, and see that its test fails: `python test/undone_mends.py`.

Fault 16 is none of GPUs: it labels samples with a wrong version of the weights.
With names, only these: `python test/undone_mends.py 2a 5b`. Prints one row of the table in docs/gpu.md for each. The exit
code is 1 if a test passes without the mend. A mend that is no longer found in the code is an error.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ATTENTION = "test/models/attention"
QUEUE = "test/rollout/test_episode_queue.py"


@dataclass(frozen=True)
class Undone:
    name: str
    fault: str
    file: str
    mended: str
    broken: str
    tests: str  # arguments of pytest


UNDONE = [
    Undone("1a", "torch that lacks enable_gqa is allowed", "setup.py", "torch>=2.13", "torch>=2.11", "test/test_library_calls.py"),
    Undone("1b", "a keyword that varlen_attn lacks", "trainer/models/attention/varlen.py", "enable_gqa=True)[None]",
           "enable_gpa=True)[None]", "test/test_library_calls.py"),
    Undone("2a", "deterministic kernels are only wished for", "trainer/distributed/determinism.py",
           "use_deterministic_algorithms(True)\n    # otherwise", "use_deterministic_algorithms(True, warn_only=True)\n    # otherwise",
           "test/distributed/test_determinism.py"),
    Undone("2b", "flash-attn is not told", "trainer/distributed/determinism.py",
           'os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"', "pass", "test/distributed/test_determinism.py"),
    Undone("2c", "torch.empty is filled", "trainer/distributed/determinism.py",
           "torch.utils.deterministic.fill_uninitialized_memory = False", "pass", "test/distributed/test_determinism.py"),
    Undone("2d", "the backward pass of a block is not told", "trainer/models/attention/kernels.py",
           "deterministic=torch.are_deterministic_algorithms_enabled()", "deterministic=False", f"{ATTENTION}/test_cuda_kernels.py"),
    Undone("3", "ZeRO 0 to 2 hold the whole model on the host", "trainer/strategies/deepspeed.py",
           "            for name, tensor in model_folder.all_tensors(model).items():\n                tensor.data.copy_(weights.read(name))",
           "            whole = {name: weights.read(name) for name in model_folder.all_tensors(model)}\n"
           "            for name, tensor in model_folder.all_tensors(model).items():\n                tensor.data.copy_(whole[name])",
           "test/strategies/test_host_memory.py::test_zero_0_to_2_hold_one_tensor_in_host_memory_while_they_load"),
    Undone("4", "vLLM with another torch is allowed", "setup.py", "vllm>=0.32,<0.33", "vllm>=0.32", "test/test_library_calls.py"),
    Undone("5a", "objects are gathered over the group of training", "trainer/distributed/collectives.py",
           "group=group or make_patient_group(dist.group.WORLD))", "group=group)", "test/distributed/test_collectives.py"),
    Undone("5b", "objects are broadcast over the group of training", "trainer/distributed/collectives.py",
           "src=0, group=make_patient_group(dist.group.WORLD))", "src=0)", "test/distributed/test_collectives.py"),
    Undone("5c", "a barrier over the group of training", "trainer/distributed/collectives.py",
           "dist.barrier(group=make_patient_group(dist.group.WORLD))", "dist.barrier()", "test/distributed/test_collectives.py"),
    Undone("6a", "partitioned parameters count as empty", "trainer/metrics.py",
           '    if "ds_numel" in vars(parameter):\n        return parameter.ds_numel\n', "", "test/test_metrics.py"),
    Undone("6b", "packed parameters count as half", "trainer/metrics.py",
           "state.shape.numel() if state is not None else parameter.numel()", "parameter.numel()", "test/test_metrics.py"),
    Undone("6c", "the H100 PCIe counts as SXM", "trainer/metrics.py", '("H100 PCIe", 756e12), ', "", "test/test_metrics.py"),
    Undone("7", "ZeRO 0 in bf16 computes in fp32", "trainer/strategies/on_deepspeed/zero_0.py", "parameter.data = parameter.data.to(dtype)",
           "parameter.data = parameter.data.float()", "test/strategies/test_strategies.py -k deepspeed"),
    Undone("8a", "policy losses with all logits", "trainer/models/losses/policy_values.py",
           "if not in_one_chunk and head_is_last(type(config), config.to_json_string(False)):", "if False:", "test/models/test_policy_values.py"),
    Undone("8b", "SFT with tp upcasts all logits", "trainer/models/losses/token_losses.py", "if labels.numel() <= chunk_tokens:", "if True:",
           "test/models/test_policy_values.py"),
    Undone("9", "any folder flash_attn is flash-attn 2", "trainer/models/attention/flash.py",
           "        importlib.import_module(MODULES[version])\n",
           '        if not importlib.util.find_spec(MODULES[version].split(".")[0]):\n            raise ImportError\n',
           f"{ATTENTION}/test_flash.py"),
    Undone("10", "attention of torch's varlen kernel is recomputed", "trainer/models/layers/activations.py",
           "_aten._flash_attention_forward.default, torch.ops.torch_attn._varlen_attn.default,",
           "_aten._flash_attention_forward.default,", f"{ATTENTION}/test_gpu_branches.py"),
    Undone("11", "DeepSpeed takes the GPU of LOCAL_RANK", "trainer/strategies/deepspeed.py",
           'os.environ["LOCAL_RANK"] = str(self.device.index)', "pass", "test/strategies/test_visible_gpus.py"),
    Undone("12", "masters of fp16 folders are rounded to bf16", "trainer/strategies/deepspeed.py",
           "weights.dtype(name) == self.options.param_dtype.upper()", 'weights.dtype(name) in ("BF16", "F16")',
           "test/strategies/test_strategies.py -k deepspeed"),
    Undone("13", "RoPE tables are computed on the device", "trainer/model_folders/model_folder.py",
           'dtype=dtype, device="cpu")', "dtype=dtype, device=device)", "test/checkpoints/test_computed_buffers.py"),
    Undone("14a", "flash-attn in fp32", "trainer/flags/training_rules.py",
           'Rule("attn_implementation", lambda f: f.param_dtype == "fp32"', 'Rule("attn_implementation", lambda f: False',
           f"{ATTENTION}/test_flash.py"),
    Undone("14b", "flash-attn with wide heads", "trainer/models/attention/flash.py", "if head_dim > MAX_HEAD_DIM:", "if False:",
           f"{ATTENTION}/test_flash.py"),
    Undone("14c", "flash-attn on an old GPU", "trainer/models/attention/flash.py", "if capability < MIN_CAPABILITY:",
           "if False:", f"{ATTENTION}/test_flash.py"),
    Undone("15a", "vLLM without graphs, 32 sequences at a time", "trainer/rollout/engines/on_vllm/vllm.py", '"enable_sleep_mode": True, "gpu',
           '"enforce_eager": True, "max_num_seqs": 32, "gpu', "test/test_gpu_sides.py"),
    Undone("15b", "vLLM keeps its memory while training", "trainer/rollout/engines/on_vllm/vllm.py", "            self._llm.sleep(level=2)\n", "",
           "test/test_gpu_sides.py"),
    Undone("15c", "vLLM on one GPU where training has tp", "trainer/rollout/engines/on_vllm/vllm.py", "tensor_parallel_size=tp_size,",
           "tensor_parallel_size=1,", "test/test_gpu_sides.py"),
    Undone("16a", "samples of servers are labelled with the newest version", "trainer/rollout/episode_queue.py",
           "sample.versions = [[0, version]]", "sample.versions = [[0, self._newest[0]]]", f"{QUEUE} -k is_that_of_the_weights"),
    Undone("16b", "tokens that go on are labelled with the newest version", "trainer/rollout/asynchronous.py",
           "one.versions += [[count, version]]", "one.versions += [[count, ahead._newest[0]]]", f"{QUEUE} -k is_that_of_the_weights"),
]  # fmt: skip


def copy_checkout(folder: Path) -> None:
    """Copy what git knows, as it is now. `folder` gets the links to the data beside the checkout, too."""
    for name in subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split():
        (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "copy" / name)


def failure_of(undone: Undone, copy: Path) -> str:
    """The test that fails without the mend, and "" if all pass."""
    path = copy / undone.file
    text = path.read_text()
    assert text.count(undone.mended) == 1, f"{undone.name}: the mend is not in {undone.file}"
    path.write_text(text.replace(undone.mended, undone.broken))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *undone.tests.split()]
    try:
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    finally:
        path.write_text(text)
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    assert ended.returncode in (0, 1) and bool(found) == bool(ended.returncode), (
        ended.stdout[-2000:] + ended.stderr[-2000:]
    )
    return found[1].rpartition("/")[2].partition("[")[0] if found else ""


def main(names: list[str]) -> None:
    passed = []
    with tempfile.TemporaryDirectory() as folder:
        copy_checkout(Path(folder))
        for undone in UNDONE:
            if not names or undone.name in names:
                found = failure_of(undone, Path(folder) / "copy")
                passed += [] if found else [undone.name]
                print(f"| {undone.name} | {undone.fault} | {f'`{found}`' if found else 'none'} |", flush=True)
    if passed:
        raise SystemExit(f"no test fails without the mends {', '.join(passed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
