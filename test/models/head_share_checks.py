"""Mixers whose heads are shared out, on ranks that are threads of this process: `python head_share_checks.py`.

Output, input gradient and weight gradients of a mixer on several ranks, against the mixer of transformers on one rank.
Prints "ok NAME LAYOUT" for each mixer and layout.
"""

import copy
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, _install_threaded_pg
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import itertools

import hybrid_models

from trainer.compare.zoo.tiny import randomize
from trainer.datasets.batches.sequence_split import zigzag_shard
from trainer.models.layers.head_shares import TABLES
from trainer.models.layers.recurrent_layers import Row, change_mixers, find_batches

KIND = {"linear_num_value_heads": 8, "linear_num_key_heads": 4}
# name -> (model, changes of its config, over how many of 4 ranks the heads are shared out)
MIXERS = {
    "delta": ("qwen3_5", KIND, 4),
    "delta-2-key-heads": ("qwen3_5", {"linear_num_value_heads": 6}, 2),
    "delta-3-key-heads": ("qwen3_5", {"linear_num_value_heads": 6, "linear_num_key_heads": 3}, 1),
    "delta-by-key-head": ("qwen3_next", KIND, 4),
    "mamba2-wide-norm": ("nemotron_h", {"use_bias": True}, 4),
    "mamba2-4-groups": ("nemotron_h", {"mamba_n_groups": 4}, 4),
    "mamba2-2-groups": ("nemotron_h", {"mamba_n_groups": 2}, 2),  # 4 ranks would share the norm of a group by twos
    "mamba2-without-norm": ("falcon_h1", {"mamba_n_groups": 2}, 4),
    "mamba2-norm-by-group": ("falcon_h1", {"mamba_n_groups": 4, "mamba_rms_norm": True}, 4),
    "bamba": ("bamba", {}, 4),
    "granite": ("granitemoehybrid", {}, 4),
    "mamba2": ("mamba2", {}, 4),
    "zamba2": ("zamba2", {}, 4),
    "convolution": ("lfm2", {"conv_bias": True}, 4),
}
LAYOUTS = {"sp4": (4, 1), "tp4": (1, 4), "sp2-tp2": (2, 2)}
BOUNDS = [0, 5, 6, 16]  # of packed documents; 16 tokens are a multiple of 2 * sp


def make_mixer(name: str):
    model, changes, _ = MIXERS[name]
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(hybrid_models.CONFIGS[model](**changes), dtype=torch.float64)
    randomize(whole)
    return next(module for module in whole.modules() if type(module).__name__ in TABLES).train()


def compute(mixer, hidden, weights, documents):
    """Output and gradients of one rank's mixer; each document alone where `documents` are given."""
    hidden = hidden.clone().requires_grad_()
    pieces = [hidden[:, start:end] for start, end in documents] if documents else [hidden]
    out = torch.cat([mixer(hidden_states=piece) for piece in pieces], 1)
    (out * weights).sum().backward()
    return {"output": out.detach(), "input": hidden.grad} | {n: p.grad for n, p in mixer.named_parameters()}


def check(name: str, layout: str, is_packed: bool) -> None:
    ProcessLocalGroup.reset()
    (sp, tp), store, told = LAYOUTS[layout], dist.HashStore(), {}
    mixer = make_mixer(name)
    shape = (1 if is_packed else 2, BOUNDS[-1], 32)
    hidden, weights = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    documents = list(itertools.pairwise(BOUNDS)) if is_packed else None
    expected = compute(copy.deepcopy(mixer), hidden, weights, documents)

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=sp * tp, store=store)
            mesh = init_device_mesh("cpu", (sp, tp), mesh_dim_names=("sp", "tp"))
            own, row, of_sp = copies[rank], Row(), mesh["sp"].get_group()
            row.batches = find_batches(BOUNDS) if is_packed else None
            (heads,) = change_mixers([own], row, of_sp if sp > 1 else None, mesh["tp"].get_group() if tp > 1 else None)
            here = mesh.get_local_rank("sp")
            found = compute(own, zigzag_shard(hidden, here, sp), zigzag_shard(weights, here, sp), None)
            for key in found.keys() - {"output", "input"}:
                dist.all_reduce(found[key], group=of_sp)
            told[rank] = here, heads.ranks, found
        except BaseException as error:
            ProcessLocalGroup.exception_handle(error)
            raise

    copies = [copy.deepcopy(mixer) for _ in range(sp * tp)]
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(sp * tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == sp * tp, f"{name} {layout}: a rank failed"
    for here, ranks, found in told.values():
        assert ranks == (MIXERS[name][2] if layout == "sp2-tp2" or MIXERS[name][2] == 4 else 1), (name, layout, ranks)
        for key, value in expected.items():
            value = zigzag_shard(value, here, sp) if key in ("output", "input") else value
            off = float((found[key] - value).norm() / value.norm())
            assert off <= 1e-5, (name, layout, key, off)  # scans are in fp32
    print(f"ok {name} {layout} {'packed' if is_packed else 'padded'}", flush=True)


if __name__ == "__main__":
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    for each in sys.argv[1:] or MIXERS:
        for each_layout in LAYOUTS:
            check(each, each_layout, is_packed=False)
        check(each, "sp2-tp2", is_packed=True)
