"""Plant known faults in one run of a pair, and see whether `locate` names the right place. Nothing on clean pairs.

  python test/planted_faults.py                              every fault and every clean pair
  python test/planted_faults.py --only positions ring        faults whose names match
  python test/planted_faults.py --write docs/benchmarks.md   also write the tables into the page

A fault is a patch that is applied in the ranks of one run only. Each runs once, on a fork of this process.
Exit code: 0 if every fault is found where it is and every clean pair agrees, else 1.
"""

import argparse
import functools
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.compare.locate.locate import locate
from trainer.compare.locate.locate_report import ONE_STEP
from trainer.compare.locate.traced_pair import Finding, TracedRun
from trainer.compare.machines.forked_ranks import import_libraries, run_ranks

FSDP2, PACKED, BF16 = ("--backend", "fsdp2"), ("--packing_samples",), ("--param_dtype", "bf16")
TP, SP = ("--tensor_parallel_size", "2"), ("--ring_attn_size", "2")
ULYSSES = (*SP, "--sp_mode", "ulysses")


def zero(stage: int) -> tuple[str, ...]:
    return ("--backend", "deepspeed", "--zero_stage", str(stage))


# name -> (ranks, flags)
LAYOUTS = {
    "fsdp2-1r": (1, FSDP2),
    "fsdp2-2r": (2, FSDP2),
    "fsdp2-2r-packed": (2, (*FSDP2, *PACKED)),
    "fsdp2-tp2": (2, (*FSDP2, *TP)),
    "fsdp2-tp2-seq": (2, (*FSDP2, *TP, "--sequence_parallel")),
    "fsdp2-ring2": (2, (*FSDP2, *SP)),
    "fsdp2-ring2-packed": (2, (*FSDP2, *SP, *PACKED)),
    "fsdp2-ulysses2-packed": (2, (*FSDP2, *ULYSSES, *PACKED)),
    "fsdp2-tp2-ring2": (4, (*FSDP2, *TP, *SP)),
    "fsdp2-1r-mb4-recompute": (1, (*FSDP2, "--micro_train_batch_size", "4", "--gradient_checkpointing")),
    "fsdp2-2r-compiled": (2, (*FSDP2, "--compile")),
    "z0-2r": (2, zero(0)),
    "z1-tp2": (2, (*zero(1), *TP)),
    "z1-tp2-packed": (2, (*zero(1), *TP, *PACKED)),
    "z2-2r-packed": (2, (*zero(2), *PACKED)),
    "z2-ring2": (2, (*zero(2), *SP)),
    "z2-ring2-packed": (2, (*zero(2), *SP, *PACKED)),
    "z2-2r-packed-compiled": (2, (*zero(2), *PACKED, "--compile")),
    "z3-2r": (2, zero(3)),
}
LAYOUTS |= {f"{name}-bf16": (ranks, (*flags, *BF16)) for name, (ranks, flags) in LAYOUTS.items()}
CLEAN = (
    *(("fsdp2-1r", name) for name in LAYOUTS if not name.endswith("-bf16") and name != "fsdp2-1r"),
    *(
        ("fsdp2-1r-bf16", f"{name}-bf16")
        for name in ("fsdp2-2r-packed", "fsdp2-tp2", "fsdp2-ring2-packed", "z1-tp2", "z2-ring2", "z3-2r")
    ),
    ("z1-tp2", "fsdp2-tp2-ring2"),
    ("fsdp2-1r", "fsdp2-1r-bf16"),
)


@dataclass(frozen=True)
class Fault:
    name: str
    layout: str
    plant: Callable[[], None]
    phase: str  # the first one that differs
    where: str  # a regular expression for the place or the guess
    guess: str = ""  # a regular expression for the guess

    @property
    def reference(self) -> str:
        return "fsdp2-1r-bf16" if self.layout.endswith("-bf16") else "fsdp2-1r"


def wrap(owner, name: str, around: Callable) -> None:
    """Replace owner.name by a function that calls `around(original, *arguments)`."""
    setattr(owner, name, functools.partial(around, getattr(owner, name)))


def wrap_method(owner, name: str, around: Callable) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda self, *args, **kwargs: around(functools.partial(original, self), self, *args, **kwargs))


def strategies() -> list:
    from trainer.strategies.deepspeed import DeepspeedStrategy
    from trainer.strategies.fsdp2 import FSDP2Strategy

    return [FSDP2Strategy, DeepspeedStrategy]


