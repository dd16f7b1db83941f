"""Save and load on real ranks, and count files: `python opened_files.py FOLDER`. FOLDER is empty.

Prints a JSON line per layout: [layout, ranks, files that each rank wrote, files that each rank opened to load]. Every
loaded tensor is compared with what was saved.
"""

import json
import sys
from pathlib import Path

from trainer.compare.forked_ranks import import_libraries, run_ranks

LAYOUTS = {
    "fsdp2": ("fsdp2", {}, (2, 4)),
    "hsdp": ("fsdp2", {"dp_replicate_size": 2}, (4,)),
    "zero": ("deepspeed", {"zero_stage": 2}, (2, 4)),
}


def check(folder: str, layout: str) -> None:
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from trainer.checkpoints import run_state, shards
    from trainer.distributed.collectives import gather_objects
    from trainer.strategies.deepspeed import DeepspeedStrategy
    from trainer.strategies.fsdp2 import FSDP2Strategy
    from trainer.strategies.options import StrategyOptions

    backend, options, _ = LAYOUTS[layout]
    kind = {"fsdp2": FSDP2Strategy, "deepspeed": DeepspeedStrategy}[backend]
    strategy = kind(StrategyOptions(param_dtype="bf16", device="cpu", **options))
    strategy.setup_distributed()
    model = strategy.load_model(f"{folder}/model", AutoModelForCausalLM)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))
    target = f"{folder}/{layout}-{dist.get_world_size()}"
    roles, form = {run_state.MAIN: (model, optimizer, scheduler)}, run_state.CheckpointForm()
    saved = [(shard, shard.tensor.clone()) for shard in strategy._shards(model, optimizer)]
    strategy.save_ckpt(target, roles, None, state={}, form=form).finish()
    for shard, _ in saved:
        shard.tensor.zero_()

    opened, safe_open = [], shards.safe_open
    shards.safe_open = lambda path, **kwargs: opened.append(path) or safe_open(path, **kwargs)
    strategy.load_ckpt(target, roles)
    assert all(torch.equal(shard.tensor, tensor) for shard, tensor in saved)
    written = len(list(Path(target).glob(f"pieces-{dist.get_rank():05d}-*")))
    ranks = gather_objects((written, len(opened)))
    if dist.get_rank() == 0:
        print(json.dumps([layout, len(ranks), *map(list, zip(*ranks))]), flush=True)


def main(folder: Path) -> None:
    import_libraries()
    from trainer.checkpoints import model_writer, shards
    from trainer.datasets.demo import make_demo
    from trainer.strategies import deepspeed, fsdp2  # noqa: F401 (before the forks)

    make_demo(str(folder))
    shards.MAX_FILE_BYTES = 1 << 14  # several files per rank
    model_writer.save_pretrained = lambda *_: None  # the Hugging Face part is not counted
    for layout, (_, _, numbers) in LAYOUTS.items():
        for number in numbers:
            ending = run_ranks(lambda layout=layout: check(str(folder), layout), number, folder / "log", timeout=100)
            assert ending.kind == "done", ending.text + (folder / "log").read_text()[-4000:]
    print((folder / "log").read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
