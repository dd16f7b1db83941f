"""Two nodes as two torchrun agents on loopback; one is killed with its rank and started again: the run goes on.

    python test/two_nodes.py [--backend fsdp2]

Both agents allow restarts: the survivor's rank loses its peer, its agent waits for the node to come back, and all ranks
start again from the latest complete checkpoint. The joined curve must have every step.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kill_test import STEPS, children, command_line, wait_for
from launch import _environment, read_rows, read_steps

from trainer.compare.runs.launch import free_port
from trainer.datasets.demos.demo import make_demo


def start_node(number: int, port: int, line: list[str], folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    command += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    command += ["--rdzv-id", "two-nodes", "--rdzv-conf", "join_timeout=120", "--local-addr", "localhost", *line]
    # with a shared store, torch's surviving agent keeps the address of the first round and never tells the new one
    environment = _environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    with (folder / f"node-{number}.txt").open("a") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)


def run(folder: Path, backend: str) -> None:
    make_demo(str(folder / "demo"))
    line = [*command_line(folder, "run", ["--backend", backend]), "--load_checkpoint"]
    port, log = free_port(), folder / "run/metrics.jsonl"
    nodes = [start_node(0, port, line, folder)]
    time.sleep(2)  # the first agent holds the rendezvous
    nodes.append(start_node(1, port, line, folder))
    try:
        assert wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 12, nodes[0], 180), "no steps"
        for pid in [nodes[1].pid, *children(nodes[1].pid)]:
            os.kill(pid, signal.SIGKILL)
        nodes[1].wait()
        print(f"node 1 killed after step {read_steps(folder / 'run')[-1]['step']}", flush=True)
        time.sleep(random.uniform(1, 5))
        nodes[1] = start_node(1, port, line, folder)
        codes = [node.wait(timeout=300) for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                for pid in [*children(node.pid), node.pid]:
                    os.kill(pid, signal.SIGKILL)
        for number in (0, 1):
            print(f"--- node {number}\n{(folder / f'node-{number}.txt').read_text()[-1500:]}")
    steps = [row["step"] for row in read_steps(folder / "run")]
    resumed = [row["step"] for row in read_rows(folder / "run") if row.get("event") == "resume"]
    assert codes == [0, 0] and steps == list(range(1, STEPS + 1)) and resumed, (codes, steps, resumed)
    print(f"the run went on from step {resumed[-1]} and has all {STEPS} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="fsdp2")
    with tempfile.TemporaryDirectory() as temporary:
        run(Path(temporary), parser.parse_args().backend)
