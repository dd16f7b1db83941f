"""Measure the memory of training runs, phase by phase: `torchrun -m scripts.measured_memory FOLDER DEVICE [RUN ...]`.

FOLDER holds model/ and sft.jsonl. A RUN is BACKEND-STAGE-DTYPE, such as fsdp2-3-bf16. FOLDER/peaks-RANKS.json gets
bytes for each run: the largest growth over all ranks, counted from before the model is loaded. The phases are load
(with prepare), step, save, and the state that stays. On a GPU it is memory of the device, else of the process (RssAnon).
"""

import contextlib
import ctypes
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trainer.compare.runs.many_runs import run_here
from trainer.datasets.demos.demo import make_demo
from trainer.distributed.collectives import gather_objects
from trainer.entry import run_command
from trainer.planning.predicted_memory import STAGES
from trainer.strategies.deepspeed import DeepspeedStrategy
from trainer.strategies.fsdp2 import FSDP2Strategy
from trainer.training import loop

RUNS = [f"{backend}-{stage}-bf16" for backend, stages in STAGES.items() for stage in stages]
RUNS += ["fsdp2-3-fp32", "deepspeed-1-fp32"]
SECONDS_BETWEEN_LOOKS = 0.0005
# freed memory returns to the system at once; otherwise it would count as used
GLIBC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def own_bytes() -> int:
    """Resident memory without mapped files, whose pages belong to the page cache."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))


class Watch:
    """The largest memory in each phase. On a CPU, a thread samples it all the time.

    Growth between two phases, for example by the tokenizer and the data, does not count.
    """

    def __init__(self, on_gpu: bool):
        self.start, self.last, self.peaks, self._phase, self.on_gpu = 0, 0, {}, None, on_gpu
        if not on_gpu:
            threading.Thread(target=self._look, daemon=True).start()

    def begin(self) -> None:
        gc.collect()
        self._give_back()
        self.start = self.last = self._now()
        self.peaks = {}

    def _give_back(self) -> None:
        """Return freed memory to the system. Small activations leave holes that glibc would keep."""
        torch.cuda.empty_cache() if self.on_gpu else ctypes.CDLL(None).malloc_trim(0)

    def _now(self) -> int:
        return torch.cuda.memory_allocated() if self.on_gpu else own_bytes()

    @contextlib.contextmanager
    def phase(self, name: str):
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.start += self._now() - self.last
        self._phase = name
        yield
        self._note(name)
        self._phase = None
        self._give_back()
        self.last = self._now()
        self.peaks["state"] = self.last - self.start  # after the last phase

    def _look(self) -> None:
        while True:
            if (name := self._phase) is not None:
                self._note(name)
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _note(self, name: str) -> None:
        now = torch.cuda.max_memory_allocated() if self.on_gpu else own_bytes()
        self.peaks[name] = max(self.peaks.get(name, 0), now - self.start)


def _watched(watch: Watch, function, name: str):
    def run(*args, **options):
        with watch.phase(name):
            return function(*args, **options)

    return run


def main(argv: list[str]) -> None:
    folder, device, *names = argv
    folder, names, found, watch, steps = Path(folder), names or RUNS, {}, Watch(device == "cuda"), [0]
    for kind in (FSDP2Strategy, DeepspeedStrategy):
        for method, name in (
            ("load_model", "load"),
            ("prepare", "load"),
            ("save_ckpt", "save"),
            ("save_model", "save"),
        ):
            setattr(kind, method, _watched(watch, getattr(kind, method), name))
    train_step = loop.train_step

    def measured_step(*args, **options):
        steps[0] += 1
        with watch.phase("step" if steps[0] > 1 else "first"):  # the first one makes Adam's states
            return train_step(*args, **options)

    loop.train_step = measured_step
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    warm_up = [name for name in ("fsdp2-3-fp32", "deepspeed-1-bf16", "deepspeed-3-bf16") if name in names]
    for number, name in enumerate([*warm_up, *names]):  # a warm-up run loads libraries, so that no figure counts them
        ending = (
            ["--max_steps", "1", "--no_save"] if number < len(warm_up) else ["--max_steps", "2", "--save_steps", "2"]
        )
        steps[0], (backend, stage, dtype) = 0, name.split("-")
        watch.begin()
        run_here(
            "train_sft",
            ["--pretrain", str(folder / "model"), "--dataset", str(folder / "sft.jsonl"), "--train_batch_size",
             str(max(2, num_ranks)), "--micro_train_batch_size", "1",
             "--device", device, "--backend", backend, "--zero_stage", stage, "--param_dtype", dtype, *ending,
             "--output_dir", str(folder / "run"), "--overwrite"]
        )  # fmt: skip
        ranks = gather_objects(watch.peaks)
        found[name] = {phase: max(peaks[phase] for peaks in ranks) for phase in ranks[0]}
        if dist.get_rank() == 0:
            (folder / f"peaks-{dist.get_world_size()}.json").write_text(json.dumps(found))


def make_model(folder: Path, width: int, layers: int) -> tuple[int, int]:
    """Write the demo with a larger Llama into `folder`. Returns (parameters of the model, of one layer)."""
    make_demo(str(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=width // 64, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    model.save_pretrained(folder / "model", max_shard_size="100GB")
    return model.num_parameters(), sum(p.numel() for p in model.model.layers[0].parameters())


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
