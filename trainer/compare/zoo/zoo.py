"""The zoo: a tiny model of an architecture, trained in every layout. `check` and scripts/zoo.py run it.

Each cell is a run of train_sft on a tiny random model, in fp32, on CPU. It is compared with the plain single-process
loop: losses, gradients of the first step, final weights. The cell rl is a step of train_ppo: engine and policy must
agree. The cells exact and exact-split compare the bits of layouts of --exact.
"""

import json
import os
import runpy
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from trainer.compare.machines.forked_ranks import Ending, run_ranks
from trainer.compare.runs.dumps import add_dumps, compare_files
from trainer.compare.runs.logs import read_run
from trainer.compare.runs.many_runs import run_here
from trainer.compare.runs.matrix import Configuration
from trainer.compare.runs.parity import Comparison, Thresholds, compare_runs
from trainer.compare.zoo.tiny import randomize
from trainer.compare.zoo.zoo_own import EXACT, EXACT_SPLIT, RL, judge_exact, judge_rl, run_exact, run_rl
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.reports.dump_files import WEIGHTS

ROOT = Path(__file__).resolve().parents[3]
# cells that train and judge in their own way: run(cell, flags, folder, timeout), judge(cell, folder)
OWN = {RL: (run_rl, judge_rl), EXACT: (run_exact, judge_exact), EXACT_SPLIT: (run_exact, judge_exact)}
THRESHOLDS = Thresholds(loss=1e-5, grad_norm=1e-4, dump=1e-4)
FSDP2, DEEPSPEED = ("--backend", "fsdp2"), ("--backend", "deepspeed", "--zero_stage")
TP, RING, LORA = ("--tensor_parallel_size", "2"), ("--ring_attn_size", "2"), ("--lora_rank", "4")
SAVE, SAVED_RUN = "save", "fsdp2-2r"  # one run: the second judges its curve, the first what it saved
CONFIGURATIONS = (
    Configuration("fsdp2", 1, FSDP2),
    Configuration(SAVED_RUN, 2, FSDP2),
    Configuration("zero2", 2, (*DEEPSPEED, "2")),
    Configuration("zero3", 2, (*DEEPSPEED, "3")),
    Configuration("packed", 1, (*FSDP2, "--packing_samples")),
    Configuration("tp2-fsdp2", 2, (*FSDP2, *TP)),
    Configuration("tp2-deepspeed", 2, (*DEEPSPEED, "1", *TP)),
    Configuration("ring2", 2, (*FSDP2, *RING)),
    Configuration("ring2-packed", 2, (*FSDP2, *RING, "--packing_samples")),
    Configuration("ulysses2", 2, (*FSDP2, *RING, "--sp_mode", "ulysses")),
    Configuration("tp2-ring2", 4, (*FSDP2, *TP, *RING)),
    Configuration("lora", 2, (*FSDP2, *LORA)),
    Configuration(SAVE, 2, FSDP2),
    *OWN,
)
BATCHES = "--max_samples 16 --max_len 64 --train_batch_size 8 --micro_train_batch_size 2 --max_steps 2"
TRAINING = (
    *BATCHES.split(),
    "--apply_chat_template",
    *["--learning_rate", "1e-3", "--lr_scheduler", "constant", "--param_dtype", "fp32"],
)


def is_bad(cell: dict) -> bool:
    return cell["verdict"] in ("wrong", "crash")


