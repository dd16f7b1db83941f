"""--max_staleness: rollouts ahead of training are within the bound, replay to the bit, and save the time of waiting."""

import itertools
import json
import statistics
from collections import Counter
from pathlib import Path

import pytest
import torch
from launch import ROOT, SHORT_ROLLOUTS, read_rows, read_steps, torchrun

from trainer.cli import train_ppo
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.methods.rollout_facts import effective_share
from trainer.rollout.asynchronous import newest_checksum
from trainer.rollout.rollouts_file import read_rollouts
from trainer.rollout.timeline import append_events
from trainer.runs.rl.rl_checks import validate

BOUND, STEPS, SAMPLES = 2, 8, 8  # an optimizer step for each rollout
SAME = ["loss", "grad_norm", "tis_weight", "rollout_ess", "rollout_kl", "reward", "staleness", "batch_hash"]
REWARD = """
def reward_func(prompts, responses, labels):
    return [sum(word in label for word in response) / 32 for response, label in zip(responses, labels)]
"""
TALKER = """
class Environment:
    def reset(self, task):
        self.turn = 0
        return task["messages"]

    def step(self, response):
        self.turn += 1
        reward = sum(character in "0123456789" for character in response) / 8
        return (reward, True) if self.turn == 2 else ([{"role": "user", "content": "go on"}], reward, False)
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
    line += [*SHORT_ROLLOUTS, "--tis_cap", "2"]
    line += ["--n_samples_per_prompt", "2", "--train_batch_size", str(SAMPLES), "--micro_train_batch_size", "4"]
    line += ["--learning_rate", "1e-2", "--lr_scheduler", "constant", "--max_steps", str(STEPS)]
    line += ["--eval_dataset", f"{folder}/few.jsonl", "--eval_steps", "4"]
    line += [] if "--reward_func" in more or "--env" in more else ["--reward_func", f"{folder}/reward.py"]
    return [*line, "--output_dir", str(folder / name), *more]


BACKENDS = {"fsdp2": ["--backend", "fsdp2"], "zero3": ["--backend", "deepspeed", "--zero_stage", "3"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Lock step, ahead, and the replay of ahead, on each backend; a run that goes on after a kill; a failing reward."""
    folder, ahead = tmp_path_factory.mktemp("asynchronous"), ["--max_staleness", str(BOUND)]
    make_demo(str(folder / "demo"))
    (folder / "reward.py").write_text(REWARD)
    (folder / "failing.py").write_text(FAILING)
    (folder / "talker.py").write_text(TALKER)
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
    # the same command, from before its last two rollouts
    saved = ["--load_checkpoint", f"{folder}/zero3/checkpoints/step_6"]
    lines.append(flags(folder, "zero3", *BACKENDS["zero3"], *ahead, "--save_steps", "3", *saved))
    again = ["--rollouts_from", f"{folder}/fsdp2/rollouts.jsonl", "--max_steps", "10"]
    lines.append(flags(folder, "resumed-replay", *BACKENDS["fsdp2"], *again))
    talker = ["--env", f"{folder}/talker.py", "--generate_max_len", "40", "--stop", *"aeiou135"]
    again = ["--rollouts_from", f"{folder}/turns/rollouts.jsonl"]
    lines.append(flags(folder, "turns", *BACKENDS["fsdp2"], *ahead, *talker, "--timeline"))
    lines.append(flags(folder, "turns-replay", *BACKENDS["fsdp2"], *talker, *again))
    partial = flags(folder, "partial", *BACKENDS["zero3"], *ahead, "--partial_rollouts", "--timeline")
    again = ["--rollouts_from", f"{folder}/partial/rollouts.jsonl"]
    lines.append(flags(folder, "partial-replay", *BACKENDS["zero3"], *again))
    lines.append(flags(folder, "failing", *BACKENDS["fsdp2"], *ahead, "--reward_func", f"{folder}/failing.py"))
    (folder / "slow.json").write_text(json.dumps([["train_ppo", *line] for line in lines[:2]]))
    (folder / "lines.json").write_text(json.dumps([["train_ppo", *line] for line in lines[2:]]))
    (folder / "partial.json").write_text(json.dumps([["train_ppo", *partial]]))
    slow, usual = ["0.8", "0.8", str(folder / "slow.json")], ["0", "0", str(folder / "lines.json")]
    middle = ["0.5", "0.1", str(folder / "partial.json")]
    code, output = torchrun(2, str(ROOT / "test/slow_engine.py"), *slow, *middle, *usual, timeout=300)
    assert code == 1 and "run 8 of this launch begins" in output, output[-5000:]  # the failing reward is the last
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
    # a group of equal scores has no gradient, and which samples a group has depends on the speed of the machine
    assert len({row["grad_norm"] for row in rows} - {0.0}) > steps / 2
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


