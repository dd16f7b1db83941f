"""Rollout servers of any number: who gets which request, and what a server that dies and one that is back change."""

import itertools
import json
import random
import threading
import time
import urllib.error
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from fake_engine import VOCABULARY, FakeServer, mark_in, mark_of
from launch import read_steps, train_many
from transformers import DeepseekV3Config, Qwen3Config

from trainer import limits
from trainer.datasets.batches.global_batches import epoch_order
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.methods.ppo_state import RLState
from trainer.methods.rollout_phase import patiently
from trainer.planning import layout_plan
from trainer.planning.idle_share import simulated
from trainer.planning.plan_engines import message_bytes
from trainer.planning.plan_memory import sizes_of
from trainer.rollout.asynchronous import Pace
from trainer.rollout.engines import servers as server_engines
from trainer.rollout.engines import sync
from trainer.rollout.engines.on_vllm.vllm_server import VLLMServerEngine, _completion, _kept
from trainer.rollout.engines.routing import Homes, Router, send_to_each
from trainer.rollout.engines.sampling import Completion, Sampling
from trainer.rollout.engines.servers import LostServer
from trainer.rollout.episode_queue import QueuedRollouts, SharedGroups
from trainer.rollout.prompt_order import PromptOrder
from trainer.rollout.rollouts_file import read_rollouts
from trainer.runs.rl import rl_engines

SAMPLING = Sampling(1.0, 8, (0,))
STEPS, SAMPLES, BOUND = 5, 16, 2


# --- parts


def test_requests_go_to_the_least_loaded_server_and_stay_with_their_prompt():
    router = Router(room=3)
    taken = [router.take(prompt, ["a", "b", "c"]) for prompt in [(1,), (1,), (2,), (3,), (1,), (1,)]]
    assert taken == ["a", "a", "b", "c", "a", "b"]  # the last one finds its server full
    for url in taken:
        router.give(url)
    assert router.take((3,), ["a", "b"]) == "a", "its server is gone"
    assert +router.in_flight == {"a": 1}


def test_a_later_turn_goes_where_most_of_it_was_read():
    router, urls = Router(room=2), ["a", "b", "c"]
    first = [router.take((1, 2), urls) for _ in range(3)]
    assert first == ["a", "a", "b"], "the third sample of the prompt finds no room"
    for url, response in zip(first, [(3,), (4, 4), (5,)]):
        router.give(url, (1, 2, *response))
    later = [router.take((1, 2, *turn), urls) for turn in [(5, 9), (3, 9), (4, 4, 9, 9), (4, 8), (3, 9, 9)]]
    assert later == ["b", "a", "a", "b", "c"], (
        "the fourth one begins with the prompt only, and the last one finds no room"
    )
    assert router.take((1, 2, 5, 7), ["a", "c"]) == "c", "its server is gone, and a has no room"


def test_a_rank_knows_the_servers_of_the_texts_that_were_used_last():
    homes = Homes(most=3)
    for number, text in enumerate([[7], [7, 8], [9], [7, 8, 9]]):
        homes.note(text, f"server {number}")
        assert homes.of([7]) == ["server 0"]
    assert homes.of([7, 8, 9, 5]) == ["server 3", "server 0"], "[7, 8] was not used for longest"
    assert homes.of([9]) == ["server 2"] and homes.of([8]) == homes.of([]) == []
    homes.note([9], "server 4")
    assert homes.of([9, 9]) == ["server 4"] and dict(homes._lengths) == {1: 2, 3: 1}


def test_each_taker_gets_every_item_and_one_that_fails_stops_no_other():
    source, most = iter(range(100)), {1: 7, 3: 0}

    def take(number: int, items) -> list[int]:
        found = []
        for item in items:
            found.append(item)
            if len(found) == most.get(number, -1):
                raise ConnectionError(f"{number}")
        return found

    def refuse(items):
        raise ConnectionError("at once")

    results = send_to_each(source, [lambda i: take(0, i), lambda i: take(1, i), lambda i: take(2, i), refuse])
    assert results[0].result() == results[2].result() == list(range(100))
    assert [str(results[n].exception()) for n in (1, 3)] == ["1", "at once"]
    left = iter(range(9))
    send_to_each(left, [refuse])
    assert list(left) == list(range(9)), "the rest is the caller's"