def write_demo(work_dir: Path, timeout: float) -> None:
    """Write the data and the tokenizer of all runs into `work_dir`/demo."""
    ending = run_ranks(lambda: make_demo(str(work_dir / "demo")), 1, _made(work_dir) / "demo.log", timeout)
    if ending.kind != "done":
        raise UserError("--work_dir", f"the demo cannot be written: {ending.text}")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_model(
    name: str, names: list[str], work_dir: Path, timeout: float, config, after_cell: Callable | None = None
) -> dict:
    """The row of one tiny model: {"cells": {configuration: verdict}, "problem": why there are no cells, or None}.

    `after_cell(configuration, cell)` is called after each run. Call `import_libraries` and `write_demo` first.
    """
    started, folder = time.monotonic(), work_dir / name
    shutil.rmtree(folder, ignore_errors=True)
    _made(folder)
    # not at the top: `import_libraries` sets the environment first
    from transformers import AutoModelForCausalLM

    row = {"problem": None, "cells": {}, "seconds": 0.0}
    AutoModelForCausalLM._model_mapping.get(type(config), None)  # imports the model's code, once for all forks
    ending = run_ranks(lambda: _build(config, folder), 1, folder / "build.log", timeout)
    if ending.kind != "done":
        return {**row, "problem": f"transformers cannot build it: {ending.text}"}
    row |= json.loads((folder / "facts.json").read_text())
    references, endings = {}, {}
    for configuration in (c for c in CONFIGURATIONS if c.name in names):
        flags = _adapter_flags(configuration)
        if flags not in references:
            references[flags] = _reference(flags, folder, timeout)
        if references[flags].kind != "done" and not flags:
            return {**row, "problem": f"the plain loop fails: {references[flags].text}"}
        run = SAVED_RUN if configuration.name == SAVE else configuration.name
        if run not in endings:
            endings[run] = _train(configuration, run, folder, timeout)
        verdict, note = _judge(configuration, run, references[flags], endings[run], folder, timeout)
        seconds = round(endings[run].seconds, 1)
        note = note.replace(f"{folder}/", "")
        cell = row["cells"][configuration.name] = {"verdict": verdict, "note": note, "seconds": seconds}
        if after_cell:
            after_cell(configuration, cell)
    return {**row, "seconds": round(time.monotonic() - started, 1)}


def _build(config, folder: Path) -> None:
    """Write the tiny model into its folder, with random norms and biases and the tokenizer of the demo."""
    # not at the top: `import_libraries` sets the environment first
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    model.save_pretrained(folder / "random")
    # transformers recomputes some stored values when it loads them, such as a bias of Zaya: those count
    model = AutoModelForCausalLM.from_pretrained(folder / "random", dtype=torch.float32)
    model.save_pretrained(folder / "model")
    for path in (folder.parent / "demo/model").iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(path, folder / "model")
    facts = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    (folder / "facts.json").write_text(json.dumps(facts))


def _flags(folder: Path, run: str) -> list[str]:
    data = ["--pretrain", str(folder / "model"), "--dataset", str(folder.parent / "demo/sft.jsonl")]
    return [*data, *TRAINING, "--output_dir", str(folder / run), "--parity_dump", str(folder / run / "parity")]


def _adapter_flags(configuration: Configuration) -> tuple[str, ...]:
    """The flags that the plain loop needs, too."""
    own = (*LORA, *(flag for flag in configuration.args if flag == "--lora_experts"))
    return own if "--lora_rank" in configuration.args else ()


def _reference_name(flags: tuple[str, ...]) -> str:
    return "-".join(["reference", *(["lora"] if flags else []), *(["experts"] if "--lora_experts" in flags else [])])


def plain_loop(line: list[str]) -> None:
    """Trains by test/reference.py with these flags of train_sft, in this process."""
    sys.path.insert(0, str(ROOT / "test"))  # the modules that it imports
    runpy.run_path(str(ROOT / "test/reference.py"))["main"](line)


def _reference(flags: tuple[str, ...], folder: Path, timeout: float) -> Ending:
    name = _reference_name(flags)
    line = [*_flags(folder, name), *flags, "--no_save"]

    return run_ranks(lambda: plain_loop(line), 1, folder / f"{name}.log", timeout)