def test_a_resumed_run_trains_what_was_generated_before(runs):
    """Its rows are those of the first start, to the bit, and nothing is drawn again."""
    folder, output = runs
    assert output.count("rollouts 6 to 7 were generated before the resume: they are trained as they are") == 1
    rows = [row for row in read_rows(folder / "zero3") if row.get("step") in (7, 8) and "loss" in row]
    assert [row["step"] for row in rows] == [7, 8, 7, 8]
    for key in SAME:
        assert [row[key] for row in rows[:2]] == [row[key] for row in rows[2:]], key
    assert all("time_generate" in row for row in rows[:2]) and not any("time_generate" in row for row in rows[2:])
    assert not list((folder / "zero3/ahead").iterdir()), "of a run at its end"


def test_new_weights_interrupt_responses_that_go_on_from_their_tokens(runs):
    """A response says which version drew which tokens, and its replay is the run to the bit."""
    folder, _ = runs
    assert_same_training(folder / "partial", folder / "partial-replay", STEPS)
    rollouts, rows, several = read_rollouts(f"{folder}/partial/rollouts.jsonl"), read_steps(folder / "partial"), 0
    for number, (samples, row) in enumerate(zip(rollouts, rows, strict=True)):
        stale = []
        for sample in samples:
            several += len(sample.versions) > 1
            starts, versions = zip(*sample.versions)
            assert starts[0] == 0 and list(starts) == sorted(set(starts)) and starts[-1] < len(sample.response_ids)
            assert list(versions) == sorted(set(versions)) and sample.version == versions[0] >= number - BOUND
            of_tokens = [max(v for s, v in sample.versions if s <= at) for at in range(len(sample.response_ids))]
            stale.append(number - statistics.mean(of_tokens))
        assert row["staleness"] == pytest.approx(statistics.mean(stale), abs=1e-12)
        assert row["resumed_fraction"] == sum(len(sample.versions) > 1 for sample in samples) / SAMPLES
    assert several > SAMPLES, "few responses were interrupted"
    assert all("versions" not in json.loads(line) for line in (folder / "zero3/rollouts.jsonl").open())


def test_environments_ahead(runs):
    folder, _ = runs
    assert_same_training(folder / "turns", folder / "turns-replay", STEPS)
    samples = [sample for rollout in read_rollouts(f"{folder}/turns/rollouts.jsonl") for sample in rollout]
    assert any(len(sample.turns) == 2 for sample in samples) and any(
        row["staleness"] > 0 for row in read_steps(folder / "turns")
    )


def test_a_timeline_shows_what_each_rank_and_its_thread_do(runs):
    folder, _ = runs
    for name in ("turns", "partial"):
        events = json.loads((folder / name / "timeline.json").read_text())
        spans = [event for event in events if event["ph"] == "X"]
        found = {(event["pid"], event["tid"], event["name"]) for event in spans}
        both = [(0, "sync"), (0, "wait"), (0, "train"), (0, "logprobs"), (1, "generate")]
        assert found >= {(rank, tid, kind) for rank in (0, 1) for tid, kind in both}, found
        trained = [event for event in spans if event["name"] == "train" and event["pid"] == 1]
        rows = read_steps(folder / name)
        assert len(trained) == STEPS and {row["timeline"] for row in rows} == {"timeline.json"}
        for before, after in itertools.pairwise(trained):
            assert before["ts"] + before["dur"] <= after["ts"]
    in_training = sum(event["dur"] for event in trained) / 1e6
    assert in_training >= STEPS * 0.1, "the delay of a step is inside its span"