def change_model(change: Callable) -> None:
    """Call change(model) on the model before it is sharded."""
    from trainer.runs import run

    def around(original, *args, **kwargs):
        model = original(*args, **kwargs)
        change(model)
        return model

    wrap(run, "load_model", around)


def change_prepared(change: Callable) -> None:
    """Call change(model, optimizer) after the strategy has prepared them."""
    from trainer.runs import run_training

    def around(original, *args, **kwargs):
        model, optimizer, scheduler = original(*args, **kwargs)
        change(getattr(model, "module", model), optimizer)
        return model, optimizer, scheduler

    wrap(run_training, "shard_model", around)


# --- data


def last_token_cut() -> None:
    from trainer.datasets.batches import packing

    def cut(original, samples, **kwargs):
        short = [{key: sample[key][:-1] for key in ("input_ids", "loss_mask")} for sample in samples]
        return original(short, **kwargs)

    wrap(packing, "collate_padded", cut)


def mask_off_by_one() -> None:
    from trainer.datasets.batches import packing

    wrap(packing, "shifted_labels", lambda original, ids, mask: original(ids, [0, *mask[:-1]]))


def positions_of_the_shard() -> None:
    """Each sp rank counts its positions from 0."""
    from trainer.datasets.batches import sequence_split

    def around(original, batch, *args):
        import torch

        split = original(batch, *args)
        split["position_ids"] = torch.arange(split["input_ids"].shape[1]).expand_as(split["input_ids"])
        return split

    wrap(sequence_split, "split_micro_batch", around)


def positions_run_on() -> None:
    """Positions do not restart in the documents of a packed row."""
    from trainer.datasets.batches import packing

    def around(original, samples, **kwargs):
        import torch

        batch = original(samples, **kwargs)
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
        return batch

    wrap(packing, "collate_packed", around)


# --- forward


def documents_see_each_other() -> None:
    from trainer.models.attention.attention_call import AttentionCall

    AttentionCall.bounds = lambda self, num_tokens: [0, num_tokens]


def ring_forgets_a_merge() -> None:
    """A block of the ring overwrites the running result instead of being merged into it."""
    from trainer.models.attention import ring

    def overwrite(out, lse, block_out, block_lse) -> None:
        out.copy_(block_out)
        lse.copy_(block_lse)

    ring._merge = overwrite


def scale_of_scores() -> None:
    """The scale of the attention scores in layer 1, as if the size of a head were another."""
    change_model(lambda model: setattr(model.model.layers[1].self_attn, "scaling", 1.1 * 32**-0.5))


def epsilon_of_a_norm() -> None:
    change_model(lambda model: setattr(model.model.layers[1].post_attention_layernorm, "variance_epsilon", 1e-2))


def buffer_lost() -> None:
    """Computed buffers are not computed again after to_empty."""
    from trainer.model_folders import model_folder

    def around(original, model, device):
        original(model, device)
        for buffer in model.buffers():
            buffer.zero_()

    wrap(model_folder, "restore_computed_buffers", around)


def no_reduce_after_rowwise() -> None:
    from trainer.model_parallel import tp_styles

    class Unreduced(tp_styles._Rowwise):
        @staticmethod
        def _prepare_output_fn(output_layouts, use_local_output, module, outputs, mesh):
            return outputs.to_local()

    tp_styles.STYLES["rowwise"] = Unreduced


def autotp_no_reduce_of_down_proj() -> None:
    from deepspeed.module_inject import layers

    def around(original, self, inputs):
        return inputs @ self.weight.transpose(-1, -2) if "down_proj" in self.name else original(inputs)

    wrap_method(layers.LinearAllreduce, "forward", around)


def part_loaded_wrongly() -> None:
    """tp rank 1 holds other rows of up_proj."""
    import torch.distributed as dist

    def change(model, _optimizer) -> None:
        weight = model.model.layers[0].mlp.up_proj.weight
        if dist.get_rank() == 1:
            weight._local_tensor.data.copy_(weight._local_tensor.data.roll(1, 0))

    change_prepared(change)


def autotp_part_loaded_wrongly() -> None:
    import torch.distributed as dist

    def change(model, _optimizer) -> None:
        if dist.get_rank() == 1:
            weight = model.model.layers[0].mlp.up_proj.weight
            weight.data.copy_(weight.data.roll(1, 0))

    change_prepared(change)


