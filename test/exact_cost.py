"""What --exact costs: `python test/exact_cost.py FOLDER TOKENIZER FLAGS`, as root on Linux.

FLAGS are those of train_sft that choose the data. The model is a random Llama of 4.5 million parameters. Each cell trains
STEPS[0] and STEPS[1] steps; the differences of both runs are those of the steps between, without the start.

- seconds: of the processor, all ranks together, for a step
- bytes: that a rank sends for each parameter in a step, counted by the kernel on the loopback of a network of its own
- megabytes: of memory, the most that one process of a run had
"""

import ctypes
import json
import os
import resource
import sys
from pathlib import Path

import torch
from launch import LAUNCHER, run_process
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

STEPS = (4, 12)
CLONE_NEWNET = 0x40000000
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 5, "num_attention_heads": 8}
BACKENDS = {
    "FSDP2": ("--backend", "fsdp2"),
    "DeepSpeed, ZeRO 1": ("--backend", "deepspeed", "--zero_stage", "1"),
    "DeepSpeed, ZeRO 3": ("--backend", "deepspeed", "--zero_stage", "3"),
}
MODES = {
    "exact": ("--exact",),
    "normal, 1 sample": ("--micro_train_batch_size", "1"),
    "normal, 4 packed": ("--micro_train_batch_size", "4", "--packing_samples"),
}


def own_network() -> None:
    """Give this process and its children a loopback that nobody else uses."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        sys.exit("a network of its own is not allowed here: run it as root")
    code, output = run_process(["ip", "link", "set", "lo", "up"])
    assert code == 0, output


def sent_bytes() -> int:
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def cost_of(flags: list[str], ranks: int) -> tuple[float, int, int]:
    """(seconds of the processor, bytes sent, kilobytes of the largest process) of a run, with all that starts it.

    It runs in a fork, since the kernel keeps the largest process of all that a process has waited for.
    """
    read, write = os.pipe()
    if not (pid := os.fork()):
        sent = sent_bytes()
        code, output = run_process([*LAUNCHER, str(ranks), "-m", "trainer.cli.train_sft", *flags], timeout=900)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = (used.ru_utime + used.ru_stime, sent_bytes() - sent, used.ru_maxrss)
        os.write(write, json.dumps(found).encode() if code == 0 else output[-3000:].encode())
        os._exit(code)
    os.close(write)
    with open(read, encoding="utf-8") as pipe:
        found = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0, found
    return tuple(json.loads(found))


def main(folder: str, tokenizer: str, *flags: str) -> None:
    own_network()
    words = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), max_position_embeddings=512, **SIZES))
    size = sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(f"{folder}/model")
    words.save_pretrained(f"{folder}/model")
    print(f"{size} parameters, 8 samples in a step, steps {STEPS[0] + 1} to {STEPS[1]}", flush=True)
    common = ["--pretrain", f"{folder}/model", "--train_batch_size", "8", "--param_dtype", "fp32", "--device", "cpu"]
    common += ["--no_save", "--overwrite", "--output_dir", f"{folder}/run", *flags]
    for ranks in (1, 2):
        for backend, chosen in BACKENDS.items():
            for mode, own in MODES.items():
                runs = [cost_of([*common, *chosen, *own, "--max_steps", str(steps)], ranks) for steps in STEPS]
                seconds, sent, _ = ((last - first) / (STEPS[1] - STEPS[0]) for first, last in zip(*runs))
                text = f"{seconds:.2f} s, {sent / size / ranks:.1f} bytes a parameter and rank, {runs[1][2] >> 10} MB"
                print(f"{ranks} ranks | {backend} | {mode} | {text}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
