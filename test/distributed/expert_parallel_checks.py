"""Expert parallelism against the plain loop, on forked ranks: `python expert_parallel_checks.py FOLDER MODELS:CELLS ...`.

Each model of the zoo trains two steps in each layout. A run is compared with the plain loop: losses, gradients of the
first step (also of each expert alone), final weights. Then checkpoints of each layout are resumed on the others. The
verdicts go to FOLDER/rows.json and FOLDER/resumed.json, losses of DPO to FOLDER/frozen.json, and what is said of an adapter
on experts to FOLDER/adapter.json.
"""

import itertools
import json
import sys
from pathlib import Path

from safetensors.torch import load_file

from scripts.zoo import run_zoo
from trainer.compare.machines.forked_ranks import import_libraries, run_ranks
from trainer.compare.runs.dumps import compare_files, global_norm
from trainer.compare.runs.logs import read_run
from trainer.compare.runs.matrix import Configuration
from trainer.compare.zoo import zoo
from trainer.reports.dump_files import GRADIENTS, NOISE, WEIGHTS

EP2, EP4 = (("--backend", "fsdp2", "--expert_parallel_size", size) for size in "24")
zoo.LORA = LORA = (*zoo.LORA, "--target_modules", "q_proj,o_proj")
LORA_EXPERTS = (*LORA, "--lora_experts")
LAYOUTS = {
    "ep2": EP2,  # four ranks: each expert is on two of them, half of it on each
    "ep4": EP4,
    "ep2-ring2": (*EP2, *zoo.RING),
    "ep2-hsdp2": (*EP2, "--dp_replicate_size", "2"),
    "tp2": (*zoo.FSDP2, *zoo.TP),
    "ep2-tp2": (*EP2, *zoo.TP),
}
CELLS = {
    **LAYOUTS,
    **{f"{name}-packed": (*flags, "--packing_samples") for name, flags in LAYOUTS.items()},
    "tp2-ring2": (*zoo.FSDP2, *zoo.TP, *zoo.RING),
    "tp2-hsdp2": (*zoo.FSDP2, *zoo.TP, "--dp_replicate_size", "2"),
    **{f"tp2-z{stage}": (*zoo.DEEPSPEED, stage, *zoo.TP) for stage in "0123"},
    **{f"tp2-z{stage}-packed": (*zoo.DEEPSPEED, stage, *zoo.TP, "--packing_samples") for stage in "0123"},
    "ep2-lora": (*EP2, *LORA),
    "ep2-lora-experts": (*EP2, *LORA_EXPERTS, "--gradient_checkpointing"),
    "lora-experts-packed": (*zoo.FSDP2, *LORA_EXPERTS, "--packing_samples"),
    "z2-lora-experts": (*zoo.DEEPSPEED, "2", *LORA_EXPERTS),
    "ep2-once": (*EP2, "--reduce_once", "--micro_train_batch_size", "1"),
    "tp2-z3-gathered": (*zoo.DEEPSPEED, "3", *zoo.TP, "--gradient_checkpointing", "--check_replicas_every", "1"),
    "ep4-gathered": (*EP4, "--zero_stage", "2", "--gradient_checkpointing", "--check_replicas_every", "1"),
    "ep2-compiled": (*EP2, "--compile"),
    "tp2-z2-compiled": (*zoo.DEEPSPEED, "2", *zoo.TP, "--compile"),
    zoo.SAVE: zoo.FSDP2,  # judges what the first cell of its part has saved
}
THREE = Configuration("fsdp2-3r", 3, (*zoo.FSDP2, "--max_tokens_per_micro_batch", "256"))  # 4 experts on 3 ranks
zoo.CONFIGURATIONS = (*(Configuration(name, 4, flags) for name, flags in CELLS.items()), THREE)
# with "all" a checkpoint of each is resumed on each; else each of the few is, on itself and on the next one
RESUMED = {**LAYOUTS, "fsdp2": zoo.FSDP2, "zero3": (*zoo.DEEPSPEED, "3"), "tp2-z3": CELLS["tp2-z3"]}
FEW = ("ep2-hsdp2", "ep2-tp2", "tp2-z3")
FROZEN = ("fsdp2", "tp2-z3")  # DPO with a frozen reference
# the second and fourth batch hold 5 samples: a rank gets nothing of them, but experts get tokens of other ranks
SHORT = ["--max_samples", "13", "--max_steps", "4", "--no_save", "--aux_loss_coef", "0.1"]


