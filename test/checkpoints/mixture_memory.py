"""Host memory of ranks that load and save a mixture of experts: `python mixture_memory.py FOLDER LAYERS`.

The environment must have measured_memory.GLIBC. Each rank is a fork. It loads the model, takes one step, writes a
checkpoint, loads it and saves the model. Prints one JSON line for each layout: backend, ranks, parameters, elements of
the largest tensor, and bytes by phase of the rank that needs most, beyond what it held before this phase.
"""

import contextlib
import json
import sys
from pathlib import Path

from trainer.compare.machines.forked_ranks import import_libraries, run_ranks

LAYOUTS = {"fsdp2": (1, 2, 4), "deepspeed": (2,)}


def make_model(folder: Path, layers: int) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from trainer.datasets.demos.demo import make_demo

    make_demo(str(folder))
    config = Qwen3MoeConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(folder / "model")), hidden_size=512, moe_intermediate_size=384,
        num_experts=16, num_experts_per_tok=2, num_hidden_layers=layers, num_attention_heads=8, head_dim=64,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")


def measure(folder: Path, backend: str) -> None:
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from scripts.measured_memory import Watch
    from trainer.checkpoints import run_state
    from trainer.distributed.collectives import gather_objects
    from trainer.strategies.deepspeed import DeepspeedStrategy
    from trainer.strategies.fsdp2 import FSDP2Strategy
    from trainer.strategies.options import StrategyOptions

    kind = {"fsdp2": FSDP2Strategy, "deepspeed": DeepspeedStrategy}[backend]
    strategy = kind(StrategyOptions(param_dtype="bf16", device="cpu", zero_stage=3))
    strategy.setup_distributed()
    with torch.device("meta"):
        sizes = [p.numel() for p in AutoModelForCausalLM.from_config(config_of(folder)).parameters()]
    tokenizer, watch, peaks = AutoTokenizer.from_pretrained(folder / "model"), Watch(on_gpu=False), {}

    @contextlib.contextmanager
    def phase(name: str):
        watch.begin()
        with watch.phase(name):
            yield
        peaks[name] = watch.peaks[name]

    with phase("load"):
        model = strategy.load_model(str(folder / "model"), AutoModelForCausalLM)
        optimizer = strategy.create_optimizer(model, lr=1e-5)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))
    with phase("step"):
        loss = model(input_ids=torch.arange(64)[None], use_cache=False).logits.float().logsumexp(-1).sum()
        strategy.backward(loss, model, num_targets=64, is_last=True)
        strategy.optimizer_step(optimizer, model, scheduler)
        del loss
    target, roles = str(folder / "checkpoint"), {run_state.MAIN: (model, optimizer, scheduler)}
    with phase("write"):
        strategy.save_ckpt(target, roles, tokenizer, state={}, form=run_state.CheckpointForm()).finish()
    with phase("read"):
        strategy.load_ckpt(target, roles)
    with phase("save"):
        strategy.save_model(model, tokenizer, str(folder / "saved"))
    ranks = gather_objects(peaks)
    if dist.get_rank() == 0:
        worst = {phase: max(peaks[phase] for peaks in ranks) for phase in peaks}
        print(json.dumps([backend, len(ranks), sum(sizes), max(sizes), worst]), flush=True)


def config_of(folder: Path):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder / "model")


def main(folder: Path, layers: int) -> None:
    import_libraries()
    from trainer.strategies import deepspeed, fsdp2  # noqa: F401 (before the forks)

    make_model(folder, layers)
    for backend, numbers in LAYOUTS.items():
        for number in numbers:
            ending = run_ranks(lambda backend=backend: measure(folder, backend), number, folder / "log", timeout=300)
            assert ending.kind == "done", ending.text + (folder / "log").read_text()[-4000:]
            print([line for line in (folder / "log").read_text().splitlines() if line.startswith('["')][-1], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
