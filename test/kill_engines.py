"""SIGKILL of vLLM rollout servers at random moments, while train_ppo goes on with 2 ranks. Runs in the environment of vLLM.

    .venv-vllm/bin/python test/kill_engines.py [--count 5] [--seed 0] [--servers 2] [--max_staleness K] [--dynamic_filtering 1]

Of one server, all processes are killed, or the first one, or vLLM's engine; a moment later it is started again.

The run must go on. In lock step, every token must be drawn from the weights of its rollout. Every prompt must be trained once
in its order, a replay of the run's samples must be the run to the bit, and no process may be left.
"""

import contextlib
import itertools
import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path

from kill_environments import command_line, family, main, named, run
from kill_servers import Server, random_kills
from launch import read_rows, read_steps, torchrun

from trainer.datasets.batches.global_batches import epoch_order
from trainer.rollout.rollouts_file import read_rollouts

REWARD = """
import time

def reward_func(prompts, responses, labels):
    time.sleep(0.5)  # the cores are for a server that starts
    return [sum(word in label for word in response) / 32 for response, label in zip(responses, labels)]
"""
COARSE = REWARD.replace("/ 32 ", "% 2 ")  # half of the groups teach nothing
PARTS = ["all", "server", "engine"]
BACK = re.compile("rollout server .* is back")
GONE_WITHIN = 30  # seconds
SAME = "loss grad_norm batch_hash tokens_seen"
# not in a replay, with the number of words
ONLY_LIVE = {
    "--reward_func": 2,
    "--rollout_engine": 2,
    "--engine_urls": 2,
    "--max_staleness": 2,
    "--dynamic_filtering": 1,
}


class Engine(Server):
    """A server that remembers every process that it ever had."""

    def __init__(self, folder: Path):
        self.processes: set[tuple[int, str]] = set()
        serve = ["trainer.cli.serve_engine", "--pretrain", f"{folder}/demo/model", "--param_dtype", "fp32"]
        super().__init__(folder, [*serve, "--max_len", "128", "--batch_size", "16"])

    def look(self) -> list[int]:
        """Its processes now, the first one first."""
        first = self._process.pid
        found = [first, *sorted(family(first) - {first})]
        self.processes |= {(pid, begun_at) for pid in found if (begun_at := started(pid))}
        return found

    def kill_part(self, part: str) -> int:
        """Kill its first process, its engine, or all; returns how many processes there were."""
        found = self.look()
        engine = [pid for pid in found if "EngineCore" in title(pid)]
        assert engine, [title(pid) for pid in found]
        for pid in {"all": found, "server": found[:1], "engine": engine}[part]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(timeout=GONE_WITHIN)
        return len(found)

    def left(self) -> list[int]:
        return [pid for pid, begun_at in self.processes if started(pid) == begun_at]


def started(pid: int) -> str:
    """When a process was started, since numbers are used again; empty if it is gone or only waits to be reaped."""
    with contextlib.suppress(OSError):
        state, *facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return facts[18] if state != "Z" else ""
    return ""


def title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return ""