def test_a_source_that_fails_is_no_end_of_items():
    def source():
        yield 1
        raise RuntimeError("a rank is gone")

    ends = []

    def take(items) -> None:
        try:
            ends.append(list(items))
        except ConnectionError as error:
            ends.append(str(error))

    with pytest.raises(RuntimeError, match="a rank is gone"):
        send_to_each(source(), [take, take])
    for _ in range(200):
        if len(ends) == 2:
            break
        threading.Event().wait(0.01)
    assert ends == ["the source of the weights has failed"] * 2


def test_each_group_is_made_once_however_often_it_is_given_back():
    store, made, lock, sizes = dist.HashStore(), Counter(), threading.Lock(), {0: 40, 1: 17, 2: 1}

    def work(rank: int) -> None:
        groups, chance = SharedGroups(store), random.Random(rank)
        while not all(groups.is_made(rollout, size) for rollout, size in sizes.items()):
            if taken := groups.take(sizes, chance.choice([1, 3, 7])):
                if chance.random() < 0.3:
                    groups.give_back(*taken)
                    continue
                with lock:
                    made.update((taken[0], group) for group in taken[1])
                groups.note_made(taken[0], len(taken[1]))

    workers = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=30)
    assert made == Counter((rollout, group) for rollout, size in sizes.items() for group in range(size))


def test_simulated_idle_shares_are_those_counted_by_hand():
    def idle_shares(*values, **options) -> tuple[float, float]:
        idle = simulated(*values, **options)
        return idle.generating, idle.training

    one = {"drivers": 1, "slots": 1, "train_time": 2.0}
    rollouts = [[[1.0], [2.0], [3.0]]] * 2  # 6 s of generating, then 2 s of training, twice
    assert idle_shares(rollouts, **one, staleness=0, queue=True) == (1 - 12 / 16, 1 - 4 / 16)
    # the second rollout is generated from 6 to 12 s, while the first is trained
    assert idle_shares(rollouts, **one, staleness=1, queue=True) == (1 - 12 / 14, 1 - 4 / 14)
    two = {"drivers": 2, "slots": 1, "train_time": 1.0, "staleness": 0}
    long = [[[4.0], [1.0], [1.0], [1.0]]]  # halves: 5 s and 2 s; whoever is free: 4 s and 3 s
    assert idle_shares(long, **two, queue=False)[0] == 1 - 7 / 12
    assert idle_shares(long, **two, queue=True)[0] == 1 - 7 / 10
    wide = {"drivers": 1, "slots": 2, "train_time": 1.0, "staleness": 0, "queue": True}
    assert idle_shares(long, **wide)[0] == 1 - 7 / 12  # batches of 4 s and 1 s
    assert idle_shares(long, **wide, barrier=False)[0] == 1 - 7 / 10
    # four times 5 s and 1 s. The last rollout needs version 1. The slot that is free at 7 s waits for it until 11 s
    wide, slow = wide | {"staleness": 2, "barrier": False}, [[[5.0], [1.0]]] * 4
    assert idle_shares(slow, **wide)[0] == 1 - 24 / (2 * 13)
    assert idle_shares(slow, **wide, drains=True)[0] == 1 - 24 / (2 * 17)


# --- the engine of one rank


def engine_of(*servers: FakeServer) -> VLLMServerEngine:
    return VLLMServerEngine([s.url for s in servers], device=torch.device("cpu"), batch_size=4, max_len=64)


