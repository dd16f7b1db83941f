"""--rollout_engine sglang, on a server that speaks the HTTP of SGLang and runs the tiny model; see sglang_stub.py."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import in_fork, read_steps, train_many
from sglang_stub import GENERATE, SAMPLING, UPDATE, SGLangStub, checked
from transformers import AutoModelForCausalLM

from trainer.cli import evaluate
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.rollout.engines.sampling import Sampling
from trainer.rollout.engines.servers import LostServer
from trainer.rollout.engines.sglang_server import SGLangServerEngine, _completion, params_of
from trainer.rollout.rollouts_file import read_rollouts

STEPS, GREEDY = 3, Sampling(0.0, 6, (2,))
REWARD = """
def reward_func(prompts, responses, labels):
    return [sum(map(ord, response)) % 7 / 7 for response in responses]
"""
TALKER = """
class Environment:
    def reset(self, task):
        return task["messages"]

    def step(self, response):
        return len(response) % 5 / 5, True
"""


def line_of(folder, name: str, stubs: list[SGLangStub], *more: str) -> list[str]:
    line = ["--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/demo/prompts.jsonl", "--label_key", "label"]
    line += [
        "--param_dtype",
        "fp32",
        "--no_save",
        "--max_samples",
        "24",
        "--num_episodes",
        "2",
        "--max_steps",
        str(STEPS),
    ]
    line += [
        "--prompt_max_len",
        "64",
        "--generate_max_len",
        "8",
        "--rollout_batch_size",
        "8",
        "--n_samples_per_prompt",
        "2",
    ]
    line += ["--micro_rollout_batch_size", "4", "--micro_train_batch_size", "4", "--learning_rate", "1e-2"]
    line += ["--lr_scheduler", "constant", "--lr_warmup_ratio", "0", "--output_dir", str(folder / name)]
    line += ["--train_batch_size", "16", "--advantage_estimator", "group_norm"]
    line += [] if "--env" in more else ["--reward_func", f"{folder}/reward.py"]
    if stubs:
        line += ["--rollout_engine", "sglang", "--engine_urls", ",".join(stub.url for stub in stubs)]
        line += ["--engine_api_key", f"{folder}/key", "--max_logprob_diff", "1e-4"]
    return ["train_ppo", *line, *more]


def pairs_line(folder, name: str, stubs: list) -> list[str]:
    """The same for `train_dpo --online`: eight pairs of two answers."""
    _, *line = line_of(folder, name, stubs)
    place = line.index("--advantage_estimator")
    del line[place : place + 2]
    line[line.index("--train_batch_size") + 1] = "8"
    return ["train_dpo", "--online", *line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sglang")
    make_demo(str(folder / "demo"))
    for name, text in (("reward.py", REWARD), ("talker.py", TALKER), ("key", "secret\n")):
        (folder / name).write_text(text)
    return folder


def stub_of(folder, **options) -> SGLangStub:
    return SGLangStub(f"{folder}/demo/model", **{"key": "secret"} | options)


@pytest.fixture(scope="module")
def runs(folder):
    stubs = {"two": [stub_of(folder), stub_of(folder, dies_after=4, gone=0.2)]}
    stubs |= {name: [stub_of(folder)] for name in ("cut", "ahead", "env", "pairs")}
    stubs["both_ahead"] = [stub_of(folder), stub_of(folder)]
    ahead = ["--max_staleness", "1", "--partial_rollouts", "--tis_cap", "2", "--max_logprob_diff", "10"]
    lines = [
        line_of(folder, "hf", []),
        line_of(folder, "two", stubs["two"], "--sync_folder", str(folder / "shared")),
        line_of(folder, "cut", stubs["cut"], "--top_k", "5", "--top_p", "0.9", "--lora_rank", "4"),
        line_of(folder, "ahead", stubs["ahead"], *ahead),
        line_of(folder, "both_ahead", stubs["both_ahead"], *ahead, "--sync_folder", str(folder / "shared_ahead")),
        line_of(folder, "env", stubs["env"], "--env", f"{folder}/talker.py"),
        pairs_line(folder, "pairs", stubs["pairs"]),
    ]
    return stubs, train_many(2, lines, folder, timeout=250)


def test_samples_and_losses_are_those_of_the_hf_engine_also_after_syncs(runs, folder):
    """The servers draw by the same random numbers. One of the two is killed once, and starts with the old weights."""
    stubs, _ = runs
    expected, found = (read_rollouts(f"{folder}/{name}/rollouts.jsonl") for name in ("hf", "two"))
    assert len(expected) == len(found) == STEPS
    for ours, others in zip(found, expected):
        assert [one.response_ids for one in ours] == [one.response_ids for one in others]
        mine, theirs = (torch.tensor([p for one in each for p in one.log_probs]) for each in (ours, others))
        assert (mine - theirs).abs().max() < 1e-5
    for row, other in zip(read_steps(folder / "two"), read_steps(folder / "hf"), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-5) and row["rollout_logprob_diff_max"] < 1e-5
        assert row["weights_checksum"] == other["weights_checksum"] or row["step"] > 1  # rounding differs later
    killed = stubs["two"][1]
    assert 0 < killed.died_after < len(killed.asked), "it is used again"
    for stub in stubs["two"]:
        assert len(stub.updates) >= STEPS and len({update["weight_version"] for update in stub.updates}) >= STEPS
        assert all(str(folder / "shared") in update["model_path"] for update in stub.updates)
    assert not list((folder / "shared").iterdir()), "the weights are removed at the end"


@pytest.mark.parametrize(
    ("name", "place", "least"), [("two", "shared", STEPS), ("both_ahead", "shared_ahead", STEPS - 1)]
)
def test_the_ranks_of_a_machine_write_each_version_once(runs, folder, name, place, least):
    """Each of the two ranks has a server. Both servers read the same folder. Ahead, the last rollout may need no new weights."""
    stubs, _ = runs
    places = {}
    for update in (update for stub in stubs[name] for update in stub.updates):
        places.setdefault(update["weight_version"], set()).add(update["model_path"])
    assert len(places) >= least and all(stub.updates for stub in stubs[name])
    assert all(paths == {f"{folder}/{place}/{Path(*paths).parent.name}/{one}"} for one, paths in places.items()), places
    assert len({Path(path).parent for paths in places.values() for path in paths}) == 1
    assert not list((folder / place).iterdir())


@pytest.mark.parametrize("name", ["cut", "env", "pairs"])
def test_log_probs_of_other_runs_are_those_of_training(runs, folder, name):
    stubs, _ = runs
    rows = read_steps(folder / name)
    assert len(rows) == STEPS and len(stubs[name][0].updates) > 1
    assert all(row[f"rollout_logprob_diff{'' if name == 'pairs' else '_max'}"] < 1e-5 for row in rows)
    if name == "cut":
        samples = [one for each in read_rollouts(f"{folder}/cut/rollouts.jsonl") for one in each]
        assert all(1 <= len(kept) <= 5 for one in samples for kept in one.kept_ids) and samples[0].kept_ids


def test_ahead_samples_have_the_version_of_their_weights(runs, folder):
    rollouts = read_rollouts(f"{folder}/ahead/rollouts.jsonl")
    assert len(rollouts) == STEPS
    assert all(0 <= number - one.version <= 1 for number, each in enumerate(rollouts) for one in each)


@pytest.mark.parametrize("line", [line_of, pairs_line])
def test_a_server_that_keeps_old_weights_ends_the_run(folder, line):
    stale = stub_of(folder, ignores_after=1)
    command, *flags = line(folder, f"stale-{line.__name__}", [stale])
    code, output = in_fork("-m", f"trainer.cli.{command}", *flags)
    assert code == 2 and "error: --max_logprob_diff: 0.0001, but log-probs of the engine" in output, output[-2000:]
    assert len(stale.updates) == 2 and len(read_steps(folder / f"stale-{line.__name__}")) == 1


# --- the engine of one rank


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def engine_of(folder, *stubs: SGLangStub, key: str | None = "secret") -> SGLangServerEngine:
    options = {"device": torch.device("cpu"), "batch_size": 4, "max_len": 64, "vocab_size": 400, "key": key}
    return SGLangServerEngine([s.url for s in stubs], folder=f"{folder}/sync", published=lambda pairs: pairs, **options)


def weights_of(folder, scale: float = 1.0):
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/demo/model", dtype=torch.float32)
    return [(name, value * scale) for name, value in model.state_dict().items() if name != "lm_head.weight"]


def test_requests_have_the_fields_and_answers_the_forms_of_sglang(one_rank, folder):
    stub = stub_of(folder)
    engine = engine_of(folder, stub)
    engine.update_weights(weights_of(folder))
    cut = Sampling(0.7, 6, (2, 3), ("7",), top_p=0.9, top_k=4)
    for sampling, seeds in ((GREEDY, []), (cut, [5])):
        [completion] = engine.generate([[5, 6, 7]], sampling, seeds)
        assert len(completion.log_probs) == len(completion.token_ids) and bool(completion.kept_ids) == (sampling is cut)
    body = stub.asked[-1]
    assert checked(body, GENERATE)["return_logprob"] and body["sampling_params"].keys() <= SAMPLING.keys()
    assert body["sampling_params"] == params_of(cut, 5, 6) and body["sampling_params"]["sampling_seed"] == 5
    assert not body["sampling_params"]["ignore_eos"], "it would switch stop_token_ids off"
    assert checked(stub.updates[0], UPDATE)["weight_version"] == stub.version


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"dtype": "auto"}, "has --dtype auto"),
        ({"quantization": "fp8"}, "has --quantization fp8"),
        ({"speculative_algorithm": "EAGLE"}, "has --speculative-algorithm EAGLE"),
        ({"preferred_sampling_params": '{"top_k": 5}'}, "has --preferred-sampling-params"),
        ({"max_req_input_len": 59}, "takes 63 tokens"),
        ({"key": "another"}, "status 401 Unauthorized"),
    ],
)
def test_servers_that_would_do_something_else_are_refused_at_the_start(one_rank, folder, flags, said):
    with pytest.raises(UserError, match=said):
        engine_of(folder, stub_of(folder, **flags))


def test_servers_without_seeds_are_known(one_rank, folder):
    assert engine_of(folder, stub_of(folder)).are_seeded
    assert not engine_of(folder, stub_of(folder), stub_of(folder, enable_deterministic_inference=False)).are_seeded


def test_weights_that_all_servers_refuse_end_the_run_at_once(one_rank, folder):
    engine = engine_of(folder, stub_of(folder), stub_of(folder))
    with pytest.raises(UserError, match="Failed to update weights: other") as error:
        engine.update_weights([("other", torch.ones(3))])
    assert not isinstance(error.value, LostServer), "nobody waits for it"


def test_an_answer_of_other_weights_and_an_abort_by_others_lose_the_server(one_rank, folder, capsys):
    stub, good = stub_of(folder), stub_of(folder)
    engine = engine_of(folder, stub, good)
    engine.update_weights(weights_of(folder))
    [expected] = engine.generate([[5, 6]], GREEDY)
    stub.version = "another"
    engine._held_until[stub.url] = float("inf")  # nobody has looked since
    assert engine.generate([[5, 6]] * 4, GREEDY) == [expected] * 4
    assert "has weights of the version 'another'" in capsys.readouterr().out
    engine.update_weights(weights_of(folder))
    stub.hurry = lambda: stub.abort_request({"abort_all": True})
    assert engine.generate([[5, 6]] * 4, GREEDY) == [expected] * 4
    assert "a request was aborted" in capsys.readouterr().out


def test_an_interruption_gives_the_tokens_so_far(one_rank, folder):
    stub, began = stub_of(folder), threading.Event()
    engine, count = engine_of(folder, stub), iter(range(10**6))
    engine.update_weights(weights_of(folder))

    def hurry() -> None:
        if next(count) == 2:
            began.set()
        if began.is_set():
            threading.Event().wait(0.05)

    stub.hurry, long = hurry, Sampling(0.0, 900, ())
    stub.eos = set()
    [completion] = engine.generate([[5, 6]], long, interrupted=began.is_set)
    assert not completion.finished and 0 < len(completion.token_ids) < 900


def test_ends_that_training_does_not_know_are_refused(one_rank, folder):
    stub = stub_of(folder)
    engine = engine_of(folder, stub)
    engine.update_weights(weights_of(folder))
    [completion] = engine.generate([[5, 6]], GREEDY)
    stub.eos = {completion.token_ids[0]}
    with pytest.raises(UserError, match=f"ended a response at token {completion.token_ids[0]}, which ends none here"):
        engine.generate([[5, 6]], GREEDY)
    stub.eos, stub.info = set(), stub.info | {"max_req_input_len": 1}
    with pytest.raises(UserError, match="ended a response after 3 of 6 tokens"):
        engine.generate([[5, 6]], GREEDY)


def answer_of(**changes) -> dict:
    info = {"output_token_logprobs": [[-1, 1, None], [-2, 2, None]], "finish_reason": {"type": "stop", "matched": 2}}
    return {"output_ids": [1, 2], "meta_info": info | changes}


def test_answers_have_a_checked_form():
    assert _completion(answer_of(), 5, 3, False).log_probs == [-1.0, -2.0]
    sets = {"output_token_sampling_mask": [[0, 1], [2]], "output_token_sampling_logprobs": [-0.5, 0.0]}
    assert _completion(answer_of(**sets), 5, 3, True).log_probs == [-0.5, 0.0]
    wrong = [
        ({**answer_of(output_token_logprobs=[]), "output_ids": []}, 5, 3, False),
        (answer_of(), 1, 3, False), (answer_of(), 5, 2, False), (answer_of(), 5, 3, True), ({}, 5, 3, False), ([], 5, 3, False),
        (answer_of(output_token_logprobs=[[-1, 2, None], [-2, 1, None]]), 5, 3, False),
        (answer_of(output_token_logprobs=[[-1, 1, None], [float("nan"), 2, None]]), 5, 3, False),
        (answer_of(output_token_logprobs=[[-1, 1, None]]), 5, 3, False), (answer_of(output_token_logprobs=[[-1], [-2]]), 5, 3, False), (answer_of(finish_reason="stop"), 5, 3, False),
        (answer_of(**sets | {"output_token_sampling_mask": [[0, 1], [1]]}), 5, 3, True),
        (answer_of(**sets | {"output_token_sampling_mask": [[0, 1], [2, 3]]}), 5, 3, True),
    ]  # fmt: skip
    for answer in wrong:
        with pytest.raises((LookupError, TypeError, ValueError, AttributeError)):
            _completion(*answer)


def test_an_evaluation_has_nothing_to_compare_with(folder):
    line = [
        "--pretrain",
        f"{folder}/demo/model",
        "--eval_dataset",
        f"{folder}/demo/prompts_eval.jsonl",
        "--reward_func",
        "length",
    ]
    with pytest.raises(UserError, match="only training can compare the weights"):
        evaluate.run([*line, "--rollout_engine", "sglang", "--engine_urls", "http://a", "--output_dir", f"{folder}/e"])
