"""--max_staleness: rollouts ahead of training are within the bound, replay to the bit, and save the time of waiting."""

import itertools
import json
import statistics
from collections import Counter

import pytest
import torch
from launch import ROOT, read_rows, read_steps, torchrun

from trainer.cli import train_ppo
from trainer.cli.ppo_flags import validate
from trainer.datasets.demo import make_demo
from trainer.errors import UserError
from trainer.rollout.asynchronous import newest_checksum
from trainer.rollout.rollouts_file import read_rollouts
from trainer.training.rollout_facts import effective_share

BOUND, STEPS, SAMPLES = 2, 8, 8  # an optimizer step for each rollout
SAME = ["loss", "grad_norm", "tis_weight", "rollout_ess", "rollout_kl", "reward", "staleness", "batch_hash"]
REWARD = """
def reward_func(prompts, responses, labels):
    return [sum(word in label for word in response) / 32 for response, label in zip(responses, labels)]
"""
FAILING = """
calls = []
def reward_func(prompts, responses, labels):
    calls.append(1)
    if len(calls) > 2:
        raise KeyError("third call")
    return [float(len(response)) for response in responses]
"""


def flags(folder, name: str, *more: str) -> list[str]:
    line = ["--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/demo/prompts.jsonl", "--label_key", "label"]
    line += ["--param_dtype", "fp32", "--max_samples", "24", "--no_save", "--advantage_estimator", "group_norm"]
    line += ["--prompt_max_len", "64", "--generate_max_len", "8", "--rollout_batch_size", "4", "--tis_cap", "2"]
    line += ["--n_samples_per_prompt", "2", "--train_batch_size", str(SAMPLES), "--micro_train_batch_size", "4"]
    line += ["--learning_rate", "1e-2", "--lr_scheduler", "constant", "--max_steps", str(STEPS)]
    line += ["--eval_dataset", f"{folder}/few.jsonl", "--eval_steps", "4"]
    line += [] if "--reward_func" in more else ["--reward_func", f"{folder}/reward.py"]
    return [*line, "--output_dir", str(folder / name), *more]