def test_servers_of_other_sizes_share_the_requests_and_get_the_weights_in_one_pass(world, capsys):
    servers = [FakeServer(seconds=0.01, workers=workers) for workers in (1, 2, 1)]
    engine, weights = engine_of(*servers), [("w", torch.arange(6.0)), ("v", torch.ones(2, 3))]
    checksum, num_bytes = engine.update_weights(iter(weights))
    assert num_bytes == 48 and {server.checksum for server in servers} == {checksum} and checksum
    prompts, seeds = [[n // 4] * 3 for n in range(48)], list(range(48))
    first = engine.generate(prompts, SAMPLING, seeds)
    counts = [len(server.asked) for server in servers]
    assert sum(counts) == 48 and min(counts) >= 12 and max(server.most_in_flight for server in servers) <= 4
    servers[1].die(0.5)
    assert engine.generate(prompts, SAMPLING, seeds) == first, "another server draws the same tokens"
    assert len(servers[1].asked) == counts[1]
    threading.Event().wait(0.6)
    engine.generate(prompts, SAMPLING, seeds)
    assert len(servers[1].asked) == counts[1], "it has no weights yet"
    engine.update_weights(iter(weights))
    assert engine.generate(prompts, SAMPLING, seeds) == first and len(servers[1].asked) > counts[1]
    output = capsys.readouterr().out
    assert output.count("rollout server lost") == 2 and output.count("is back") == 1, output
    for server in servers:
        server.die(60)
    with pytest.raises(LostServer):
        engine.generate(prompts, SAMPLING, seeds)


def test_servers_have_one_dtype_of_their_own(world):
    assert engine_of(FakeServer("bfloat16"), FakeServer("bfloat16")).dtype == torch.bfloat16
    with pytest.raises(UserError, match=r"computes in bfloat16, .* computes in float32"):
        engine_of(FakeServer("bfloat16"), FakeServer("float32"))


def test_two_addresses_of_one_server_are_refused(world):
    """It takes one sync at a time, so a second one to it would wait for the first."""
    server, other = FakeServer(workers=2), FakeServer(workers=2)
    twice = [server.url, other.url, server.url.replace("127.0.0.1", "localhost")]
    with pytest.raises(UserError, match=f"{twice[0]} and {twice[2]} are one server .allowed: each server once"):
        VLLMServerEngine(twice, device=torch.device("cpu"), batch_size=4, max_len=64)


def run_with(folder, config, servers: list[FakeServer], **flags):
    """A run as `rl_engines` knows it, and the options of its engine."""
    config.save_pretrained(folder)
    urls = ",".join(server.url for server in servers)
    flags = {"engine_urls": urls, "engine_api_key": None, "min_p": 0.0, "sync_deltas": False} | flags
    flags["vllm_gpu_memory_utilization"] = None
    args = SimpleNamespace(rollout=SimpleNamespace(rollout_engine="vllm_server", **flags))
    strategy = SimpleNamespace(print=print, device=torch.device("cpu"))
    setup = SimpleNamespace(folder=str(folder), trust_remote_code=False, longest=64, strategy=strategy)
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "batch_size": 4}
    return SimpleNamespace(args=args, setup=setup), options


def test_what_a_server_cannot_do_is_told_at_connect(world, tmp_path, capsys):
    config = Qwen3Config(vocab_size=VOCABULARY)
    plain, drafting = FakeServer(), FakeServer(drafts=4)
    assert rl_engines.vllm_servers(*run_with(tmp_path, config, [plain, drafting])).dtype == torch.float32
    rl_engines.vllm_servers(*run_with(tmp_path, config, [plain], min_p=0.1))
    assert "WARNING" not in capsys.readouterr().out
    with pytest.raises(UserError, match=f"--min_p: 0.1, and {drafting.url} has --speculative_tokens"):
        rl_engines.vllm_servers(*run_with(tmp_path, config, [plain, drafting], min_p=0.1))
    rl_engines.vllm_servers(*run_with(tmp_path, config, [plain], sync_deltas=True))
    assert capsys.readouterr().out.count("WARNING: --sync_deltas with servers in fp32") == 1
    rl_engines.vllm_servers(*run_with(tmp_path, config, [FakeServer("bfloat16")], sync_deltas=True))
    assert "WARNING" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", [rl_engines.vllm_servers, rl_engines.vllm_engine])
def test_vllm_with_latent_attention_is_refused_by_name(world, tmp_path, kind):
    with pytest.raises(UserError, match=r"latent attention of deepseek_v3 \(kv_lora_rank 16\).*allowed: hf"):
        kind(*run_with(tmp_path, DeepseekV3Config(vocab_size=VOCABULARY, kv_lora_rank=16), [FakeServer()]))


def test_a_wrong_answer_costs_its_request_and_another_server_answers(world, capsys):
    bad, good = FakeServer(), FakeServer()
    right = bad.answer
    engine = engine_of(bad, good)
    engine.update_weights(weights_of())

    def answer(path: str, body: dict):
        answered = right(path, body)
        if "choices" in (answered or {}):
            answered["choices"][0]["token_ids"][0] = VOCABULARY
        return answered

    bad.answer = answer
    completions = engine.generate([[n] for n in range(8)], SAMPLING, range(8))
    assert all(max(one.token_ids) < VOCABULARY for one in completions) and len(good.asked) == 8
    assert f"token_ids are no list of numbers below {VOCABULARY}" in capsys.readouterr().out
    bad.answer = lambda path, body: (
        right(path, body) if body.get("method") != "receive_trainer_weights" else {"results": [7]}
    )
    engine.update_weights(weights_of())
    assert "an answer of a wrong form" in capsys.readouterr().out


def test_a_refusal_of_one_server_is_no_refusal_of_all(world, monkeypatch):
    servers, closed = [FakeServer(), FakeServer()], set()
    engine, ask = engine_of(*servers), server_engines.post_json
    engine.update_weights(weights_of())

    def refusing(url: str, *values, **named):
        if any(url.startswith(one.url) for one in closed):
            raise urllib.error.HTTPError(url, 403, "no such method", None, None)
        return ask(url, *values, **named)

    monkeypatch.setattr(server_engines, "post_json", refusing)
    closed.add(servers[0])
    assert len(engine.generate([[n] for n in range(8)], SAMPLING, range(8))) == len(servers[1].asked) == 8
    closed.add(servers[1])
    with pytest.raises(UserError, match="status 403 no such method") as error:
        engine.generate([[1]], SAMPLING, [1])
    assert not isinstance(error.value, LostServer), "nobody waits for it"


REFUSAL = "vllm, which keeps w in a form that cannot be checked"


@pytest.mark.parametrize("at_once", [True, False])
def test_a_server_that_refuses_the_weights_is_no_lost_one(world, monkeypatch, at_once):
    """It is told at once, also of one of several workers and servers. The other servers and ranks get all tensors."""
    monkeypatch.setitem(limits._raised, "engine_wait_s", 1)
    bad, good, taken = FakeServer(workers=2), FakeServer(), []
    engine, right, bad.refusal = engine_of(bad, good), bad.answer, REFUSAL

    def answer(path: str, body: dict):
        is_sync = body.get("method") == "receive_trainer_weights"
        return {"results": [{"refused": REFUSAL}] * 2} if at_once and is_sync else right(path, body)

    def params(*_, **__):
        for number in range(3):
            taken.append(number)
            yield f"w{number}", torch.arange(6.0)

    bad.answer = answer
    strategy = SimpleNamespace(iter_full_params=params, print=print)
    roles = SimpleNamespace(engine=engine, synced_step=None)
    with pytest.raises(UserError, match=f"--engine_urls: {bad.url} refuses the weights: {REFUSAL}") as error:
        patiently(lambda: sync.sync_weights(strategy, torch.nn.Linear(1, 1), engine), strategy, roles)
    assert not isinstance(error.value, LostServer), "nobody waits for it"
    assert taken == [0, 1, 2] and good.checksum and not bad.checksum
    problem = UserError("--engine_urls", "another rank's server")
    monkeypatch.setattr(sync, "gather_objects", lambda mine: [mine, ("", problem)])
    with pytest.raises(UserError, match="another rank's server"):
        sync.sync_weights(strategy, torch.nn.Linear(1, 1), engine_of(good))


def weights_of(*_, **__):
    yield "w", torch.arange(6.0)


def prompts_of(count: int) -> PromptOrder:
    rows = [{"row": n, "prompt_ids": [n], "label": None, "digest": str(n)} for n in range(count)]
    return PromptOrder(Dataset.from_list(rows), batch_size=4, seed=0, shuffle=False)


@pytest.mark.parametrize("way", ["lockstep", "ahead"])
def test_no_server_for_too_long_is_the_error_of_the_server(world, monkeypatch, way):
    monkeypatch.setitem(limits._raised, "engine_wait_s", 1)
    server, began, calls = FakeServer(), time.monotonic(), []
    engine, strategy = engine_of(server), SimpleNamespace(iter_full_params=weights_of, print=print)
    server.die(60)
    if way == "lockstep":
        roles = SimpleNamespace(engine=engine, synced_step=3)

        def act() -> None:
            assert roles.synced_step == (None if calls else 3)
            calls.append(engine.update_weights(weights_of()))
            engine.generate([[1]], SAMPLING, [1])

        with pytest.raises(LostServer, match="Remote end closed"):
            patiently(act, strategy, roles, undo=lambda: calls.append("undone"))
        assert calls[1] == "undone" and len(calls) == 3
    else:
        pace = Pace(2, 9, lambda samples: 1, 4)
        state = RLState(prompts_of(12), 0.0)
        queued = QueuedRollouts(engine, None, pace, SAMPLING, seed=0, group_size=2, num_servers=1)
        with queued, pytest.raises(LostServer, match="Remote end closed"):
            queued.update(strategy, None, state)
            queued.next(state, 0, {})
    assert 1 <= time.monotonic() - began < 10


def test_a_free_slot_takes_the_next_sample_at_once(world):
    """A response that lasts until many others have ended holds up no other, also of the next rollouts. The same tokens come."""
    rollouts, slots, others = 5, 8, 60

    def run(whole_batches: bool) -> tuple[bool, list]:
        """Whether the slow response saw the others end, and the rollouts."""
        saw = []

        def seconds(seed: int) -> float:
            if not saw and not whole_batches:
                saw.append(False)
                saw[0] = any(len(server.asked) >= others or time.sleep(0.01) for _ in range(2000))
            return 0.002

        server = FakeServer(seconds=seconds)
        engine = VLLMServerEngine([server.url], device=torch.device("cpu"), batch_size=slots, max_len=64)
        strategy, state = (
            SimpleNamespace(iter_full_params=weights_of, print=print),
            RLState(prompts_of(64), 0.0, num_histories=BOUND + 1),
        )
        options, found = {"seed": 0, "group_size": 8, "num_servers": 1, "whole_batches": whole_batches}, []
        with QueuedRollouts(
            engine, None, Pace(BOUND, rollouts, lambda samples: 1, slots), SAMPLING, **options
        ) as queued:
            for step in range(rollouts):
                queued.update(strategy, None, state)
                found.append(queued.next(state, step, {}))
                state.go_on(found[-1])
        assert 1 < server.most_in_flight <= slots
        return any(saw), found

    (_, batches), (saw, refilled) = run(True), run(False)
    assert saw, "32 samples of each of the first two rollouts are asked for while the first one is made"
    for number, samples in enumerate(refilled):
        assert [s.response_ids for s in samples] == [s.response_ids for s in batches[number]]
        assert all(0 <= number - s.version <= BOUND for s in samples)


# --- runs of two ranks

REWARD = """
def reward_func(prompts, responses, labels):
    return [sum(map(ord, response)) % 7 / 7 for response in responses]
"""


def flags(folder, name: str, servers: list[FakeServer], *more: str) -> list[str]:
    line = ["--backend", "fsdp2", "--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/demo/prompts.jsonl"]
    line += ["--label_key", "label", "--param_dtype", "fp32", "--no_save"]
    line += [] if "--env" in more else ["--reward_func", f"{folder}/reward.py"]
    line += ["--max_samples", "24", "--advantage_estimator", "group_norm", "--prompt_max_len", "64"]
    line += ["--generate_max_len", "8", "--rollout_batch_size", "8", "--n_samples_per_prompt", "2", "--tis_cap", "2"]
    line += ["--train_batch_size", str(SAMPLES), "--micro_train_batch_size", "8", "--micro_rollout_batch_size", "4"]
    line += ["--learning_rate", "1e-3", "--lr_scheduler", "constant", "--max_steps", str(STEPS), "--num_episodes", "2"]
    if servers:
        line += ["--rollout_engine", "vllm_server", "--engine_urls", ",".join(server.url for server in servers)]
        line += ["--max_logprob_diff", "inf"]  # they invent their log-probs
    return ["train_ppo", *line, "--output_dir", str(folder / name), *more]


TALKER = """
class Environment:
    def reset(self, task):
        return task["messages"]

    def step(self, response):
        return 1.0, True
"""


SPEAKER = """
class Environment:
    def reset(self, task):
        self.turn = 0
        return task["messages"]

    def step(self, response):
        self.turn += 1
        return [{"role": "user", "content": str(self.turn)}], sum(map(ord, response)) % 7, self.turn == 3
"""
LONG = ["--generate_max_len", "48", "--micro_rollout_batch_size", "16"]  # three turns, and room on every server


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """In lock step and ahead: 1, 2 and 3 servers for 2 ranks; then one or all of them die and come back."""
    folder, ahead = tmp_path_factory.mktemp("queue"), ["--max_staleness", str(BOUND)]
    make_demo(str(folder / "demo"))
    (folder / "reward.py").write_text(REWARD)
    (folder / "talker.py").write_text(TALKER)
    (folder / "speaker.py").write_text(SPEAKER)
    (folder / "coarse.py").write_text(REWARD.replace("% 7 / 7", "% 2"))
    with open(folder / "demo/prompts_eval.jsonl") as file:
        (folder / "few.jsonl").write_text("".join(itertools.islice(file, 4)))
    few = ["--eval_dataset", f"{folder}/few.jsonl", "--eval_steps", "2"]
    lines, servers = [], {}
    for count in (1, 2, 3):
        for way, more in (("lockstep", []), ("ahead", ahead)):
            servers[way, count] = [FakeServer(seconds=0.005) for _ in range(count)]
            lines.append(flags(folder, f"{way}-{count}", servers[way, count], *more, *few))
    for way, more in (("lockstep", ["--sync_deltas"]), ("ahead", [*ahead, "--sync_deltas"])):
        servers[way, "killed"] = [FakeServer(seconds=0.01), FakeServer(seconds=0.01, dies_after=20, gone=1.5)]
        lines.append(flags(folder, f"{way}-killed", servers[way, "killed"], *more))
        servers[way, "alone"] = [FakeServer(seconds=0.01, dies_after=20, gone=1.5)]
        lines.append(flags(folder, f"{way}-alone", servers[way, "alone"], *more))
    cut = ["--top_k", "3", "--top_p", "0.99"]
    lines.append(flags(folder, "partial", [FakeServer(seconds=0.1)], *ahead, "--partial_rollouts", *cut))
    lines.append(flags(folder, "partial-replay", [], *cut, "--rollouts_from", f"{folder}/partial/rollouts.jsonl"))
    lines.append(
        flags(folder, "turns", [FakeServer(seconds=0.01)], *ahead, "--env", f"{folder}/talker.py", "--timeline")
    )
    for way, count, more in (("lockstep", 2, []), ("ahead", 4, ahead)):  # ahead, each rank has two servers
        servers[way, "speaker"] = [FakeServer(seconds=0.005, ends_after=8) for _ in range(count)]
        more = [*more, "--env", f"{folder}/speaker.py", *LONG]
        lines.append(flags(folder, f"{way}-speaker", servers[way, "speaker"], *more))
    filtered = [FakeServer(seconds=0.005), FakeServer(seconds=0.01)]
    more = [*ahead, "--dynamic_filtering", "--reward_func", f"{folder}/coarse.py", "--save_steps", "2"]
    lines.append(flags(folder, "filtered", filtered, *more))
    saved = ["--load_checkpoint", f"{folder}/filtered/checkpoints/step_2"]
    lines.append(flags(folder, "filtered", filtered, *more, *saved))
    lines.append(flags(folder, "filtered-replay", [], "--rollouts_from", f"{folder}/filtered/rollouts.jsonl"))
    replay = ["--rollouts_from", f"{folder}/ahead-killed/rollouts.jsonl"]
    lines.append(flags(folder, "replay", [], *replay))
    output = train_many(2, lines, folder, timeout=250)
    return folder, servers, output


def test_the_number_of_servers_changes_nothing_in_lock_step(runs):
    folder, servers, _ = runs
    expected = read_rollouts(f"{folder}/lockstep-1/rollouts.jsonl")
    rows = [(row["loss"], row["grad_norm"], row["weights_checksum"]) for row in read_steps(folder / "lockstep-1")]
    assert len(rows) == STEPS
    for name in (2, 3, "killed", "alone"):
        assert read_rollouts(f"{folder}/lockstep-{name}/rollouts.jsonl") == expected, name
        found = read_steps(folder / f"lockstep-{name}")
        assert [(row["loss"], row["grad_norm"], row["weights_checksum"]) for row in found] == rows, name
    for count in (1, 2, 3):
        assert all(server.asked for server in servers["lockstep", count])


@pytest.mark.parametrize("name", [1, 2, 3, "killed", "alone"])
def test_ahead_every_sample_is_drawn_and_trained_once(runs, name):
    folder, servers, _ = runs
    rollouts, rows = read_rollouts(f"{folder}/ahead-{name}/rollouts.jsonl"), read_steps(folder / f"ahead-{name}")
    expected = read_rollouts(f"{folder}/lockstep-1/rollouts.jsonl")
    assert len(rollouts) == len(rows) == STEPS
    for number, (samples, others) in enumerate(zip(rollouts, expected)):
        assert [s.number for s in samples] == list(range(SAMPLES))
        assert [s.response_ids for s in samples] == [s.response_ids for s in others], "seeds belong to samples"
        assert all(0 <= number - s.version <= BOUND for s in samples)
    assert all(server.asked and server.syncs for server in servers["ahead", name])
    assert max(row["staleness_max"] for row in rows) > 0


def marks_of_versions(folder, name: str) -> dict[int, set[int]]:
    """The marks of the weights that generated the tokens of each version. See `fake_engine`."""
    found: dict[int, set[int]] = {}
    for sample in itertools.chain(*read_rollouts(f"{folder}/{name}/rollouts.jsonl")):
        turns = sample.turns or [[0, len(sample.response_ids)]]
        places = [place for start, end in turns for place in range(start, end)]
        for place, log_prob in zip(places, sample.log_probs, strict=True):
            [*_, version] = [version for start, version in sample.versions if start <= place]
            found.setdefault(version, set()).add(mark_in(sample.response_ids[place], log_prob))
    return found


AHEAD = ["ahead-1", "ahead-2", "ahead-3", "ahead-killed", "ahead-alone", "ahead-speaker", "partial", "filtered"]


@pytest.mark.parametrize("name", AHEAD)
def test_the_version_of_a_token_is_that_of_the_weights_that_sampled_it(runs, name):
    """Each version has one state of the weights, and other versions have other ones."""
    folder, _, _ = runs
    found = marks_of_versions(folder, name)
    assert len(found) > 2 and {len(marks) for marks in found.values()} == {1}, found
    assert len(set.union(*found.values())) == len(found), "two versions have the same weights"
    if name in (
        "ahead-killed",
        "ahead-alone",
        "filtered",
    ):  # the newest weights may have generated dropped samples only
        return
    rows = {row["rollout"]: row["weights_checksum"] for row in read_steps(folder / name)}
    for number, samples in enumerate(read_rollouts(f"{folder}/{name}/rollouts.jsonl")):
        newest = max(version for sample in samples for _, version in sample.versions)
        assert found[newest] == {mark_of(rows[number])}, "the checksum in the log is that of the newest version"


def test_each_slot_plays_episodes_of_its_own(runs):
    folder, _, _ = runs
    for number, samples in enumerate(read_rollouts(f"{folder}/turns/rollouts.jsonl")):
        assert [s.number for s in samples] == list(range(SAMPLES)) and {s.score for s in samples} == {1.0}
        assert all(0 <= number - s.version <= BOUND for s in samples)
    events = json.loads((folder / "turns/timeline.json").read_text())
    names = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert [names[f"slot {n}"] for n in range(4)] == [2, 3, 4, 5]
    generated = {event["tid"] for event in events if event["name"] == "generate" and event["pid"] == 0}
    assert generated <= {2, 3, 4, 5} and len(generated) > 1


@pytest.mark.parametrize("way", ["lockstep", "ahead"])
def test_later_turns_go_to_the_server_that_has_read_their_prefix(runs, way):
    folder, servers, _ = runs
    rollouts, found = read_rollouts(f"{folder}/{way}-speaker/rollouts.jsonl"), servers[way, "speaker"]
    assert {len(sample.turns) for sample in itertools.chain(*rollouts)} == {3}
    of_text = {(mark, text): n for n, server in enumerate(found) for mark, _, text, _ in server.read}
    num_later = 0
    for number, server in enumerate(found):
        for mark, _, text, length in server.read:
            [*before] = {of_text[mark, text[:end]] for end in range(length) if (mark, text[:end]) in of_text}
            assert before in ([], [number]), "another server has read the turn before"
            num_later += bool(before)
        assert server.read, "first turns go to all servers"
    assert num_later == 2 * STEPS * SAMPLES if way == "lockstep" else num_later >= 2 * STEPS * SAMPLES


@pytest.mark.parametrize("name", [("lockstep", 1), ("lockstep", 3), ("ahead", 3), ("lockstep", "speaker")])
def test_ranks_share_what_a_server_keeps_of_prompts_under_the_same_weights_only(runs, name):
    marks = {(checksum, mark) for server in runs[1][name] for mark, checksum, *_ in server.read}
    assert len(marks) == len(dict(marks)) == len({mark for _, mark in marks}) > 2, (
        "one mark for each state of the weights"
    )


def test_sets_of_truncated_sampling_come_from_the_server(runs):
    folder, _, _ = runs
    for sample in itertools.chain(*read_rollouts(f"{folder}/partial/rollouts.jsonl")):
        assert sample.kept_ids == [[(t + n) % VOCABULARY for n in range(3)] for t in sample.response_ids]
    assert all(row["ratio_deviation"] == 0 for row in read_steps(folder / "partial"))


@pytest.mark.parametrize("reason", ["abort", "stop"])
def test_only_an_aborted_answer_may_have_no_token(reason):
    answer = {"choices": [{"token_ids": [], "logprobs": {"content": []}, "finish_reason": reason}]}
    if reason == "abort":
        assert _completion(answer, 8, VOCABULARY) == Completion([], [], False)
        return
    with pytest.raises(ValueError, match="a response that ended has no token"):
        _completion(answer, 8, VOCABULARY)


@pytest.mark.parametrize("change", [{"token_id": 9}, {"logprob": -9999.0}])
def test_a_set_without_the_sampled_token_is_no_answer(change):
    likely = [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -1.0}, {"token_id": 3, "logprob": -9999.0}]
    assert _kept(likely, 7, 3, 9) == [7, 8]
    with pytest.raises(ValueError, match="3 likely tokens, 3 asked, and token 7 was sampled"):
        _kept([likely[0] | change, *likely[1:]], 7, 3, 9)
    with pytest.raises(ValueError, match="2 likely tokens, 3 asked"):
        _kept(likely[:2], 7, 3, 9)