# --- loss


def vocabulary_offset() -> None:
    """Every tp rank takes its part of the vocabulary for the first."""
    from trainer.models.losses import token_losses

    wrap(
        token_losses,
        "vocab_parallel_nll",
        lambda original, logits, targets, _, group: original(logits, targets, 0, group),
    )


def temperature() -> None:
    from trainer.models.losses import token_losses

    wrap(token_losses, "token_log_probs", lambda original, *args, **kwargs: original(*args, **kwargs, temperature=0.9))


# --- backward


def mean_of_means() -> None:
    """Each micro-batch divides by its own number of targets."""
    from trainer.methods import sft

    counts = []

    def loss(original, model, micro_batch, **options):
        total, count = original(model, micro_batch, **options)
        counts.append(int(count))
        return total, count

    wrap(sft, "sft_loss", loss)
    for strategy in strategies():
        wrap_method(
            strategy,
            "backward",
            lambda original, self, loss_sum, model, num_targets, is_last: original(
                loss_sum, model, num_targets=4 * counts[-1], is_last=is_last
            ),
        )


def scaled_by_sp() -> None:
    def around(original, self, loss_sum, model, num_targets, is_last):
        return original(loss_sum, model, num_targets=num_targets / self.sizes.sp, is_last=is_last)

    for strategy in strategies():
        wrap_method(strategy, "backward", around)


def ring_counts_keys_twice() -> None:
    """The gradients of keys that come back from the ring count twice."""
    from trainer.models.attention import ring

    original = ring._RingAttention.backward

    def backward(ctx, dout):
        dquery, dkey, *rest = original(ctx, dout)
        return dquery, 2 * dkey, *rest

    ring._RingAttention.backward = staticmethod(backward)


def ring_drops_gradients() -> None:
    """Gradients of keys and values of the other ranks never come back."""
    from trainer.models.attention import ring

    def around(original, tensor, group):
        import torch

        finish = original(tensor, group)
        if torch.is_grad_enabled() or tensor.dtype != torch.float32 or not backward_runs():
            return finish
        return lambda: torch.zeros_like(finish())

    def backward_runs() -> bool:
        return sys._getframe(2).f_code.co_name == "backward"

    wrap(ring, "_start_shift", around)


def colwise_input_not_summed() -> None:
    """The gradient of the input of column-parallel layers is not summed over tp (Megatron's f)."""
    from deepspeed.module_inject import layers

    layers.ColumnParallel.backward = staticmethod(lambda ctx, grad: (None, grad.contiguous()))


# --- gradients of weights


def sharded_over_dp_only() -> None:
    """fully_shard does not know that sp ranks see different tokens."""
    from trainer.strategies import fsdp2

    def around(original, self, model, offload):
        sharded, mesh = fsdp2.fully_shard, self.meshes.root["dp_shard"]
        fsdp2.fully_shard = lambda module, **options: sharded(module, **options | {"mesh": mesh})
        original(model, offload)

    wrap_method(fsdp2.FSDP2Strategy, "_shard", around)


def head_norms_not_summed() -> None:
    from trainer.model_parallel import tp_styles

    tp_styles.STYLES["replicated_with_grad_allreduce"] = tp_styles.Replicated


def autotp_head_norms_not_summed() -> None:
    from trainer.strategies.on_deepspeed import autotp_layers

    autotp_layers.PARTITION_TYPES["replicated_with_grad_allreduce"] = {"partition_type": "skip"}


def frozen_in_silence() -> None:
    change_model(lambda model: model.model.layers[1].mlp.up_proj.weight.requires_grad_(False))


def tie_lost() -> None:
    """The head uses a copy of the embedding: its gradient is lost."""
    import torch.nn.functional as F

    def change(model) -> None:
        head = model.get_output_embeddings()
        head.forward = lambda hidden: F.linear(hidden, head.weight.detach())

    change_model(change)


def only_last_micro_batch() -> None:
    def around(original, self, loss_sum, model, num_targets, is_last):
        for parameter in model.parameters():
            parameter.grad = None
        return original(loss_sum, model, num_targets=num_targets, is_last=is_last)

    wrap_method(strategies()[0], "backward", around)