def none_left(servers: list[Engine]) -> None:
    deadline = time.monotonic() + GONE_WITHIN
    while (left := [pid for server in servers for pid in server.left()]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, f"processes are left: {[(pid, title(pid)) for pid in left]}"


def wait_for_all(servers: list[Engine]) -> None:
    while not all(server.answers() for server in servers):
        time.sleep(0.5)
    for server in servers:
        server.look()


def kill_some(
    folder: Path, count: int, generator: random.Random, servers: list[Engine], bound: int, more: list[str]
) -> None:
    """One run, which must not end."""

    def kill(victim: Engine) -> None:
        tell_kill(victim, generator, servers, len(read_rows(folder / "killed")))

    killed = random_kills(folder, count, generator, servers, 6, kill)

    def meanwhile() -> bool:
        return killed() and BACK.search((folder / "killed.log").read_text()) is not None

    output = run(folder, "killed", 9999, more, meanwhile)
    lost, back = output.count("rollout server lost"), len(BACK.findall(output))
    assert back > 0 and count <= lost, (lost, back)
    for row in (
        [] if bound else read_steps(folder / "killed")
    ):  # older weights would give other log-probs: a step changes them by more
        assert row["rollout_logprob_diff_max"] < 1e-4, row
    print(f"each lost server was used again: {back} times it is back on a rank", flush=True)


def tell_kill(victim: Engine, generator: random.Random, servers: list[Engine], rows: int) -> None:
    part = generator.choice(PARTS)
    started_at, processes = time.monotonic(), victim.kill_part(part)
    none_left([victim])
    seconds = time.monotonic() - started_at
    print(
        f"row {rows}: server {servers.index(victim)}, {part}: {processes} processes gone in {seconds:.1f} s", flush=True
    )


def check_each_trained_once(folder: Path, bound: int, more: list[str]) -> None:
    """By the log of (sample, version), and by a replay of it."""
    rollouts, steps = read_rollouts(f"{folder}/killed/rollouts.jsonl"), read_steps(folder / "killed")
    assert [row["step"] for row in steps] == [*range(1, len(steps) + 1)] and len(steps) == len(rollouts)
    order = (int(row) for episode in itertools.count() for row in epoch_order(64, 42, episode, shuffle=True))
    ages, taken = Counter(), 0
    for number, (samples, row) in enumerate(zip(rollouts, steps)):
        count = int(row.get("prompts_drawn", 8))
        turns, taken = [*itertools.islice(order, count)], taken + count
        assert len({sample.number for sample in samples}) == len(samples) == 16, number
        assert all(turns[sample.number // 2] == sample.row for sample in samples), f"rollout {number}: other prompts"
        ages.update(number - (number if sample.version is None else sample.version) for sample in samples)
    assert all(0 <= age <= bound for age in ages), ages
    shown = ", ".join(f"{count} of {age}" for age, count in sorted(ages.items()))
    print(f"{taken} prompts had their turn, each once in its order; samples by staleness: {shown}", flush=True)
    frozen = [*more, "--rollouts_from", f"{folder}/killed/rollouts.jsonl"]
    for flag, size in ONLY_LIVE.items():
        if flag in frozen:
            at = frozen.index(flag)
            del frozen[at : at + size]
    code, output = torchrun(2, *command_line(folder, "replay", len(steps), frozen), timeout=1200)
    assert code == 0, output[-5000:]
    replayed = read_steps(folder / "replay")
    assert len(replayed) == len(steps)
    for row, other in zip(steps, replayed):
        assert all(row[key] == other[key] for key in SAME.split()), (row, other)
    print(f"{len(rollouts)} rollouts of 16 samples, each trained once; the replay is the run to the bit", flush=True)


def kill_engines(
    folder: Path, count: int, generator: random.Random, num_servers: int, bound: int, filters: int
) -> None:
    (folder / "reward.py").write_text(COARSE if filters else REWARD)
    servers = [Engine(folder) for _ in range(num_servers)]
    more = ["--label_key", "label", "--reward_func", f"{folder}/reward.py", "--generate_max_len", "24"]
    more += ["--rollout_engine", "vllm_server", "--engine_urls", ",".join(server.url for server in servers)]
    more += ["--max_staleness", str(bound), "--tis_cap", "2"] * bool(bound) + ["--dynamic_filtering"] * bool(filters)
    try:
        wait_for_all(servers)
        kill_some(folder, count, generator, servers, bound, more)
    finally:
        for server in servers:
            server.look()
            with contextlib.suppress(ProcessLookupError):
                server.kill()
    none_left(servers)
    assert not named(str(folder / "killed")), "a process of the run is left"
    check_each_trained_once(folder, bound, more)
    print(f"rollout servers: {count} kills of {num_servers}, no process left")


if __name__ == "__main__":
    main(kill_engines, __doc__, {"servers": 2, "max_staleness": 0, "dynamic_filtering": 0})
