"""Run `train_sft` on broken copies of the demo's model folder, and print how each run ends.

`python broken_folder_runs.py FOLDER`; the last line is JSON: {fault: [kind of ending, its text, log]}.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from trainer.cli import train_sft
from trainer.compare.machines.forked_ranks import import_libraries, run_ranks
from trainer.datasets.demos.demo import make_demo
from trainer.model_folders.folder_names import INDEX, SINGLE

DEEP = "[" * 100_000 + "]" * 100_000
BACKENDS = (["--backend", "fsdp2"], ["--backend", "deepspeed", "--zero_stage", "2"])


def change_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def shard(folder: Path) -> dict[str, str]:
    """Publish the weights in two files. Returns the index."""
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    (folder / SINGLE).unlink()
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def lose_a_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def misname_in_the_index(folder: Path) -> None:
    weight_map = shard(folder)
    weight_map["model.layers.9.mlp.up_proj.weight"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def lose_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / SINGLE)


def shrink_the_vocabulary(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    size = len(tensors["model.embed_tokens.weight"]) - 16
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    save_file(
        {name: tensor[:size].clone() if name in ends else tensor for name, tensor in tensors.items()}, folder / SINGLE
    )
    change_json(folder / "config.json", vocab_size=size)


def index_outside(folder: Path, place: str) -> None:
    """The weights are in a file beside the folder, and the index names it."""
    (folder / SINGLE).rename(folder.parent / f"{folder.name}.safetensors")
    names = load_file(folder.parent / f"{folder.name}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, place.format(folder))}))


def need_code(folder: Path) -> None:
    change_json(folder / "config.json", model_type="strange", auto_map={"AutoConfig": "code.Config"})
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")


class Code:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return Path.touch, (self.folder / "ran",)


def pickle_code(folder: Path) -> None:
    (folder / SINGLE).unlink()
    torch.save({"weight": Code(folder)}, folder / "pytorch_model.bin")


def enlarge_the_embeddings(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    name = "model.embed_tokens.weight"
    save_file(tensors | {name: torch.cat([tensors[name], tensors[name][:16]])}, folder / SINGLE)


FAULTS = {
    "index outside": lambda folder: index_outside(folder, "../{0.name}.safetensors"),
    "absolute index": lambda folder: index_outside(folder, "{0}.safetensors"),
    "code": need_code,
    "pickled code": pickle_code,
    "small vocabulary": enlarge_the_embeddings,
    "half a file": lambda folder: cut(folder / SINGLE, (folder / SINGLE).stat().st_size // 2),
    "one byte short": lambda folder: cut(folder / SINGLE, (folder / SINGLE).stat().st_size - 1),
    "half a header": lambda folder: cut(folder / SINGLE, 100),
    "empty file": lambda folder: cut(folder / SINGLE, 0),
    "git-lfs pointer": lambda folder: (folder / SINGLE).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
    ),
    "missing shard": lose_a_shard,
    "half a shard": lambda folder: (shard(folder), cut(folder / "model-00002-of-00002.safetensors", 3000)),
    "index names too much": misname_in_the_index,
    "missing tensor": lose_a_tensor,
    "unknown model_type": lambda folder: change_json(
        folder / "config.json", model_type="llama9", transformers_version="9.1.0"
    ),
    "padding on the left": lambda folder: change_json(folder / "config.json", model_type="cpmant"),
    "vocabulary of the config": lambda folder: change_json(folder / "config.json", vocab_size=5000),
    "large tokenizer": shrink_the_vocabulary,
    "width of the config": lambda folder: change_json(folder / "config.json", intermediate_size=40),
    "no number": lambda folder: change_json(folder / "config.json", num_hidden_layers="two"),
    "broken config": lambda folder: cut(folder / "config.json", 50),
    "deep config": lambda folder: (folder / "config.json").write_text(DEEP),
    "broken tokenizer": lambda folder: cut(folder / "tokenizer.json", 500),
}


def main() -> None:
    import_libraries()
    here = Path(sys.argv[1])
    make_demo(str(here))
    rows = (here / "sft.jsonl").read_text().splitlines()
    (here / "deep.jsonl").write_text("\n".join([*rows[:4], f'{{"messages": {DEEP}}}', *rows[4:]]))
    faults = FAULTS | {"deep data": lambda folder: None}
    endings = {}
    for number, (fault, break_folder) in enumerate(faults.items()):
        folder = here / fault.replace(" ", "_")
        shutil.copytree(here / "model", folder)
        break_folder(folder)
        flags = [
            "--pretrain",
            str(folder),
            "--dataset",
            str(here / ("deep" if fault == "deep data" else "sft")) + ".jsonl",
        ]
        flags += ["--apply_chat_template", "--max_steps", "1", "--train_batch_size", "8", "--no_save"]
        flags += ["--micro_train_batch_size", "4"]
        flags += ["--output_dir", str(folder / "run"), *BACKENDS[number % 2]]
        log = here / f"{folder.name}.log"
        ending = run_ranks(lambda flags=flags: train_sft.run(flags), 1, log, timeout=60)
        assert not (folder / "ran").exists(), f"code ran: {fault}"
        endings[fault] = [ending.kind, ending.text, log.read_text()]
    print(json.dumps(endings))


main()