def test_a_torn_timeline_is_mended(tmp_path):
    path = str(tmp_path / "timeline.json")
    one, two, three = ({"name": name, "args": {"name": name}} for name in "abc")
    append_events(path, [one, two])
    append_events(path, [three])
    assert json.loads(Path(path).read_text()) == [one, two, three]
    for torn in range(1, 40):
        whole = json.dumps(one).encode()
        Path(path).write_bytes((b"[\n" + whole + b",\n" + json.dumps(two).encode() + b",\n" + whole)[:-torn])
        append_events(path, [three])
        assert json.loads(Path(path).read_text())[-1] == three


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
    "--offload_actor_optimizer": ["--offload_actor_optimizer"],
    "--verify_resume": ["--verify_resume", "2", "--load_checkpoint"],
}


@pytest.mark.parametrize("other", REFUSED)
def test_what_does_not_go_with_it_is_one_line(tmp_path, other):
    args, _ = train_ppo.parse(flags(tmp_path, "x", "--backend", "fsdp2", "--max_staleness", "2", *REFUSED[other]))
    with pytest.raises(UserError) as found:
        validate(args)
    assert str(found.value).startswith(f"--max_staleness 2 with {other}: ")


@pytest.mark.parametrize("other", [["--stop", "x"], ["--routing_replay"]])
def test_what_does_not_go_with_partial_rollouts_is_one_line(tmp_path, other):
    line = flags(tmp_path, "x", "--backend", "fsdp2", "--partial_rollouts", *other)
    for more, error in ((["--max_staleness", "2"], f"with {other[0]}: "), ([], "without --max_staleness: ")):
        args, _ = train_ppo.parse([*line, *more][: None if more else len(line) - len(other)])
        with pytest.raises(UserError, match="--partial_rollouts") as found:
            validate(args)
        assert error in str(found.value)


def test_it_needs_a_correction(tmp_path):
    line = flags(tmp_path, "x", "--backend", "fsdp2", "--max_staleness", "2")
    at = line.index("--tis_cap")
    args, _ = train_ppo.parse(line[:at] + line[at + 2 :])
    with pytest.raises(UserError, match="--max_staleness 2 without --tis_cap: older weights"):
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
    "--rollout_engine vllm_server without --engine_urls: ": URL[:2],
    "--engine_urls http://127.0.0.1:1 with --rollout_engine hf: ": URL[2:],
    "--engine_urls: 127.0.0.1:1 (allowed: http://HOST:PORT": [*URL[:3], "127.0.0.1:1"],
    "--engine_urls: http://a:port (allowed: http://HOST:PORT": [*URL[:3], "http://a:port"],
    "--engine_urls: http://a:1 and http://a:1 are one server": [*URL[:3], "http://a:1,http://b:1,http://a:1"],
    "--engine_urls: http://a and HTTP://A:80/ are one server": [*URL[:3], "http://a,HTTP://A:80/"],
    "--engine_urls: http://localhost:1/ and http://127.0.0.1:1 are": [
        *URL[:3],
        "http://localhost:1/,http://127.0.0.1:1",
    ],
    "--min_p 0.1 with --rollout_engine vllm_server and without --top_k: ": [*URL, "--min_p", "0.1"],
    "--temperature 0.001 with --rollout_engine vllm_server: ": [*URL, "--temperature", "0.001"],
}


@pytest.mark.parametrize("error", NO_SERVER)
def test_what_servers_cannot_do_is_one_line(tmp_path, monkeypatch, error):
    monkeypatch.setenv("WORLD_SIZE", "1")
    args, _ = train_ppo.parse(flags(tmp_path, "x", "--backend", "fsdp2", *NO_SERVER[error]))
    with pytest.raises(UserError) as found:
        validate(args)
    assert str(found.value).startswith(error)
