"""Runs the commands of the pages: each page in a folder of its own, training commands many to a launch, in an order that
keeps what one command needs of another."""

import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from doc_blocks import Command
from launch import ROOT, _environment, forked, run_process

DRIVER = str(ROOT / "test" / "docs" / "run_lines.py")
NUM_ROWS = 64
PATH_FLAGS = [
    *("--pretrain", "--dataset", "--eval_dataset", "--output_dir", "--save_path", "--load_checkpoint", "--config"),
    *(
        "--ref_model",
        "--teacher",
        "--reward_pretrain",
        "--critic_pretrain",
        "--rollouts_from",
        "--parity_dump",
        "--reward_func",
        "--env",
    ),
    *("--tokenizer_chat_template", "--parity_trace"),
]
SMALL_PPO = {  # what makes a run of train_ppo short
    "--max_samples": "16",
    "--prompt_max_len": "64",
    "--generate_max_len": "12",
    "--rollout_batch_size": "4",
    "--micro_rollout_batch_size": "8",
    "--train_batch_size": "4",
    "--micro_train_batch_size": "2",
}
MAX_STEPS, MAX_STEPS_OF_RESUMED, LONG = 2, 3, 30  # a page's own --max_steps stay where they are below LONG
LAUNCH_SECONDS, ENTRY_SECONDS, SHELL_SECONDS = 120, 10, 240  # several times what a machine with 2 cores takes


# --- what a page's commands find in their folder


