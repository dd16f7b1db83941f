"""Tensor-parallel plans of unusual configs, on two ranks that are threads of this process: `python unusual_plan_checks.py NAME ...`.

The sharded model against the whole one: loss and gradients. Prints "ok NAME" for each row of test/unusual_configs.py.
"""

import copy
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, _install_threaded_pg
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from unusual_configs import unusual_config

from trainer.compare.zoo.tiny import randomize
from trainer.model_parallel.expert_parallel import are_experts, forward_of_part
from trainer.model_parallel.tensor_parallel import apply_tp_plan, resolve_tp_plan

RANKS = 2


def loss_of(model, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return -logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).mean()


def shard(model, plan: dict[str, str], mesh) -> None:
    apply_tp_plan(model, plan, mesh)
    for module in filter(are_experts, list(model.modules())):
        for name, weight in list(module.named_parameters(recurse=False)):
            own = weight.data.chunk(RANKS)[mesh.get_local_rank()].clone()
            module.register_parameter(name, torch.nn.Parameter(own))
        module.num_experts //= RANKS
        module.forward = forward_of_part(module, None, mesh.get_group())


def worst_gradient(model, whole, rank: int) -> float:
    """The largest difference from the gradients of the whole model, relative to each tensor's own norm."""
    expected, worst = dict(whole.named_parameters()), 0.0
    for name, parameter in model.named_parameters():
        meant, found = expected[name].grad, parameter.grad
        if found is None or meant is None:
            assert found is meant, name
            continue
        if isinstance(found, DTensor):
            found = found.full_tensor()
        else:  # experts
            meant = meant.chunk(RANKS)[rank]
        worst = max(worst, float((found - meant).norm() / meant.norm()))
    return worst


def check(name: str) -> None:
    ProcessLocalGroup.reset()
    config, store, told, lock = unusual_config(name), dist.HashStore(), {}, threading.Lock()
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomize(whole)
    ids = torch.randint(3, 300, (2, 19))
    expected = loss_of(whole, ids)
    expected.backward()

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=RANKS, store=store)
            mesh = init_device_mesh("cpu", (RANKS,))
            with lock:  # the default device of torch is not a thread's own
                with torch.device("meta"):
                    skeleton = AutoModelForCausalLM.from_config(config)
                plan, model = resolve_tp_plan(skeleton, mesh), copy.deepcopy(whole)
            model.zero_grad()
            shard(model, plan, mesh)
            loss = loss_of(model, ids)
            loss.backward()
            off = float((loss - expected).abs() / expected.abs())
            told[rank] = off, worst_gradient(model, whole, rank)
        except BaseException as error:
            ProcessLocalGroup.exception_handle(error)
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == RANKS, f"{name}: a rank failed"
    for loss, gradient in told.values():
        assert loss <= 1e-5 and gradient <= 1e-4, (name, loss, gradient)
    print(f"ok {name} loss {told[0][0]:.0e} gradient {told[0][1]:.0e}", flush=True)


if __name__ == "__main__":
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    for each in sys.argv[1:]:
        check(each)
