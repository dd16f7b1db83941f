"""serve_train on two ranks: the losses of train_sft and of a plain loop, clients that take turns, sampling, refusals."""

import json
import re
import signal
import subprocess
import urllib.error

import numpy as np
import pytest
import torch
from api_client import Client
from launch import LAUNCHER, ROOT, _environment, read_steps, train_many
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.cli.serve_train import check
from trainer.compare.machines.forked_ranks import run_ranks
from trainer.datasets.demos.demo import make_demo
from trainer.model_folders.adapter_tensors import initial_tensors
from trainer.rollout.engines.sampling import Sampling
from trainer.runs.api.api_run import client_models

RATE, RANK, SEED, STEPS, BATCH = 5e-3, 4, 7, 3, 6


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(address, folder) of a server with adapters of rank 8 at most."""
    folder = tmp_path_factory.mktemp("api")
    make_demo(str(folder / "demo"))
    (folder / "key").write_text("tml-test\n")
    flags = ["--pretrain", f"{folder}/demo/model", "--lora_rank", "8", "--param_dtype", "fp32", "--device", "cpu"]
    flags += ["--port", "0", "--max_len", "64", "--output_dir", f"{folder}/out", "--api_key", f"{folder}/key"]
    command = [*LAUNCHER, "2", "-m", "trainer.cli.serve_train", *flags, "--micro_train_batch_size", "2"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=_environment(), **streams) as process:
        lines = []
        try:
            for line in process.stdout:
                lines.append(line)
                if found := re.search(r"training at (\S+)", line):
                    break
            assert lines and found, "".join(lines)
            yield found.group(1), folder
        finally:
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=60)
    assert "client_models.py" not in output and "error: " not in output, output  # torchrun itself shows a traceback


def batches(folder) -> list[list[dict]]:
    """Rows as train_sft makes them of texts: each token has a loss, and the last one is eos. Weights give the mean."""
    texts = [f"{n} {' '.join(str(n * k % 10) for k in range(3 + n % 5))}" for n in range(STEPS * BATCH)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = AutoTokenizer.from_pretrained(folder / "demo/model")
    ids = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]
    found = []
    for start in range(0, len(ids), BATCH):
        part = ids[start : start + BATCH]
        count = sum(len(row) - 1 for row in part)
        found.append([{"input_ids": row[:-1], "target_tokens": row[1:], "weights": [1 / count] * (len(row) - 1)} for row in part])  # fmt: skip
    return found


def plain_model(folder):
    """peft's LoRA of rank 4 with alpha 32, with the first values of seed 7."""
    model = AutoModelForCausalLM.from_pretrained(folder / "demo/model", dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear"))
    own = dict(model.get_base_model().named_parameters())
    for name, value in initial_tensors(model.get_base_model(), SEED).items():
        own[name].data.copy_(value)
    return model


def plain_losses(folder, loss_of, data) -> list[float]:
    """Losses of a loop of torch alone, row by row. `loss_of(log_probs, row)` is the sum of the losses of a row."""
    model, losses = plain_model(folder), []
    parameters = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for rows in data:
        total = 0.0
        for row in rows:
            logits = model(torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
            loss = loss_of(logits.gather(1, torch.tensor(row["target_tokens"])[:, None])[:, 0].double(), row)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
        adam.zero_grad()
        losses.append(total)
    return losses


def of_weights(log_probs, row):
    return -(log_probs * torch.tensor(row["weights"], dtype=torch.float64)).sum()


def of_ppo(log_probs, row):
    ratio = (log_probs - torch.tensor(row["logprobs"], dtype=torch.float64)).exp()
    gain = torch.tensor(row["advantages"], dtype=torch.float64)
    return -torch.minimum(ratio * gain, ratio.clamp(0.9, 1.3) * gain).sum()


def of_ratio(log_probs, row):
    ratio = (log_probs - torch.tensor(row["logprobs"], dtype=torch.float64)).exp()
    return -(ratio * torch.tensor(row["advantages"], dtype=torch.float64)).sum()


def test_losses_are_those_of_train_sft_and_of_a_plain_loop(served):
    url, folder = served
    data, client = batches(folder), Client(url)
    line = ["--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/texts.jsonl", "--pretrain_mode", "--no_save"]
    line += ["--input_key", "text", "--lora_rank", str(RANK), "--lora_alpha", "32", "--seed", str(SEED)]
    line += ["--no_shuffle", "--train_batch_size", str(BATCH), "--micro_train_batch_size", "2", "--param_dtype", "fp32"]
    line += ["--learning_rate", str(RATE), "--lr_scheduler", "constant", "--output_dir", f"{folder}/sft"]
    train_many(1, [line], folder, 120)
    model = client.create(f"{folder}/demo/model", 0, RANK, SEED)
    futures = [(client.batch(model, rows, "cross_entropy"), client.step(model, RATE)) for rows in data]
    losses = [client.loss(future) for future, _ in futures]
    norms = [client.result(step)["metrics"]["grad_norm"] for _, step in futures]
    rows = read_steps(folder / "sft")
    assert losses == pytest.approx([row["loss"] for row in rows], abs=1e-5)
    assert norms == pytest.approx([row["grad_norm"] for row in rows], rel=1e-4)
    assert losses == pytest.approx(plain_losses(folder, of_weights, data), abs=1e-5)
    assert losses[-1] < losses[0] - 0.05, "a change that 1e-5 would not hide"


def test_policy_losses_interleaved_clients_and_saved_states(served):
    """Two clients with losses and ranks of their own, step by step in turns: the bits that each gives alone."""
    url, folder = served
    random, client, base = np.random.default_rng(0), Client(url), f"{folder}/demo/model"
    data = [
        [
            {name: row[name] for name in ("input_ids", "target_tokens")}
            | {"logprobs": random.uniform(-4, -0.5, len(row["input_ids"])).astype(np.float32).tolist()}
            | {"advantages": (random.normal(size=len(row["input_ids"])) / 50).astype(np.float32).tolist()}
            for row in rows
        ]
        for rows in batches(folder)
    ]
    kinds = {
        0: ("ppo", RANK, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}),
        1: ("importance_sampling", 8, {}),
    }

    def run(numbers: dict[int, int]) -> dict[int, list]:
        """Losses and log-probs of each kind in `numbers`, which gives the number of its model."""
        models = {kind: client.create(base, number, kinds[kind][1], SEED) for kind, number in numbers.items()}
        futures = {kind: [] for kind in numbers}
        for rows in data:
            for kind, model in models.items():
                loss_fn, _, config = kinds[kind]
                futures[kind].append(client.batch(model, rows, loss_fn, **config))
            for model in models.values():
                client.step(model, RATE)
        futures = {kind: [*own, client.batch(models[kind], data[0], kinds[kind][0], forward_only=True, **kinds[kind][2])] for kind, own in futures.items()}  # fmt: skip
        return {kind: [(client.loss(f), [v.tobytes() for v in client.log_probs(f)]) for f in own] for kind, own in futures.items()}  # fmt: skip

    alone, together = run({0: 0}) | run({1: 1}), run({0: 2, 1: 3})
    assert alone == together
    plain = plain_losses(folder, of_ppo, data)
    assert [loss for loss, _ in alone[0][:STEPS]] == pytest.approx(plain, abs=1e-5)
    first = plain_losses(folder, of_ratio, data[:1])  # B is zero, so the rank does not matter yet
    assert alone[1][0][0] == pytest.approx(first[0], abs=1e-5)

    # the state of a model goes on elsewhere with the same bits, also after other clients had their turn
    source = f"{client.session}:train:0"
    path = client.result(client.ask("save_weights", **client.next(source), path="here"))["path"]
    own = {"session_id": client.session, "model_seq_id": 4, "path": path, "optimizer": True}
    copy = client.result(client.ask("load_weights", **own))["model_id"]
    after = []
    for model in (source, copy):
        future = client.batch(model, data[1], "ppo"), client.step(model, RATE), client.batch(model, data[2], "ppo")
        after.append([client.loss(future[0]), client.loss(future[2])])
    assert after[0] == after[1] and after[0][0] != after[0][1]

    def save(**own) -> dict:
        return client.result(client.ask("save_weights", **client.next(copy), path="there", **own))

    there = save()["path"]
    assert "exists (allowed: another name, or overwrite)" in save()["error"] and save(overwrite=True) == save(overwrite=True)  # fmt: skip
    client.delete("training_runs/{}/checkpoints/weights/there".format(there.split("/")[2]))
    lost = client.ask("load_weights", **client.next(copy), path=there, optimizer=False)
    assert "no such saved weights" in client.result(lost)["error"]


LAYOUTS = {"one rank": (1, []), "dp 2": (2, []), "tp 2": (2, ["--tensor_parallel_size", "2"])}


def test_layouts_give_the_losses_of_one_rank(tmp_path):
    """Losses, gradient norms and log-probs of steps of two clients in turns, and samples after them."""
    make_demo(str(tmp_path / "demo"))
    flags = ["--pretrain", f"{tmp_path}/demo/model", "--lora_rank", "8", "--param_dtype", "fp32", "--device", "cpu"]
    data = [rows[: 5 + n] for n, rows in enumerate(batches(tmp_path)[:2])]  # of 5 rows, one rank has more
    adam = {"learning_rate": RATE, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 1.0}

    def run(name: str) -> None:
        args, given = check([*flags, *LAYOUTS[name][1], "--micro_train_batch_size", "2", "--max_len", "64"])
        models, _ = client_models(args, given.server.sample_batch_size)
        found = []
        for number in (0, 1):
            models.create(f"{number}", (RANK, 8)[number], SEED + number)
        for rows in data:
            own = [{"input_ids": row["input_ids"]} | {k: np.array(row[k]) for k in row.keys() - {"input_ids"}} for row in rows]  # fmt: skip
            for number in ("0", "1"):
                columns, metrics = models.forward_backward(number, own, "cross_entropy", {}, False)
                found += [metrics["loss:sum"], models.optim_step(number, **adam)["metrics"]["grad_norm"]]
                found += np.concatenate(columns["logprobs"]).tolist()
        models.keep_sampler("s", "0", None, {})
        prompts, sampling = [(data[0][0]["input_ids"], 3)], Sampling(1.0, 9, (2,))
        [(sequences, of_prompt)] = models.sample("s", prompts, sampling, [1, 2, 3], [True])
        found += of_prompt[1:].tolist()
        for tokens, log_probs, _ in sequences:
            found += [*tokens, *log_probs]
        if models.strategy.is_rank_0():
            (tmp_path / name).write_text(json.dumps(found))

    for name, (num_ranks, _) in LAYOUTS.items():
        ending = run_ranks(lambda name=name: run(name), num_ranks, tmp_path / "log", timeout=150)
        assert ending.kind == "done", f"{name}: {ending.text} {(tmp_path / 'log').read_text()[-2000:]}"
    one, *others = [np.array(json.loads((tmp_path / name).read_text())) for name in LAYOUTS]
    for found in others:
        assert np.abs(found - one).max() < 1e-5
    assert len(one) > 150


def test_samples_are_of_the_saved_weights(served):
    url, folder = served
    client, data, base = Client(url), batches(folder), f"{folder}/demo/model"
    model = client.create(base, 0, RANK, SEED)

    def sampler(number: int) -> str:
        own = client.next(model) | {"sampling_session_seq_id": number}
        return client.result(client.ask("save_weights_for_sampler", **own))["sampling_session_id"]

    def sample(name: str, number: int, **params):
        prompt = {"chunks": [{"type": "encoded_text", "tokens": data[0][0]["input_ids"]}]}
        own = {"sampling_session_id": name, "seq_id": number, "prompt": prompt, "num_samples": 3}
        own |= {"prompt_logprobs": True, "sampling_params": {"max_tokens": 6, "seed": 3, **params}}
        return client.result(client.ask("asample", **own), "SampleResponse")

    before = sampler(0)
    for rows in data:
        client.batch(model, rows, "cross_entropy")
        client.step(model, 5e-2)
    after = sampler(1)
    found, first = sample(after, 0), sample(before, 0)
    assert found.prompt_logprobs != first.prompt_logprobs, "weights at the time of the request, not those of today"
    tokens = [np.frombuffer(one.tokens, np.int32).tolist() for one in found.sequences]
    assert len({tuple(one) for one in tokens}) > 1 and sample(after, 1).sequences[2] == found.sequences[2]
    prompt = data[0][0]["input_ids"]
    for one, ids in zip(found.sequences, tokens):  # forward gives the log-probs that sampling gave
        whole = [*prompt, *ids]
        row = {"input_ids": whole[:-1], "target_tokens": whole[1:], "weights": [0.0] * (len(whole) - 1)}
        [scored] = client.log_probs(client.batch(model, [row], "cross_entropy", forward_only=True))
        sampled = np.frombuffer(one.logprobs, np.float32)
        assert np.abs(scored[len(prompt) - 1 :] - sampled).max() < 1e-4
        assert np.abs(scored[: len(prompt) - 1] - np.frombuffer(found.prompt_logprobs, np.float32)[1:]).max() < 1e-5
    assert sample(after, 2, stop=[tokens[0][1]]).sequences[0].stop_reason == 0


def test_what_is_not_offered_is_refused_by_name(served):
    url, folder = served
    client, base = Client(url), f"{folder}/demo/model"
    row = {"input_ids": [5, 6], "target_tokens": [6, 7], "weights": [1.0, 1.0]}
    model = client.create(base, 0, RANK, SEED)

    def refusal(ask, *values, **named) -> str:
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(*values, **named)
        return f"{caught.value.code} {json.loads(caught.value.read())['error']}"

    assert refusal(client.batch, model, [row], "dro") == (
        "422 loss_fn: dro (allowed: cross_entropy, importance_sampling, ppo, cispo)"
    )
    assert "inputs of ppo: target_tokens, weights" in refusal(client.batch, model, [row], "ppo")
    assert "outside of the vocabulary" in refusal(
        client.batch, model, [{**row, "input_ids": [5, 10**6]}], "cross_entropy"
    )
    assert "65 tokens" in refusal(client.batch, model, [{name: row[name] * 33 for name in row} | {"input_ids": [5] * 65}], "cross_entropy")  # fmt: skip
    assert refusal(client.ask, "create_custom_loss").startswith("404")
    assert "base_model: other" in refusal(client.create, "other", 1, RANK, SEED)
    assert "tinker://MODEL/weights/NAME" in refusal(client.ask, "save_weights", **client.next(model), path="../up")
    nan = {**row, "target_tokens": [6.0, float("nan")]}
    assert "outside of the vocabulary" in refusal(client.batch, model, [nan], "cross_entropy")
    assert "x.client.json" in refusal(client.ask, "save_weights", **client.next(model), path="x.client.json")
    for wrong in ({"beta1": 1}, {"grad_clip_norm": float("nan")}, {"learning_rate": "fast"}):
        [name] = wrong
        params = {"learning_rate": RATE, **wrong}
        assert f"422 {name}: " in refusal(client.ask, "optim_step", **client.next(model), adam_params=params)
    for name, wrong in (("seed", 2**70), ("seed", "x"), ("rank", float("inf"))):
        own = {"session_id": client.session, "model_seq_id": 8, "base_model": base}
        assert refusal(client.ask, "create_model", **own, lora_config={"rank": RANK, name: wrong}).startswith("422")
    sampler = client.ask(
        "create_sampling_session", session_id=client.session, sampling_session_seq_id=5, base_model=base
    )
    asked = {"sampling_session_id": sampler["sampling_session_id"], "seq_id": 0, "sampling_params": {"max_tokens": 2}}
    asked["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    for wrong in ({"num_samples": 10**9}, {"prompt_logprobs": True, "prompt_logprobs_last_n": "x"}):
        assert refusal(client.ask, "asample", **asked, **wrong).startswith(f"422 {[*wrong][-1]}")
    for name, wrong in (("temperature", -1), ("top_p", 0), ("top_k", 0.5), ("stop", [10**6])):
        asked["sampling_params"] = {"max_tokens": 2, name: wrong}
        assert refusal(client.ask, "asample", **asked).startswith(f"422 {name}"), name
    assert refusal(client.ask, "retrieve_future", request_id=["a"]).startswith("404")
    assert refusal(client.ask, "retrieve_future", request_id=model).startswith("404")
    client.key = "tml-other"
    assert refusal(client.ask, "session_heartbeat", session_id=client.session).startswith("401")
    client.key = "tml-test"
    own = {"session_id": client.session, "model_seq_id": 9, "base_model": base, "lora_config": {"rank": 9}}
    assert (
        client.result(client.ask("create_model", **own))["error"]
        == "lora_config.rank: 9 (allowed: 1 to 8 (--lora_rank))"
    )
    assert "no forward_backward" in client.result(client.step(model, RATE))["error"]