def make_base(folder: Path) -> None:
    """The model and the data that the pages name, made from the embedded demo."""
    code, output = run_process([sys.executable, "-m", "trainer.cli.make_demo"], cwd=folder, timeout=120)
    assert code == 0, output
    shutil.copytree(folder / "demo" / "model", folder / "my_model")
    template = folder / "my_model" / "chat_template.jinja"  # the demo's, which shows tools as well
    template.write_text(
        "{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.description }}\n{% endfor %}"
        + template.read_text()
    )
    for suffix in ("", "_eval"):
        chats = _rows(folder / "demo" / f"sft{suffix}.jsonl")
        pairs = _rows(folder / "demo" / f"pairs{suffix}.jsonl")
        pairs = [{key: row[key][0]["content"] for key in ("prompt", "chosen", "rejected")} for row in pairs]
        plain = [{"question": row["messages"][0]["content"], "answer": row["messages"][1]["content"]} for row in chats]
        prompts = _rows(folder / "demo" / f"prompts{suffix}.jsonl")
        sets = {
            "data": plain,
            "chat": chats,
            "pairs": pairs,
            "prompts": [
                {"question": row["messages"][0]["content"], "answer": row["label"], "domain": ("math", "code")[i % 2]}
                for i, row in enumerate(prompts)
            ],
            "answers": [
                {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
                for row in pairs
                for side in ("chosen", "rejected")
            ],
            "text": [{"text": f"{row['question']}: {row['answer']}"} for row in plain],
        }
        for name, rows in sets.items():
            (folder / f"{name}{suffix}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()[:NUM_ROWS]]


def make_page_folder(base: Path, folder: Path) -> None:
    """A copy of the base, with the repository around it."""
    shutil.copytree(base, folder)
    for name in ("trainer", "test"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    for name in ("scripts", "docs"):
        shutil.copytree(ROOT / name, folder / name)
    for path in ROOT.glob("*.*"):
        if path.is_file():
            shutil.copy(path, folder / path.name)


# --- commands made short


def value_of(argv: list[str], flag: str) -> str | None:
    """The last value of a flag, "" where it has none, None where it is not given."""
    for position in reversed(range(len(argv))):
        if argv[position] == flag:
            following = argv[position + 1 : position + 2]
            return following[0] if following and not following[0].startswith("--") else ""
        if argv[position].startswith(flag + "="):
            return argv[position].removeprefix(flag + "=")
    return None


def shorten(commands: list[Command], port: int) -> None:
    """Give the commands of a page few steps and small sizes, and a checkpoint of the last step the name it then has; and what
    the page exports before."""
    renamed, exported = {":8000": f":{port}"}, {}
    for command in commands:
        if command.kind == "train" and int(value_of(command.argv, "--save_steps") or 0) > MAX_STEPS:
            renamed[f"step_{value_of(command.argv, '--save_steps')}"] = f"step_{MAX_STEPS}"
    for command in commands:
        for old, new in renamed.items():
            pattern = re.escape(old) + r"(?!\d)"
            command.text = re.sub(pattern, new, command.text)
            command.argv = [re.sub(pattern, new, word) for word in command.argv]
        if command.text.startswith("export "):
            exported |= dict(word.split("=", 1) for word in shlex.split(command.text)[1:] if "=" in word)
        command.env = {**exported, **command.env}
        if command.kind == "server":
            if (given := value_of(command.argv, "--port")) is not None:  # small commands refuse a flag that comes twice
                command.argv[command.argv.index(given)] = str(port)
            else:
                command.argv += ["--port", str(port)]
        if command.kind == "train":
            command.argv += _short_flags(command)


def _short_flags(command: Command) -> list[str]:
    argv, added = command.argv, {}
    resumes = value_of(argv, "--load_checkpoint") is not None
    if int(value_of(argv, "--max_steps") or LONG) >= LONG:
        added["--max_steps"] = str(MAX_STEPS_OF_RESUMED if resumes else MAX_STEPS)
    if int(value_of(argv, "--save_steps") or 0) > MAX_STEPS:
        added["--save_steps"] = str(MAX_STEPS)
    if value_of(argv, "--output_dir") is None:
        added["--output_dir"] = f"runs/of_line_{command.line}"
    if value_of(argv, "--pretrain") is None and value_of(argv, "--config") is None:
        added["--max_samples"] = str(NUM_ROWS)  # of the demo
    if value_of(argv, "--train_batch_size") is None and value_of(argv, "--config") is None:
        added["--train_batch_size"] = "16"
        if value_of(argv, "--micro_train_batch_size") is None:
            added["--micro_train_batch_size"] = "4"
    if argv[0] == "train_kd":
        added["--max_samples"] = "16"
        if value_of(argv, "--teacher_answers") is not None:
            added["--generate_max_len"] = SMALL_PPO["--generate_max_len"]
    if argv[0] == "train_ppo" or "--online" in argv:
        own = {"--prompt_max_len"} & {*argv}  # tools make prompts long
        added |= {flag: value for flag, value in SMALL_PPO.items() if flag not in own}
        if value_of(argv, "--overlong_buffer_len") is not None:
            added["--overlong_buffer_len"] = "4"
        if value_of(argv, "--freezing_actor_steps") is not None:
            added["--freezing_actor_steps"] = "1"
    return [word for pair in added.items() for word in pair]


# --- what needs what


def resources(command: Command, inputs: set[str]) -> set[str]:
    """Names of files, folders and ports that a command reads or writes, without those that every page has from the start."""
    if command.kind == "train":
        values = [value_of(command.argv, flag) for flag in PATH_FLAGS]
        found = {part.rpartition("=")[2] for value in values if value for part in value.split(",")}
        found |= {f"port{port}" for word in command.argv for port in re.findall(r"http://[\w.]+:(\d+)", word)}
    elif command.kind == "file":
        found = {command.block.note}
    else:
        text = " ".join(command.argv) if command.kind in ("tool", "server") else command.text
        if command.kind == "snippet":  # of code, what is a text may be a path
            text = " ".join(re.findall(r"\"([^\"\n]*)\"", text))
        found = set(re.findall(r"[\w.-]+(?:/[\w.*-]+)*", text))
        found |= {f"port{port}" for port in re.findall(r"(?:--port |http://[\w.]+:)(\d+)", text)}
    found = {name.split("*")[0].strip("/") for name in found}
    return {name for name in found if name and name.split("/")[0] not in inputs and not name.startswith("-")}


def overlap(some: set[str], others: set[str]) -> bool:
    """Whether one of the names is, or lies within, one of the others."""
    return any(a == b or a.startswith(b + "/") or b.startswith(a + "/") for a in some for b in others)


# --- running


@dataclass
class Outcome:
    """Of one command: `problem` is None where it went well."""

    problem: str | None = None
    output: str = ""
    seconds: float = 0.0


@dataclass
class Runner:
    """Runs commands, and remembers how each went, by `where`."""

    root: Path
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    servers: list[subprocess.Popen] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)

    def folder(self, command: Command) -> Path:
        return self.root / command.block.page.replace("/", "_")

    def run_all(self, pages: list[list[Command]], inputs: set[str]) -> None:
        """Every command of every page, each after those of its page that it needs; as few launches as that allows."""
        waiting, needs = {}, {}
        for commands in pages:
            names = [resources(command, inputs) for command in commands]
            for number, command in enumerate(commands):
                waiting[command.where] = command
                before = zip(commands[:number], names[:number])
                needs[command.where] = {other.where for other, theirs in before if overlap(names[number], theirs)}
        try:
            while waiting:
                self._run_some(waiting, needs)
        finally:
            for server in self.servers:
                server.send_signal(signal.SIGTERM)
                server.wait(30)

    def _run_some(self, waiting: dict[str, Command], needs: dict[str, set[str]]) -> None:
        """Run the next commands, and take them out of `waiting`."""
        for where in list(waiting):
            failed = [other for other in needs[where] if other in self.outcomes and self.outcomes[other].problem]
            if failed:
                self.outcomes[where] = Outcome(f"not run: it needs what {failed[0]} makes, which failed")
                del waiting[where]
        ready = [command for where, command in waiting.items() if not needs[where] & waiting.keys()]
        single = [command for command in ready if command.kind in ("file", "shell", "server", "state")]
        for command in single:
            self._run_single(command)
            del waiting[command.where]
        if single or not ready:
            return
        batches = {self._key(command): None for command in ready}
        batches = {key: self._batch(key, waiting, needs) for key in batches}
        key = max(batches, key=lambda key: len(batches[key]))
        for command in self._launch(key, batches[key]):
            del waiting[command.where]

    def _key(self, command: Command):
        return ("train", command.num_ranks) if command.kind == "train" else ("tools", 0)

    def _batch(self, key, waiting: dict[str, Command], needs: dict[str, set[str]]) -> list[Command]:
        """The waiting commands of one kind of launch that need nothing but each other."""
        chosen: list[Command] = []
        for where, command in waiting.items():  # in the order of the pages
            if (
                self._key(command) == key
                and command.kind in ("train", "tool", "snippet")
                and not needs[where] & waiting.keys() - {other.where for other in chosen}
            ):
                chosen.append(command)
        return chosen

    def _run_single(self, command: Command) -> None:
        started = time.monotonic()
        outcome, folder = Outcome(), self.folder(command)
        if command.kind == "file":
            path = folder / command.block.note
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(command.text)
        elif command.kind == "server":
            self._start_server(command, outcome)
        elif command.kind == "shell":
            line = ["bash", "-eo", "pipefail", "-c", command.text]
            try:
                code, outcome.output = run_process(
                    line, cwd=folder, timeout=SHELL_SECONDS, **self._environment(command)
                )
                outcome.problem = f"exit code {code}" if code else None
            except AssertionError as error:
                outcome.problem = str(error)
        outcome.seconds = time.monotonic() - started
        self.outcomes[command.where] = outcome

    def _environment(self, command: Command) -> dict[str, str]:
        """`python` and `torchrun` are those of this environment, whatever the shell would find."""
        return {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", **self._cache(), **command.env}

    def _cache(self) -> dict[str, str]:
        return {"HF_DATASETS_CACHE": str(self.root / "cache")}

    def _start_server(self, command: Command, outcome: Outcome) -> None:
        name, *flags = command.argv
        log = self.folder(command) / f"server_{command.line}.txt"
        with log.open("w") as out:
            line = [sys.executable, "-m", f"trainer.cli.{name}", *flags]
            options = {"stdout": out, "stderr": out, "cwd": self.folder(command), "start_new_session": True}
            self.servers.append(subprocess.Popen(line, env=_environment(), **options))
        deadline = time.monotonic() + LAUNCH_SECONDS
        while "scoring at" not in log.read_text():
            if self.servers[-1].poll() is not None or time.monotonic() > deadline:
                outcome.problem = "the server did not start"
                break
            time.sleep(0.2)
        outcome.output = log.read_text()

    def _launch(self, key, commands: list[Command]) -> list[Command]:
        """Run commands in one launch; returns those of which it is known how they went, which are one at least."""
        started, number = time.monotonic(), len(self.launches)
        file = self.root / f"launch_{number}.json"
        file.write_text(json.dumps([self._entry(index, command) for index, command in enumerate(commands)]))
        ranks = key[1]
        timeout = LAUNCH_SECONDS + ENTRY_SECONDS * len(commands)
        try:
            if ranks:
                code, output = forked(
                    ranks, DRIVER, str(file), timeout=timeout, cache=self._cache()["HF_DATASETS_CACHE"]
                )
            else:
                line = [sys.executable, DRIVER, str(file)]
                code, output = run_process(line, timeout=timeout, cwd=self.root, **self._cache())
            ending = f"the launch ended with exit code {code}"
        except AssertionError as error:
            output, ending = str(error), f"the launch took longer than {timeout} s"
        results = Path(f"{file}.results")
        found = [json.loads(text) for text in results.read_text().splitlines()] if results.exists() else []
        parts = re.split(r"^=== \d+$", output, flags=re.MULTILINE)
        if len(found) < len(commands) and not (found and found[-1]["ends"]):  # the one that was running ended it
            found.append({"error": ending, "seconds": math.nan})
        for index, (command, outcome) in enumerate(zip(commands, found)):
            part = parts[index + 1] if index + 1 < len(parts) else output
            self.outcomes[command.where] = Outcome(outcome["error"], part[-4000:], outcome["seconds"])
        seconds = time.monotonic() - started
        self.launches.append(f"{key[0]} on {ranks or 1}: {len(found)} commands, {seconds:.0f} s")
        return commands[: len(found)]

    def _entry(self, index: int, command: Command) -> dict:
        own = {"code": command.text, "name": command.where} if command.kind == "snippet" else {"line": command.argv}
        return {"id": index, "folder": str(self.folder(command)), "env": command.env, **own}
