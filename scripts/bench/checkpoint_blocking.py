"""Measure how long training waits for a checkpoint, with and without --async_save.

    torchrun --nproc_per_node 2 scripts/bench/checkpoint_blocking.py

A random Qwen3 of --hidden_size and --layers is saved --count times in each way, between training steps. The table has
the seconds that save_ckpt blocked and the seconds until the checkpoint was complete. It also has the step time, with
and without a save in the background.
"""

import argparse
import statistics
import tempfile
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from trainer.checkpoints.run_state import MAIN, CheckpointForm
from trainer.datasets.demos.demo import make_demo
from trainer.distributed.collectives import broadcast_object, max_over_all_ranks, rank_0_first
from trainer.strategies.options import StrategyOptions


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["fsdp2", "deepspeed"], default="fsdp2")
    parser.add_argument("--zero_stage", type=int)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


def make_model(folder: str, hidden_size: int, layers: int) -> None:
    sizes = {"hidden_size": hidden_size, "intermediate_size": 4 * hidden_size, "num_hidden_layers": layers}
    config = Qwen3Config(**sizes, num_attention_heads=8, num_key_value_heads=4, head_dim=64, vocab_size=8192)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def main() -> None:
    args = parse()
    if args.backend == "deepspeed":
        from trainer.strategies.deepspeed import DeepspeedStrategy as Strategy
    else:
        from trainer.strategies.fsdp2 import FSDP2Strategy as Strategy
    strategy = Strategy(
        StrategyOptions(param_dtype="fp32", zero_stage=args.zero_stage, device=args.device, deterministic=False)
    )
    strategy.setup_distributed()
    folder = broadcast_object(tempfile.mkdtemp(prefix="checkpoint-bench-"))
    rank_0_first(lambda: (make_demo(f"{folder}/demo"), make_model(f"{folder}/model", args.hidden_size, args.layers)))
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/demo/model")
    model = strategy.load_model(f"{folder}/model", AutoModelForCausalLM)
    optimizer = strategy.create_optimizer(model, lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))
    input_ids = torch.randint(0, 8192, (1, 64), device=strategy.device)

    def step() -> float:
        started = time.perf_counter()
        loss = model(input_ids=input_ids).logits.float().logsumexp(-1).sum()
        strategy.backward(loss, model, num_targets=64, is_last=True)
        strategy.optimizer_step(optimizer, model, scheduler)
        return time.perf_counter() - started

    alone = statistics.median(step() for _ in range(5))
    print_row = strategy.print
    print_row("| save | blocked (s) | complete after (s) | step during the save (s) |")
    print_row("|---|---|---|---|")
    print_row(f"| none | | | {alone:.3f} |")
    for name, background in (("sync", False), ("async", True)):
        blocked, complete, steps = [], [], []
        for number in range(args.count):
            started = time.perf_counter()
            target = f"{folder}/{name}_{number}"
            roles, form = {MAIN: (model, optimizer, scheduler)}, CheckpointForm(background=background)
            pending = strategy.save_ckpt(target, roles, tokenizer, state={}, form=form)
            if not background:
                pending.finish()
            blocked.append(time.perf_counter() - started)
            while background and max_over_all_ranks([not pending.done()], strategy.device)[0]:
                steps.append(step())
            if background:
                finishing = time.perf_counter()
                pending.finish()
                blocked[-1] += time.perf_counter() - finishing
            complete.append(time.perf_counter() - started)
        meanwhile = f"{statistics.median(steps):.3f}" if steps else ""
        print_row(f"| {name} | {statistics.median(blocked):.3f} | {statistics.median(complete):.3f} | {meanwhile} |")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
