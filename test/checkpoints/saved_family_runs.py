"""Train tiny models of many families with a learning rate of 0. Save, export and load them; compare with the source.

`python saved_family_runs.py FOLDER`; the last line is JSON: {family: what differs, or ""}.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from scripts.zoo_models import tiny_config
from trainer.cli import export, train_sft
from trainer.compare.machines.forked_ranks import import_libraries, run_ranks
from trainer.compare.zoo.tiny import randomize
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.model_folders.model_folder import SafetensorsFolder

FAMILIES = sys.argv[2:] or (
    "llama", "mistral", "ministral3", "qwen2", "qwen3", "qwen3_5_text", "qwen3_next", "gemma2", "gemma3_text",
    "gemma4_text", "gpt_oss", "phi3", "glm4", "olmo3", "granite", "granitemoehybrid", "smollm3", "lfm2", "nemotron_h",
    "falcon_h1", "seed_oss", "cohere2",
)  # fmt: skip
BACKENDS = (["--backend", "fsdp2"], ["--backend", "deepspeed", "--zero_stage", "2"])
SHORT = (
    "--apply_chat_template --max_steps 1 --train_batch_size 2 --micro_train_batch_size 2 --max_samples 8 --max_len 32"
)
# heads that predict several tokens: transformers has no module for them, and a save must not lose them
MTP = {"qwen3_next": "mtp.layers.0.mlp.up_proj.weight", "qwen3_5_text": "mtp.fc.weight"}
STILL = "--learning_rate 1e-300 --lr_scheduler constant --param_dtype fp32 --ckpt_format portable --save_steps 1"


def build(family: str, folder: Path, demo: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
    randomize(model)
    model.save_pretrained(folder)
    if family in MTP:
        weights = load_file(folder / "model.safetensors") | {MTP[family]: torch.randn(8, 4)}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for path in (demo / "model").iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(path, folder)


def compare(source: Path, found: Path) -> None:
    """Raise UserError unless both folders hold the same names, shapes, dtypes and bits, and transformers loads `found`."""
    expected, tensors = SafetensorsFolder(str(source)), SafetensorsFolder(str(found))
    if odd := set(expected.names()) ^ set(tensors.names()):
        raise UserError(found.name, f"other names: {', '.join(sorted(odd)[:4])}")
    for name in expected.names():
        one, other = expected.read(name), tensors.read(name)
        if one.dtype != other.dtype or not torch.equal(one, other):
            raise UserError(found.name, f"{name} differs")
    _, info = AutoModelForCausalLM.from_pretrained(found, output_loading_info=True)
    if problems := {kind: names for kind, names in info.items() if names}:
        raise UserError(found.name, f"transformers reports {problems}")


def run(family: str, here: Path, backend: list[str]) -> None:
    folder = here / family
    build(family, folder / "source", here)
    flags = ["--pretrain", str(folder / "source"), "--dataset", str(here / "sft.jsonl"), *SHORT.split(), *STILL.split()]
    train_sft.run([*flags, "--output_dir", str(folder / "run"), *backend])
    compare(folder / "source", folder / "run/model")
    [checkpoint] = (folder / "run/checkpoints").glob("step*")
    export.run([str(checkpoint), str(folder / "exported")])
    compare(folder / "source", folder / "exported")


def main() -> None:
    import_libraries()
    here, endings = Path(sys.argv[1]), {}
    make_demo(str(here))
    for number, family in enumerate(FAMILIES):
        backend = BACKENDS[number % 2]
        ending = run_ranks(lambda f=family, b=backend: run(f, here, b), 1, here / f"{family}.log", timeout=120)
        endings[family] = "" if ending.kind == "done" else f"{ending.kind}: {ending.text}"
    print(json.dumps(endings))


main()
