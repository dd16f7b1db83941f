"""The error of --exact and that of the plain fp32 loop, against the plain loop in fp64: `python test/exact_error.py FOLDER FLAGS`.

FLAGS are those of train_sft, for a model of the Llama kind (RMSNorm, SiLU). Each run has one rank.
"""

import json
import sys
from pathlib import Path

import reference
import torch
import torch.nn.functional as F
from launch import run_process
from safetensors.torch import load_file

KINDS = ("exact", "plain fp32", "plain fp64")


def sample_loss(model, sample: dict) -> torch.Tensor:
    """As in reference.py, without a rounding to fp32."""
    input_ids, loss_mask = torch.tensor([sample["input_ids"]]), torch.tensor(sample["loss_mask"]).bool()
    logits = model(input_ids=input_ids, use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits, input_ids[0, 1:], reduction="none")[loss_mask[1:]].sum()


def in_fp64(load):
    """A loader whose model is fp64. The norms of transformers compute in fp32, so they get a formula in fp64."""

    def loaded(*args, **options):
        model = load(*args, **options).double()
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = lambda x, norm=module: (
                    norm.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon))
                )
        return model

    return loaded


def run_all(folder: Path, flags: list[str]) -> None:
    for kind in KINDS:
        out = folder / kind
        own = [*flags, "--param_dtype", "fp32", "--output_dir", str(out), "--parity_dump", str(out / "parity")]
        if kind == "exact":
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m", "trainer.cli.train_sft"]
            code, output = run_process([*launch, "--backend", "fsdp2", "--exact", "--no_save", *own])
            assert code == 0, output[-3000:]
            continue
        if kind == "plain fp64":
            reference.sample_loss = sample_loss
            reference.AutoModelForCausalLM.from_pretrained = in_fp64(reference.AutoModelForCausalLM.from_pretrained)
        reference.main(own)


def errors(folder: Path, kind: str) -> dict[str, float]:
    """Relative errors: gradients of step 1, the largest of a loss, and weights, relative to their way in training."""

    def dumps(run: str, name: str) -> torch.Tensor:
        tensors = load_file(folder / run / f"parity/{name}.safetensors")
        return torch.cat([tensors[key].double().flatten() for key in sorted(tensors)])

    def losses(run: str) -> list[float]:
        rows = map(json.loads, (folder / run / "metrics.jsonl").read_text().splitlines())
        return [row["loss"] for row in rows if "loss" in row]

    true = dumps(KINDS[2], "grads_step1")
    final = dumps(KINDS[2], "weights_final")
    pairs = zip(losses(kind), losses(KINDS[2]), strict=True)
    return {
        "gradients": ((dumps(kind, "grads_step1") - true).norm() / true.norm()).item(),
        "losses": max(abs(a / b - 1) for a, b in pairs),
        "weights": ((dumps(kind, "weights_final") - final).norm() / final.norm()).item(),
    }


if __name__ == "__main__":
    here = Path(sys.argv[1])
    run_all(here, sys.argv[2:])
    for name in KINDS[:2]:
        print(name, {key: f"{value:.3g}" for key, value in errors(here, name).items()})