BACKENDS = {"fsdp2": ["--backend", "fsdp2"], "zero3": ["--backend", "deepspeed", "--zero_stage", "3"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Lock step, ahead, and the replay of ahead, on each backend; a run that goes on after a kill; a failing reward."""
    folder, ahead = tmp_path_factory.mktemp("asynchronous"), ["--max_staleness", str(BOUND)]
    make_demo(str(folder / "demo"))
    (folder / "reward.py").write_text(REWARD)
    (folder / "failing.py").write_text(FAILING)
    with open(folder / "demo/prompts_eval.jsonl") as file:
        (folder / "few.jsonl").write_text("".join(itertools.islice(file, 4)))
    lines = [flags(folder, "lockstep", *BACKENDS["fsdp2"])]
    for name, backend in BACKENDS.items():
        lines.append(flags(folder, name, *backend, *ahead, "--save_steps", "3"))
    frozen = ["--rollouts_from", f"{folder}/zero3/rollouts.jsonl"]
    lines.append(flags(folder, "zero3-replay", *BACKENDS["zero3"], *frozen))
    # a run is at its end as it is after a kill: it has trained rollouts that no checkpoint has
    saved = ["--load_checkpoint", f"{folder}/fsdp2/checkpoints/step_6"]
    lines.append(flags(folder, "fsdp2", *BACKENDS["fsdp2"], *ahead, *saved, "--max_steps", "10"))
    again = ["--rollouts_from", f"{folder}/fsdp2/rollouts.jsonl", "--max_steps", "10"]
    lines.append(flags(folder, "resumed-replay", *BACKENDS["fsdp2"], *again))
    lines.append(flags(folder, "failing", *BACKENDS["fsdp2"], *ahead, "--reward_func", f"{folder}/failing.py"))
    (folder / "slow.json").write_text(json.dumps([["train_ppo", *line] for line in lines[:2]]))
    (folder / "lines.json").write_text(json.dumps([["train_ppo", *line] for line in lines[2:]]))
    slow, usual = ["0.8", "0.8", str(folder / "slow.json")], ["0", "0", str(folder / "lines.json")]
    code, output = torchrun(2, str(ROOT / "test/slow_engine.py"), *slow, *usual, timeout=300)
    assert code == 1 and "run 4 of this launch begins" in output, output[-5000:]  # the failing reward is the last
    return folder, output


def staleness(samples: list, rollout: int) -> list[int]:
    return [rollout - sample.version for sample in samples]


@pytest.mark.parametrize("name", BACKENDS)
def test_no_sample_is_older_than_the_bound(runs, name):
    folder, _ = runs
    found = [staleness(samples, r) for r, samples in enumerate(read_rollouts(f"{folder}/{name}/rollouts.jsonl"))]
    assert max(map(max, found)) in (1, BOUND) and min(map(min, found)) >= 0, found
    for row in read_steps(folder / name)[:STEPS]:
        of_row = found[row["rollout"]]
        assert (row["staleness"], row["staleness_max"]) == (statistics.mean(of_row), max(of_row))
        assert 0 < row["rollout_ess"] <= 1 + 1e-12 and row["rollout_logprob_diff"] < 1
    assert any(row["rollout_logprob_diff"] > 1e-3 for row in read_steps(folder / name)), "older weights draw the same"


def test_lock_step_has_no_versions(runs):
    folder, _ = runs
    assert all("version" not in json.loads(line) for line in (folder / "lockstep/rollouts.jsonl").open())
    rows = read_steps(folder / "lockstep")
    assert not any("staleness" in row for row in rows) and max(row["rollout_logprob_diff"] for row in rows) < 1e-5


def assert_same_training(run, replay, steps: int) -> None:
    rows, replayed = read_steps(run), read_steps(replay)
    assert len(rows) == len(replayed) == steps
    for row, other in zip(rows, replayed):
        for key in SAME:
            assert row[key] == other[key], (row["step"], key)
    assert len({row["grad_norm"] for row in rows}) == steps and min(row["grad_norm"] for row in rows) > 0
    # after a resume, the last row of a step counts
    evaluations, others = (
        {row["step"]: (row["weights_checksum"], row["eval_reward"]) for row in read_rows(path) if "eval_reward" in row}
        for path in (run, replay)
    )
    assert evaluations == others and len({checksum for checksum, _ in evaluations.values()}) == len(evaluations) > 2


def test_a_replay_is_the_run_to_the_bit(runs):
    folder, _ = runs
    assert_same_training(folder / "zero3", folder / "zero3-replay", STEPS)


def test_a_run_that_was_resumed_trains_no_sample_twice_and_replays_to_the_bit(runs):
    folder, _ = runs
    assert any(row.get("event") == "resume" and row["step"] == 6 for row in read_rows(folder / "fsdp2"))
    assert_same_training(folder / "fsdp2", folder / "resumed-replay", 10)
    rollouts = read_rollouts(f"{folder}/fsdp2/rollouts.jsonl")
    assert staleness(rollouts[6], 6) == [0] * SAMPLES, "the resumed run draws again what was not trained"
    for episode in (rollouts[:6], rollouts[6:]):  # 24 prompts are 6 rollouts
        trained = Counter(sample.row for samples in episode for sample in samples)
        assert set(trained.values()) == {2}, trained
    assert len(trained) == 16


def test_generation_and_training_overlap(runs):
    """Half of the time of lock step is the engine's. The first rollouts fill the queue."""
    folder, _ = runs
    seconds = {name: [row["time"] for row in read_steps(folder / name)[:6]] for name in ("lockstep", "fsdp2")}
    speed = {name: (len(times) - 1) * SAMPLES / (times[-1] - times[0]) for name, times in seconds.items()}
    assert speed["fsdp2"] >= 1.5 * speed["lockstep"], speed


def test_a_failing_reward_ends_the_run_in_one_line_with_a_checkpoint(runs):
    folder, output = runs
    errors = {line for line in output.splitlines() if line.startswith("error: ")}
    assert all("raised KeyError: 'third call' (line 6)" in error for error in errors) and errors
    saved = [path.name for path in (folder / "failing/checkpoints").glob("step_*")]
    steps = read_steps(folder / "failing")
    assert saved == [f"step_{len(steps)}"] and f'File "{ROOT}/trainer' not in output


REFUSED = {
    "--rollouts_from": ["--rollouts_from", "rollouts.jsonl"],
    "--dynamic_filtering": ["--dynamic_filtering"],
    "--offload_actor_optimizer": ["--offload_actor_optimizer"],
    "--verify_resume": ["--verify_resume", "2", "--load_checkpoint"],
}


@pytest.mark.parametrize("other", REFUSED)
def test_what_does_not_go_with_it_is_one_line(tmp_path, other):
    args, _ = train_ppo.parse(flags(tmp_path, "x", "--backend", "fsdp2", "--max_staleness", "2", *REFUSED[other]))
    with pytest.raises(UserError) as found:
        validate(args)
    assert str(found.value) == f"--max_staleness: 2 with {other} (allowed: 0)"


def test_it_needs_a_correction(tmp_path):
    line = flags(tmp_path, "x", "--backend", "fsdp2", "--max_staleness", "2")
    at = line.index("--tis_cap")
    args, _ = train_ppo.parse(line[:at] + line[at + 2 :])
    with pytest.raises(UserError, match=r"--tis_cap: missing with --max_staleness 2"):
        validate(args)


def test_different_weights_under_one_version_are_an_error():
    assert newest_checksum([{0: "a", 1: "b"}, {1: "b", 2: "c"}, {}]) == "c"
    with pytest.raises(RuntimeError, match="different weights"):
        newest_checksum([{0: "a"}, {0: "b"}])


def test_effective_share():
    """Kish's formula, by hand: weights 1, 1, 2 give 16 / (3 * 6)."""
    assert effective_share(torch.zeros(5, dtype=torch.float64)) == 1
    assert effective_share(torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64).log()) == pytest.approx(16 / 18)


URL = ["--rollout_engine", "vllm_server", "--engine_urls", "http://127.0.0.1:1"]
NO_SERVER = {
    "--engine_urls: missing with --rollout_engine vllm_server": URL[:2],
    "--engine_urls: http://127.0.0.1:1 with --rollout_engine hf": URL[2:],
    "--engine_urls: 127.0.0.1:1 (allowed: http://HOST:PORT": [*URL[:3], "127.0.0.1:1"],
    "--engine_urls: 2 for 1 ranks": [*URL[:3], "http://a,http://b"],
    "--top_k: with --rollout_engine vllm_server": [*URL, "--top_k", "5"],
    "--temperature: 0.001 with --rollout_engine vllm_server": [*URL, "--temperature", "0.001"],
}


@pytest.mark.parametrize("error", NO_SERVER)
def test_what_servers_cannot_do_is_one_line(tmp_path, monkeypatch, error):
    monkeypatch.setenv("WORLD_SIZE", "1")
    args, _ = train_ppo.parse(flags(tmp_path, "x", "--backend", "fsdp2", *NO_SERVER[error]))
    with pytest.raises(UserError) as found:
        validate(args)
    assert str(found.value).startswith(error)


def test_ranks_that_update_alone_need_a_server_each(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    args, _ = train_ppo.parse(flags(tmp_path, "x", "--backend", "fsdp2", *URL, "--max_staleness", "1"))
    with pytest.raises(UserError, match="--engine_urls: 1 for 2 ranks with --max_staleness 1"):
        validate(args)