def test_a_sync_has_the_bytes_that_plan_predicts(runs):
    folder, _, _ = runs
    s = sizes_of(layout_plan.meta_model(f"{folder}/demo/model"))
    for row in read_steps(folder / "lockstep-3"):  # rank 0 has two servers
        assert (row["sync_bytes"], row["sync_sent_bytes"]) == (4 * s.num_params, 2 * message_bytes(s, 4))
    for row in read_steps(folder / "lockstep-alone"):
        predicted = [message_bytes(s, 4), message_bytes(s, 4, row["sync_density"])]
        assert any(row["sync_sent_bytes"] == pytest.approx(size, rel=0.01) for size in predicted), (row, predicted)


def test_a_server_that_dies_comes_back_and_the_replay_is_the_run(runs):
    folder, _, output = runs
    assert any(row["resumed_fraction"] > 0 for row in read_steps(folder / "partial"))
    assert output.count("no rollout server is left, waiting up to 600 s") == 1  # of lock step
    assert output.count("rollout server lost") >= 4 and output.count("is back") >= 2, output[-3000:]
    pairs = [("ahead-killed", "replay"), ("partial", "partial-replay")]
    rows = [zip(read_steps(folder / ahead), read_steps(folder / again), strict=True) for ahead, again in pairs]
    for row, other in itertools.chain(*rows):
        assert all(row[key] == other[key] for key in ("loss", "grad_norm", "batch_hash", "staleness"))