def sum_over_ranks() -> None:
    """Ranks sum their gradients; the loss is scaled for a mean."""
    from torch.distributed import ReduceOp
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    _fsdp_collectives._get_gradient_divide_factors = lambda *_: (None, None, ReduceOp.SUM, ReduceOp.SUM)


# --- norm and step


def norm_of_one_rank() -> None:
    from trainer.distributed import gradient_norm

    gradient_norm._sharding_groups = lambda tensor: ()


def replicas_counted_twice() -> None:
    from trainer.distributed import gradient_norm
    from trainer.distributed.mesh import dist

    gradient_norm._sharding_groups = lambda tensor: (dist.group.WORLD,)


def no_masters() -> None:
    def around(original, self, optimizer, model, scheduler):
        norm = original(optimizer, model, scheduler)
        for parameter in model.parameters():
            parameter.data.copy_(parameter.data.bfloat16().float())
        return norm

    wrap_method(strategies()[0], "optimizer_step", around)


def other_betas() -> None:
    def around(original, self, model, **options):
        return original(model, **options | {"betas": (0.9, 0.5)})

    for strategy in strategies():
        wrap_method(strategy, "create_optimizer", around)


def moments_of_one_tp_rank_lost() -> None:
    """As a resume with a wrong slice does: rank 1 over tp has no first moment of one weight."""

    def change(model, optimizer) -> None:
        weight = model.get_submodule("model.layers.1.mlp.up_proj").weight
        step = optimizer.step

        def step_and_lose(*args, **kwargs):
            result = step(*args, **kwargs)
            if weight.device_mesh.get_local_rank("tp") == 1:
                optimizer.state[weight]["exp_avg"].to_local().zero_()
            return result

        optimizer.step = step_and_lose

    change_prepared(change)


def other_eps() -> None:
    def around(original, self, model, **options):
        return original(model, **options | {"eps": 1e-3})

    for strategy in strategies():
        wrap_method(strategy, "create_optimizer", around)


