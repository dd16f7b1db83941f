"""The learning rates of the references."""

import math

from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler


def schedule(args, optimizer, total_steps: int) -> LambdaLR:
    """transformers' schedule of --lr_scheduler, but warm-up step i of n has i/(n+1) of the peak."""
    num = 0 if args.lr_scheduler == "constant" else math.ceil(args.lr_warmup_ratio * total_steps)
    ramp = [i / (num + 1) for i in range(1, num + 1)]
    specific = {"min_lr_rate": args.min_lr_ratio} if args.lr_scheduler == "cosine_with_min_lr" else {}
    after = get_scheduler(args.lr_scheduler, optimizer, num, total_steps, specific).lr_lambdas[0]
    return LambdaLR(optimizer, lambda step: ramp[step] if step < num else after(step))