def resume(folder: Path, model: str, all_pairs: bool) -> dict[str, dict]:
    """Verdict by "source to target": worst relative differences of steps 3 and 4 and of the weights from the plain loop,
    and whether the losses are bitwise those of the source's own run. All runs balance their experts."""
    base = ["--pretrain", str(folder / model / "model"), "--dataset", str(folder / "demo/sft.jsonl"), *zoo.TRAINING]
    folder = folder / "resumed"
    folder.mkdir()

    def line(name: str, *flags: str) -> list[str]:
        return [*base, *SHORT, *flags, "--output_dir", f"{folder}/{name}", "--parity_dump", f"{folder}/{name}/parity"]

    def run_all() -> None:
        from trainer.cli import train_dpo, train_sft

        pairs_file = base[3].replace("sft.jsonl", "pairs.jsonl")
        for name in FROZEN:
            run = ["--output_dir", f"{folder}/dpo-{name}", "--no_save", *RESUMED[name]]
            train_dpo.run([*base[:2], "--dataset", pairs_file, *zoo.TRAINING, *run])

        adapted = ["--output_dir", f"{folder}/adapted", "--save_path", f"{folder}/adapter", *EP2, *LORA_EXPERTS]
        train_sft.run([*base, "--max_steps", "2", *adapted])
        for name in names:
            train_sft.run(line(name, *RESUMED[name], "--save_steps", "2"))
        for source, target in pairs:
            begin = ["--load_checkpoint", f"{folder}/{source}/checkpoints/step_2"]
            train_sft.run(line(f"{source} to {target}", *RESUMED[target], *begin))

    names = list(RESUMED if all_pairs else FEW)
    pairs = list(itertools.product(names, names))
    if not all_pairs:  # each layout to itself, and to the next one
        pairs = [pair for pair in pairs if (names.index(pair[1]) - names.index(pair[0])) % len(names) < 2]
    for name, ranks, run in (("plain", 1, lambda: zoo.plain_loop(line("plain"))), ("all", 4, run_all)):
        ending = run_ranks(run, ranks, folder / f"{name}.log", 300)
        assert ending.kind == "done", (ending, (folder / f"{name}.log").read_text()[-4000:])
    frozen = {name: [s.loss for s in read_run(name, folder / f"dpo-{name}").steps.values()] for name in FROZEN}
    (folder.parent / "frozen.json").write_text(json.dumps(frozen))
    (folder.parent / "adapter.json").write_text(json.dumps(merged_by_hand(base[1], folder / "adapter")))
    plain, found = read_run("plain", folder / "plain").steps, {}
    for source, target in pairs:
        run = folder / f"{source} to {target}"
        steps, own = (read_run(source, path).steps for path in (run, folder / source))
        losses = max(abs(steps[step].loss - plain[step].loss) / plain[step].loss for step in (3, 4))
        norms = max(abs(steps[step].grad_norm - plain[step].grad_norm) / plain[step].grad_norm for step in (3, 4))
        weights = compare_files(folder / "plain/parity" / WEIGHTS, run / "parity" / WEIGHTS)["rel"]
        bitwise = all(steps[step].loss == own[step].loss for step in (3, 4))
        found[run.name] = {"loss": losses, "grad_norm": norms, "weights": weights, "bitwise": bitwise}
    return found


def merged_by_hand(base: str, adapter: Path) -> dict[str, float]:
    """The experts that `export` merges: the largest differences from W + alpha / rank * B A of each one, and from W."""
    from transformers import AutoModelForCausalLM

    from trainer.model_folders.adapter_folder import ADAPTER_WEIGHTS
    from trainer.runs.exported_models import merged_model

    tensors, merged = load_file(adapter / ADAPTER_WEIGHTS), merged_model(base, str(adapter)).state_dict()
    found = {"error": 0.0, "update": 0.0}
    for name, weight in AutoModelForCausalLM.from_pretrained(base).state_dict().items():
        path = name.rpartition(".")[0]
        if not path.endswith(".experts"):
            continue
        [a_name] = [
            key
            for key, tensor in tensors.items()
            if key.startswith(f"base_model.model.{path}.") and "lora_A" in key and tensor.shape[1] == weight.shape[2]
        ]
        a, b = tensors[a_name], tensors[a_name.replace("lora_A", "lora_B")]
        number, rank = len(weight), len(a) // len(weight)
        for expert in range(number):
            update = 2.0 * b[:, expert::number] @ a[expert * rank : (expert + 1) * rank]
            error = (merged[name][expert] - weight[expert] - update).abs().max().item()
            found = {"error": max(found["error"], error), "update": max(found["update"], update.abs().max().item())}
    return found


def worst_expert(plain: Path, run: Path) -> float:
    """The largest relative difference of the gradient of one expert, over all experts whose gradient is no noise."""
    floor, worst = NOISE * global_norm(plain / GRADIENTS), 0.0
    expected, found = load_file(plain / GRADIENTS), load_file(run / GRADIENTS)
    for name in (name for name in expected if ".experts." in name and ".lora_" not in name):
        for one, other in zip(expected[name].double(), found[name].double(), strict=True):
            if one.norm() > floor or other.norm() > floor:
                worst = max(worst, ((other - one).norm() / one.norm()).item())
    return worst


def main(folder: Path, parts: list[str], resumed: list[str]) -> None:
    """Each part is MODEL,MODEL,...:CELL,CELL,... `resumed` names a model to resume, and "all" for all pairs of layouts."""
    import_libraries()
    rows: dict[str, dict] = {}
    for part in parts:
        models, cells = (names.split(",") for names in part.split(":"))
        zoo.SAVED_RUN = cells[0]
        for name, row in run_zoo(models, cells, folder, timeout=120, jobs=1):
            assert not row["problem"], row["problem"]
            for cell in (cell for cell in row["cells"] if cell != zoo.SAVE and "lora" not in cell):
                runs = (folder / name / run / "parity" for run in ("reference", cell))
                row["cells"][cell]["worst_expert"] = worst_expert(*runs)
            rows.setdefault(name, {}).update(row["cells"])
    (folder / "rows.json").write_text(json.dumps(rows))
    if resumed:
        (folder / "resumed.json").write_text(json.dumps(resume(folder, resumed[0], "all" in resumed)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [a for a in sys.argv[2:] if ":" in a], [a for a in sys.argv[2:] if ":" not in a])
