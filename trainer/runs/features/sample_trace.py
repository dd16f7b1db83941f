"""`--exact` with `--parity_trace`: the loss and the gradient of each sample of the first step, as bits.

A sample has the same bits on every layout. So `compare_backends.py --locate` compares samples, and names the sample, the
rank, the parameter and the element where two runs part.
"""

import dataclasses
import hashlib
import json
import os
from typing import Any

from trainer.distributed.collectives import gather_objects
from trainer.exact.sample_sums import sums_of
from trainer.runs.feature import Feature
from trainer.runs.output_folders import make_writable

SAMPLES = "samples.json"
FLAG = "--parity_trace"


class FirstSamples:
    """Records the samples of the first step of a run, and writes them."""

    def __init__(self, strategy, folder: str, loss_fn):
        self.strategy, self.folder, self.loss_fn = strategy, folder, loss_fn
        self.rank = strategy.meshes.loss.get_local_rank()
        self.samples: list[dict[str, Any]] = []
        self.shapes: dict[str, list[int]] = {}

    def before_step(self, step: int) -> None:
        self.strategy.exact.watch = self._note_gradient if step == 1 else None

    def loss(self, model, micro_batch: dict):
        """`loss_fn` of a micro-batch, which is one sample."""
        found = self.loss_fn(model, micro_batch)
        if self.strategy.exact.watch:
            known = [micro_batch[key].cpu().contiguous() for key in ("input_ids", "labels") if key in micro_batch]
            digest = hashlib.blake2b(b"".join(tensor.numpy().tobytes() for tensor in known), digest_size=8).hexdigest()
            facts = {"sample": digest, "rank": self.rank, "tokens": known[0].numel(), "targets": int(found[1])}
            self.samples.append({**facts, "loss": found[0].item(), "gradients": {}})
        return found

    def _note_gradient(self, name: str, values) -> None:
        self.shapes.setdefault(name, list(values.shape))
        self.samples[-1]["gradients"][name] = sums_of(values)

    def after_backward(self, step: int) -> None:
        if step > 1:
            return
        self.strategy.exact.watch = None
        mine = [sample for sample in self.samples if sample["targets"]]  # without the filler of a short batch
        ranks = gather_objects((self.shapes, mine))
        if self.strategy.is_rank_0():
            text = json.dumps({"shapes": ranks[0][0], "samples": [sample for _, found in ranks for sample in found]})
            os.makedirs(self.folder, exist_ok=True)
            with open(os.path.join(self.folder, SAMPLES), "w") as file:
                file.write(text)


def trace_samples(run) -> None:
    make_writable(FLAG, run.args.trace.parity_trace)
    recorder = FirstSamples(run.setup.strategy, run.args.trace.parity_trace, run.loss_fn)
    run.loss_fn = recorder.loss
    hooks = {"before_step": recorder.before_step, "after_backward": recorder.after_backward}
    run.hooks = dataclasses.replace(run.hooks, **hooks)


SAMPLE_TRACE = Feature(
    "sample_trace", lambda run: run.args.layout.exact and run.flags.parity_trace, with_loss=trace_samples
)