L = r"model\.layers\."
FAULTS = (
    Fault("the last token of samples is cut off", "fsdp2-2r", last_token_cut, "data", "documents"),
    Fault("loss mask off by one", "z3-2r", mask_off_by_one, "data", "labels"),
    Fault("positions of the sp shard", "fsdp2-ring2", positions_of_the_shard, "forward", "rotary_emb", "[Pp]ositions"),
    Fault("positions do not restart when packed", "z2-2r-packed", positions_run_on, "forward", "rotary_emb", "[Pp]ositions"),
    Fault("a computed buffer is lost", "fsdp2-2r", buffer_lost, "forward", "rotary_emb"),
    Fault("packed documents see each other", "fsdp2-2r-packed", documents_see_each_other, "forward",
          L + r"0\.self_attn\.o_proj", "attend to each other"),
    Fault("packed documents see each other under ring", "z2-ring2-packed", documents_see_each_other, "forward",
          L + r"0\.self_attn\.o_proj", "attend to each other"),
    Fault("packed documents see each other, bf16", "fsdp2-ring2-packed-bf16", documents_see_each_other, "forward",
          L + r"0\.self_attn\.o_proj", "attend to each other"),
    Fault("the ring overwrites instead of merging", "fsdp2-ring2", ring_forgets_a_merge, "forward",
          L + r"0\.self_attn\.o_proj", "over sp"),
    Fault("scale of attention scores", "fsdp2-2r", scale_of_scores, "forward", L + r"1\.self_attn\.o_proj", "Attention"),
    Fault("epsilon of a norm", "z3-2r", epsilon_of_a_norm, "forward", L + r"1\.post_attention_layernorm", "norm"),
    Fault("no all-reduce after row-parallel layers", "fsdp2-tp2", no_reduce_after_rowwise, "forward",
          L + r"0\.self_attn\.o_proj", "missing all-reduce"),
    Fault("no all-reduce after down_proj (AutoTP)", "z1-tp2", autotp_no_reduce_of_down_proj, "forward",
          L + r"0\.mlp\.down_proj", "missing all-reduce"),
    Fault("wrong part of up_proj on tp rank 1", "fsdp2-tp2", part_loaded_wrongly, "forward", L + r"0\.mlp\.up_proj",
          "one tp rank"),
    Fault("wrong part of up_proj on tp rank 1 (AutoTP)", "z1-tp2-bf16", autotp_part_loaded_wrongly, "forward",
          L + r"0\.mlp\.up_proj", "one tp rank"),
    Fault("offset of the vocabulary over tp", "fsdp2-tp2", vocabulary_offset, "loss", "loss", "cross-entropy"),
    Fault("a temperature in the loss", "z2-ring2", temperature, "loss", "loss", "cross-entropy"),
    Fault("mean of means over micro-batches", "fsdp2-1r", mean_of_means, "backward", "factor", "mean of means"),
    Fault("mean of means over micro-batches, bf16", "z0-2r-bf16", mean_of_means, "backward", "factor", "mean of means"),
    Fault("loss scaled by sp", "fsdp2-ring2", scaled_by_sp, "backward", "factor", "2 times as large.*sp"),
    Fault("loss scaled by sp (DeepSpeed)", "z2-ring2", scaled_by_sp, "backward", "factor", "2 times as large.*sp"),
    Fault("ring counts the gradients of keys twice", "fsdp2-ring2", ring_counts_keys_twice, "backward",
          L + r"1\.self_attn\.k_norm", r"layers\.1\.self_attn.*2 times as large"),
    Fault("ring drops gradients of other ranks", "z2-ring2", ring_drops_gradients, "backward",
          L + r"1\.self_attn\.v_proj", r"over sp in model\.layers\.1\.self_attn"),
    Fault("input gradient not summed over tp (AutoTP)", "z1-tp2", colwise_input_not_summed, "backward",
          r"^model$", "missing all-reduce"),
    Fault("sharded over dp, not over sp", "fsdp2-ring2", sharded_over_dp_only, "gradients", ".*", "All gradients"),
    Fault("norms of heads not summed over tp", "fsdp2-tp2", head_norms_not_summed, "gradients", "(q|k)_norm", "all-reduce"),
    Fault("norms of heads not summed over tp (AutoTP)", "z1-tp2", autotp_head_norms_not_summed, "gradients",
          "(q|k)_norm", "all-reduce"),
    Fault("a parameter frozen in silence", "fsdp2-2r", frozen_in_silence, "gradients", r"1\.mlp\.up_proj", "No gradient"),
    Fault("the tie of embedding and head is lost", "fsdp2-1r", tie_lost, "gradients", "embed_tokens", "embedding and head"),
    Fault("only the last micro-batch counts", "fsdp2-1r", only_last_micro_batch, "gradients", ".*", "All gradients"),
    Fault("a sum over ranks instead of a mean", "fsdp2-2r", sum_over_ranks, "gradients", ".*", "All gradients are 2 times"),
    Fault("norm of one rank's part", "fsdp2-2r", norm_of_one_rank, "gradient norm", "gradient norm"),
    Fault("replicas counted tp times in the norm", "fsdp2-tp2", replicas_counted_twice, "gradient norm", "gradient norm"),
    Fault("no fp32 masters, bf16", "fsdp2-2r-bf16", no_masters, "weights", ".*", "masters"),
    Fault("another beta 2", "z3-2r", other_betas, "optimizer state", "exp_avg_sq", "betas"),
    Fault("moments of one tp rank are lost", "fsdp2-tp2", moments_of_one_tp_rank_lost, "optimizer state",
          r"exp_avg/model\.layers\.1\.mlp\.up_proj", "state does not"),
    Fault("another eps", "z2-ring2", other_eps, "weights", ".*", "eps"),
)  # fmt: skip


