"""Runs of train_sft with --expert_bias_update_rate against the plain loop, in several layouts.

`python expert_bias_runs.py FOLDER`; the last line is JSON: {run: [verdict, note, how far the biases moved]}.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from scripts.zoo_models import tiny_config
from trainer.cli import train_sft
from trainer.compare.machines.forked_ranks import import_libraries, run_ranks
from trainer.compare.zoo import zoo
from trainer.reports.dump_files import WEIGHTS

RATE, STEPS = 0.01, 2
FSDP2, ZERO2 = ["--backend", "fsdp2"], ["--backend", "deepspeed", "--zero_stage", "2"]
RUNS = {  # model, ranks, flags; the first of each model is the reference of the others too
    "deepspeed": ("deepseek_v3", 2, ZERO2),
    "recomputed": ("deepseek_v3", 2, [*FSDP2, "--gradient_checkpointing"]),
    "packed": ("deepseek_v3", 1, [*FSDP2, "--packing_samples"]),
    "ring": ("minimax_m2", 2, [*FSDP2, "--ring_attn_size", "2"]),
    "ep": ("minimax_m2", 2, [*FSDP2, "--expert_parallel_size", "2"]),
    "tp": ("minimax_m2", 2, [*FSDP2, "--tensor_parallel_size", "2"]),
    "no bias": ("qwen3_moe", 1, FSDP2),
}


def main() -> None:
    import_libraries()
    here, endings, references = Path(sys.argv[1]), {}, {}
    zoo.write_demo(here, 60)
    for name, (model, num_ranks, flags) in RUNS.items():
        folder = here / model
        rest = [*zoo.TRAINING, "--expert_bias_update_rate", str(RATE), "--dataset", str(here / "demo/sft.jsonl")]

        def line(run: str, folder=folder, rest=rest) -> list[str]:
            out = ["--output_dir", str(folder / run), "--parity_dump", str(folder / run / "parity"), "--no_save"]
            return ["--pretrain", str(folder / "model"), *rest, *out]

        if model not in references:
            folder.mkdir()
            run_ranks(lambda m=model, f=folder: zoo._build(tiny_config(m), f), 1, folder / "build.log", 60)
            plain_flags = line("reference")
            references[model] = run_ranks(lambda r=plain_flags: zoo.plain_loop(r), 1, folder / "reference.log", 60)
        run_flags = [*line(name), *flags]
        ending = run_ranks(lambda r=run_flags: train_sft.run(r), num_ranks, folder / f"{name}.log", 90)
        verdict, note = zoo.judge_run(name, ending, folder, "reference")
        moved = 0.0
        if verdict == "pass":
            final = load_file(folder / name / "parity" / WEIGHTS)
            source = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
            biases = [key for key in final if key.endswith("e_score_correction_bias")]
            moved = max(torch.dist(final[key], source[key], torch.inf).item() for key in biases)
        endings[name] = [verdict, note, moved]
    print(json.dumps(endings))


main()
