"""Save and load on real ranks, and count files: `python opened_files.py FOLDER`. FOLDER is empty.

Prints a JSON line per layout: [layout, ranks, files that each rank wrote, files that each rank opened to load, bytes that
each rank read to check and to load, bytes of all hashed files]. A second model loads it. Its own folder is never opened.
Every loaded tensor is compared with what was saved.
"""

import json
import os
import sys
from pathlib import Path

from trainer.compare.machines.forked_ranks import import_libraries, run_ranks

LAYOUTS = {
    "fsdp2": ("fsdp2", {}, (2, 4, 8)),
    "hsdp": ("fsdp2", {"dp_replicate_size": 2}, (4,)),
    "zero": ("deepspeed", {"zero_stage": 2}, (2, 4, 8)),
    "zero3": ("deepspeed", {"zero_stage": 3}, (2,)),
}


def check(folder: str, layout: str) -> None:
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from trainer.checkpoints import checkpoint_store, run_state, shards
    from trainer.distributed.collectives import gather_objects
    from trainer.distributed.sharded_tensors import to_local_if_dtensor
    from trainer.model_folders import model_folder
    from trainer.strategies.deepspeed import DeepspeedStrategy
    from trainer.strategies.fsdp2 import FSDP2Strategy
    from trainer.strategies.options import StrategyOptions

    backend, options, _ = LAYOUTS[layout]
    kind = {"fsdp2": FSDP2Strategy, "deepspeed": DeepspeedStrategy}[backend]
    strategy = kind(StrategyOptions(param_dtype="bf16", device="cpu", **options))
    strategy.setup_distributed()

    def prepared() -> dict:
        model = strategy.load_model(f"{folder}/model", AutoModelForCausalLM)
        optimizer = strategy.create_optimizer(model, lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return {run_state.MAIN: strategy.prepare((model, optimizer, scheduler))}

    def shards_of(roles: dict) -> dict:
        model, optimizer, _ = roles[run_state.MAIN]
        return {(s.key, s.offset, s.start): s.tensor for s in strategy._shards(model, optimizer)}

    target = f"{folder}/{layout}-{dist.get_world_size()}"
    roles, form = prepared(), run_state.CheckpointForm()
    strategy.save_ckpt(target, roles, None, state={}, form=form).finish()

    opened, read = [], []
    safe_open, hash_file, read_stored = shards.safe_open, checkpoint_store.hash_file, shards._read_stored
    hash_while_reading, hashed, mapped = shards.ShardReader.hash_while_reading, set(), []

    def counted_part(handle, *place):
        part = read_stored(handle, *place)
        read.append(0 if any(handle is other for other in mapped) else part.nbytes)  # this rank has just hashed it
        return part

    def counted_file(path):
        read.append(os.path.getsize(path))
        return hash_file(path)

    def counted_open(path, **kwargs):
        opened.append(path)
        handle = safe_open(path, **kwargs)
        mapped.extend([handle] if os.path.basename(path) in hashed else [])
        return handle

    def noted(reader, wanted):
        hashed.update(wanted)
        hash_while_reading(reader, wanted)

    shards.safe_open, shards.ShardReader.hash_while_reading = counted_open, noted
    shards._read_stored = counted_part
    checkpoint_store.hash_file = counted_file
    model_folder.safe_open = None  # an error, if the weights of the folder are opened
    model_folder.left_out = True
    others = prepared()
    strategy.load_ckpt(target, others)
    saved, loaded = shards_of(roles), shards_of(others)
    assert saved.keys() == loaded.keys() and all(torch.equal(loaded[key], tensor) for key, tensor in saved.items())
    for name, parameter in model_folder.unwrapped(roles[run_state.MAIN][0]).named_parameters():
        other = model_folder.unwrapped(others[run_state.MAIN][0]).get_parameter(name)
        parts = [getattr(p, "ds_tensor", p).detach() for p in (parameter, other)]
        assert torch.equal(*map(to_local_if_dtensor, parts)), name
    written = len(list(Path(target).glob(f"pieces-{dist.get_rank():05d}-*")))
    ranks = gather_objects((written, len(opened), sum(read)))
    if dist.get_rank() == 0:
        size = checkpoint_store.folder_bytes(target) - os.path.getsize(f"{target}/{checkpoint_store.MANIFEST}")
        print(json.dumps([layout, len(ranks), *map(list, zip(*ranks)), size]), flush=True)


def main(folder: Path) -> None:
    import_libraries()
    from trainer.checkpoints import shards
    from trainer.datasets.demos.demo import make_demo
    from trainer.strategies import deepspeed, fsdp2

    make_demo(str(folder))
    shards.MAX_FILE_BYTES = 1 << 14  # several files per rank
    deepspeed.save_pretrained = fsdp2.save_pretrained = lambda *_: None  # the Hugging Face part is not counted
    for layout, (_, _, numbers) in LAYOUTS.items():
        for number in numbers:
            ending = run_ranks(lambda layout=layout: check(str(folder), layout), number, folder / "log", timeout=100)
            assert ending.kind == "done", ending.text + (folder / "log").read_text()[-4000:]
    print((folder / "log").read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