def test_asynchronous_dapo_refills_groups_that_teach_nothing(runs):
    """Each prompt's turn comes once, in order, and a resumed run draws the samples of the first start."""
    folder, _, _ = runs
    lines = [json.loads(line) for line in (folder / "filtered/rollouts.jsonl").open()]
    starts = [n for n, line in enumerate(lines) if n and line["rollout"] < lines[n - 1]["rollout"]]
    assert len(starts) == 1 and lines[starts[0]]["rollout"] == 2
    first, again = lines[: starts[0]], lines[starts[0] :]
    same = ("rollout", "number", "row", "response_ids", "score")
    assert [[line[key] for key in same] for line in first if line["rollout"] >= 2] == [
        [line[key] for key in same] for line in again
    ]
    rows = read_steps(folder / "filtered")
    found = {row["rollout"]: row for row in rows}
    assert len(found) == STEPS and any(row["prompts_drawn"] > 8 for row in rows)
    assert max(row["staleness_max"] for row in rows) in (1, BOUND)
    order = [int(row) for episode in range(9) for row in epoch_order(24, 42, episode, shuffle=True)]
    place = 0
    for number, samples in enumerate(read_rollouts(f"{folder}/filtered/rollouts.jsonl")):
        groups = list(zip(samples[::2], samples[1::2]))
        assert len(groups) == 8 and all(a.row == b.row and a.score != b.score for a, b in groups)
        assert all(0 <= number - sample.version <= BOUND for sample in samples)
        drawn = order[place : place + int(found[number]["prompts_drawn"])]
        place += len(drawn)
        assert all(drawn[a.number // 2] == a.row for a, _ in groups), "the number of a sample is that of its draw"
    replay = read_steps(folder / "filtered-replay")
    for row, other in zip([found[number] for number in sorted(found)], replay, strict=True):
        assert all(row[key] == other[key] for key in ("loss", "grad_norm", "batch_hash"))