class Bench:
    """Runs layouts and faults, each once, in `folder`. Call `import_libraries` before."""

    def __init__(self, folder: Path):
        self.folder, self.seconds = folder, 0.0
        ending = run_ranks(lambda: _make_demo(folder), 1, folder / "demo.log", 120)
        assert ending.kind == "done", ending.text

    def run(self, layout: str, fault: Fault | None = None) -> TracedRun:
        name = fault.name if fault else layout
        folder = self.folder / re.sub(r"\W+", "-", name)
        if not folder.exists():
            ranks, flags = LAYOUTS[layout]
            line = ["--pretrain", str(self.folder / "demo/model"), "--dataset", str(self.folder / "demo/sft.jsonl")]
            line += [
                "--apply_chat_template",
                "--max_len",
                "64",
                "--max_samples",
                "32",
                "--train_batch_size",
                "8",
                "--learning_rate",
                "1e-3",
            ]
            line += [] if "--micro_train_batch_size" in flags else ["--micro_train_batch_size", "2"]
            line += [] if "--param_dtype" in flags else ["--param_dtype", "fp32"]
            line += [*flags, *ONE_STEP, "--save_steps", "1", "--no_save", "--output_dir", str(folder)]
            line += ["--parity_dump", str(folder / "parity"), "--parity_trace", str(folder / "parity")]

            def train() -> None:
                from trainer.cli import train_sft

                if fault:
                    fault.plant()
                train_sft.run(line)

            ending = run_ranks(train, ranks, folder.with_suffix(".log"), 120)
            self.seconds += ending.seconds
            assert ending.kind == "done", f"{name}: {ending.text} ({folder.with_suffix('.log')})"
        return TracedRun(layout, folder)

    def clean(self, a: str, b: str) -> tuple[bool, str, float]:
        """(whether the pair agrees, what is said, the largest difference / allowed)"""
        results = locate(self.run(a), self.run(b))
        found = next((result.finding for result in results if result.finding), None)
        worst = max(result.worst for result in results)
        return found is None, f"{found.phase}, {found.where}" if found else "agree", worst

    def fault(self, fault: Fault) -> tuple[bool, object]:
        """(whether the right place is named, the first finding)"""
        results = locate(self.run(fault.reference), self.run(fault.layout, fault))
        found = next((result.finding for result in results if result.finding), None)
        right = found is not None and found.phase == fault.phase and re.search(fault.where, found.where)
        return bool(right and re.search(fault.guess, found.words)), found


def _make_demo(folder: Path) -> None:
    from trainer.datasets.demos.demo import make_demo

    make_demo(str(folder / "demo"))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="REGEX")
    parser.add_argument("--write", metavar="MD")
    parser.add_argument("--keep", metavar="DIR", help="a folder with runs of an earlier call: these do not run again")
    options = parser.parse_args(argv)

    def wanted(name: str) -> bool:
        return not options.only or any(re.search(part, name) for part in options.only)

    import_libraries()
    faults, pairs, bad, started = [], [], 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        bench = Bench(Path(options.keep or temporary).resolve())
        for fault in filter(lambda fault: wanted(fault.name), FAULTS):
            try:
                right, found = bench.fault(fault)
            except Exception as error:  # a run that crashes is a row too
                right, found = False, error
            bad += not right
            told = f"{found.phase}, `{found.where}`" if isinstance(found, Finding) else str(found) or "nothing"
            faults.append((fault.name, fault.layout, told, found.words if isinstance(found, Finding) else "", right))
            print(
                "found " if right else "WRONG ",
                fault.name,
                "|",
                fault.layout,
                "|",
                told,
                "|",
                faults[-1][3],
                flush=True,
            )
            if not right and isinstance(found, Finding):
                print("      ", found, flush=True)
        for a, b in CLEAN:
            if wanted(f"clean {b}"):
                agree, told, worst = bench.clean(a, b)
                bad += not agree
                pairs.append((a, b, told, worst))
                print("agree " if agree else "WRONG ", a, b, told, f"{worst:.2f}", flush=True)
        print(f"{bad} wrong of {len(faults)} faults and {len(pairs)} clean pairs, {time.monotonic() - started:.0f} s")
    if options.write:
        write(Path(options.write), tables(faults, pairs))
    return int(bad > 0)


MARKERS = ("<!-- planted faults: written by test/planted_faults.py -->", "<!-- end of the planted faults -->")


def tables(faults: list, pairs: list) -> str:
    lines = [f"{sum(row[-1] for row in faults)} of {len(faults)} planted faults are found where they are.", ""]
    lines += ["| fault | run with the fault | first difference | guess |", "|---|---|---|---|"]
    lines += [f"| {name} | {layout} | {told} | {guess} |" for name, layout, told, guess, _ in faults]
    agree = sum(told == "agree" for _, _, told, _ in pairs)
    lines += ["", f"{agree} of {len(pairs)} clean pairs agree.", ""]
    lines += ["| a | b | result | largest difference / allowed |", "|---|---|---|---:|"]
    return "\n".join(lines + [f"| {a} | {b} | {told} | {worst:.2f} |" for a, b, told, worst in pairs])


def write(page: Path, text: str) -> None:
    head, rest = page.read_text().split(MARKERS[0])
    page.write_text(f"{head}{MARKERS[0]}\n\n{text}\n\n{MARKERS[1]}{rest.split(MARKERS[1])[1]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