def _train(configuration: Configuration, run: str, folder: Path, timeout: float) -> Ending:
    if configuration in OWN:
        return OWN[configuration][0](configuration, partial(_flags, folder), folder, timeout)
    flags = [*_flags(folder, run), *configuration.args, *([] if run == SAVED_RUN else ["--no_save"])]
    if "--max_tokens_per_micro_batch" in flags:  # in place of the samples of a micro-batch
        at = flags.index("--micro_train_batch_size")
        del flags[at : at + 2]

    return run_ranks(lambda: run_here("train_sft", flags), configuration.nproc, folder / f"{run}.log", timeout)


def _judge(configuration: Configuration, run: str, reference: Ending, ending: Ending, folder: Path, timeout: float):
    """(verdict, note): pass, refused, wrong, crash, or unchecked where the plain loop fails."""
    if configuration in OWN:
        if ending.kind != "done":
            return ("refused" if ending.kind == "refused" else "crash"), ending.text
        return OWN[configuration][1](configuration, folder)
    if reference.kind != "done" and ending.kind == "done":
        return "unchecked", f"it runs, and the plain loop fails: {reference.text}"
    verdict, note = judge_run(run, ending, folder, _reference_name(_adapter_flags(configuration)))
    return judge_saved(folder, timeout) if verdict == "pass" and configuration.name == SAVE else (verdict, note)


def judge_run(run: str, ending: Ending, folder: Path, reference: str) -> tuple[str, str]:
    """(verdict, note) of a finished run. `reference` is the folder of the plain loop."""
    if ending.kind == "refused":
        metrics = folder / run / "metrics.jsonl"
        began = metrics.is_file() and '"loss"' in metrics.read_text()
        return ("crash", f"refused only after the first step: {ending.text}") if began else ("refused", ending.text)
    if ending.kind != "done":
        return "crash", ending.text
    try:
        comparison = compare_runs(*(read_run(name, folder / name) for name in (reference, run)), THRESHOLDS)
        add_dumps(comparison, folder / reference / "parity", folder / run / "parity")
    except UserError as error:
        return "wrong", str(error)
    return "wrong" if comparison.failures else "pass", "; ".join(comparison.failures) or _worst(comparison)


def _worst(comparison: Comparison) -> str:
    gradient, weight = comparison.worst_gradient["rel"], comparison.worst_weight["rel"]
    return f"loss {abs(comparison.worst_loss.rel_loss):.0e}, gradient {gradient:.0e}, weight {weight:.0e}"


def judge_saved(folder: Path, timeout: float) -> tuple[str, str]:
    """Whether transformers loads the saved folder, with the source's names and the final weights of the run."""
    ending = run_ranks(lambda: _load_saved(folder), 1, folder / "load.log", timeout)
    if ending.kind != "done":
        return ("wrong" if ending.kind == "refused" else "crash"), ending.text
    try:
        worst = compare_files(folder / SAVED_RUN / "parity" / WEIGHTS, folder / "loaded" / WEIGHTS)
    except UserError as error:
        return "wrong", str(error)
    if worst["rel"] > 0:
        return "wrong", f"the saved weight {worst['name']} differs by {worst['rel']:.3g}"
    return "pass", "every weight is the same bit by bit"


def _load_saved(folder: Path) -> None:
    """Compare the names with the source's, load the folder, and write the weights that transformers loaded."""
    # not at the top: `import_libraries` sets the environment first
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from trainer.model_folders.model_folder import SafetensorsFolder, all_tensors

    saved = folder / SAVED_RUN / "model"
    source, found = (set(SafetensorsFolder(str(path)).names()) for path in (folder / "model", saved))
    for what, names in (("lacks", source - found), ("adds", found - source)):
        if names:
            raise UserError("the saved folder", f"{what} {', '.join(sorted(names)[:3])}")
    model, info = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, output_loading_info=True)
    problems = {kind: names for kind, names in info.items() if names}
    if problems:
        raise UserError("the saved folder", f"transformers reports {problems}")
    tensors = {name: tensor.detach().float().contiguous() for name, tensor in all_tensors(model).items()}
    os.makedirs(folder / "loaded", exist_ok=True)
    save_file(tensors, folder / "loaded" / WEIGHTS)
