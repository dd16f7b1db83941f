"""A reward file for `train_ppo --reward_func` that watches what its own process does, and kills it there.

`plan.json` beside this file says where: {"phase", "skip" (so many visits pass first), "victim" (rank 0, 1 or "all"),
"delay" (seconds into the visit, less where it is shorter)}. What was killed, and where it stood, is appended to `kills.jsonl`.
Without a plan this is an ordinary reward.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

FOLDER, RANK = Path(__file__).parent, int(os.environ.get("RANK", 0))
# the phase that a function of the trainer is
PHASES = {
    "generate": ("rollout/generation.py", "generate_samples"),
    "score": ("rollout/scoring.py", "score_by_texts"),
    "logprobs": ("methods/ppo.py", "add_log_probs"),
    "train": ("training/loop.py", "forward_backward"),
    "sync": ("engines/sync.py", "sync_weights"),
    "save": ("checkpoints/shards.py", "write_shards"),
    "ahead": ("rollout/asynchronous.py", "_make"),
    "send": ("rollout/asynchronous.py", "_send"),
    "score ahead": ("rollout/scoring.py", "score_mine"),
}
LOCK_STEP = ["generate", "score", "logprobs", "train", "sync", "save"]
AHEAD = ["ahead", "train", "send", "score ahead", "save", "logprobs"]  # with --max_staleness


def reward_func(prompts, responses, labels):
    """How many of the response's words are digits of the label."""
    time.sleep(0.01)
    return [sum(word in label for word in response) / 32 for response, label in zip(responses, labels)]


def stack_of(phase: str) -> list[str]:
    """The lines of the trainer that the process is at, outermost first, if it is in `phase` in any thread; else nothing."""
    path, function = PHASES[phase]
    for thread, frame in sys._current_frames().items():
        found = []
        while frame and thread != threading.get_ident():
            found.append((frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno))
            frame = frame.f_back
        if any(file.endswith(path) and name == function for file, name, _ in found):
            return [f"{Path(file).name}:{line} {name}" for file, name, line in found[::-1] if "/trainer/" in file]
    return []


def family() -> list[int]:
    """torchrun and its ranks, this one last."""
    parent, me = os.getppid(), os.getpid()
    siblings = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [parent, *(int(pid) for pid in siblings if int(pid) != me), me]


def watch(plan: dict) -> None:
    delay, skip, inside = plan["delay"], plan["skip"], False
    while True:
        was_inside, inside = inside, bool(stack_of(plan["phase"]))
        if inside and not was_inside:
            skip -= 1
            if skip < 0:
                time.sleep(delay)
                stack = stack_of(plan["phase"])
                if stack:
                    die(plan, stack)
                delay, inside = delay / 2, False  # too late: sooner at the next visit
        time.sleep(0.0005)


def die(plan: dict, stack: list[str]) -> None:
    with (FOLDER / "kills.jsonl").open("a") as file:
        file.write(json.dumps({**plan, "rank": RANK, "time": time.time(), "where": stack[-1]}) + "\n")
    for pid in family() if plan["victim"] == "all" else [os.getpid()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if (FOLDER / "plan.json").exists():
    _plan = json.loads((FOLDER / "plan.json").read_text())
    if _plan["victim"] in (RANK, {0: "all"}.get(RANK)):
        threading.Thread(target=watch, args=(_plan,), daemon=True).start()
