"""train_kd --teacher http://...: a server that answers as vLLM gives the losses of the same teacher that is loaded here."""

import pytest
import torch
from launch import in_fork, read_rows, read_steps, train_many
from teacher_stub import TeacherStub
from test_ppo_teacher import make_teacher

from trainer.datasets.demos.demo import make_demo
from trainer.errors import Failed, UserError
from trainer.models.model_loading import load_tokenizer
from trainer.rollout.rewards.teacher_server import Asking, TeacherServer, check_lengths

FLAGS = "--param_dtype fp32 --max_samples 12 --eval_fraction 0.25 --eval_steps 2 --no_save --max_len 64 --train_batch_size 4 --max_steps 3 "
FLAGS += "--learning_rate 1e-3 --micro_train_batch_size 2 --kd_top_k 5"
RUNS = {
    "fsdp2-packed": "--backend fsdp2 --packing_samples",
    "zero2-packed": "--backend deepspeed --zero_stage 2 --packing_samples",
    "fsdp2-padded": "--backend fsdp2 --kd_loss jsd --kd_coef 0.7",
    "zero3-padded": "--backend deepspeed --zero_stage 3",
    "ring-packed": "--backend fsdp2 --packing_samples --ring_attn_size 2",
    "two": "--backend fsdp2 --packing_samples --teacher_weights 0.3 0.7",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    make_demo(str(folder / "demo"))
    make_teacher(str(folder / "demo/model"), str(folder / "teacher"))
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    (folder / "key").write_text("secret\n")
    server, other = TeacherStub(folder / "teacher", troubles=(503, 429)), TeacherStub(folder / "teacher", key="secret")

    def line(name: str, more: str, where: str) -> list[str]:
        teachers = {"here": f"{folder}/teacher", "there": server.url}
        teacher = teachers[where]
        if name == "two":
            teacher = f"{folder}/demo/model,{teachers['here'] if where == 'here' else other.url}"
            more += f" --teacher_api_key {folder}/key" * (where == "there")
        own = f"--pretrain {folder}/demo/model --dataset {folder}/demo/sft.jsonl --teacher {teacher} --output_dir {folder}/{name}-{where}"
        return ["train_kd", *f"{FLAGS} {more} {own}".split()]

    train_many(
        2, [line(name, more, where) for name, more in RUNS.items() for where in ("here", "there")], folder, timeout=500
    )
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_a_served_teacher_gives_the_losses_of_a_loaded_one(runs, name):
    here, there = (read_steps(runs / f"{name}-{where}") for where in ("here", "there"))
    assert len(here) == 3
    for expected, found in zip(here, there, strict=True):
        for key in ("loss", "teacher_loss", "nll"):
            assert found[key] == pytest.approx(expected[key], abs=1e-6, rel=1e-6)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    found = [
        [row["eval_loss"] for row in read_rows(runs / f"{name}-{where}") if "eval_loss" in row]
        for where in ("here", "there")
    ]
    assert found[0] and found[0] == pytest.approx(found[1], abs=1e-6)


def test_a_server_that_goes_ends_the_run_with_one_line(folder):
    server = TeacherStub(folder / "teacher", after=6)
    own = f"--pretrain {folder}/demo/model --dataset {folder}/demo/sft.jsonl --teacher {server.url} --teacher_retries 1"
    line = f"{FLAGS} {own} --backend fsdp2 --no_shuffle --output_dir {folder}/gone"
    code, output = in_fork("-m", "trainer.cli.train_kd", *line.split())
    assert code == 2, output[-3000:]
    last = [line for line in output.splitlines() if line.strip()][-1]
    assert last.startswith(f"error: --teacher {server.url}: no usable answer after 2 tries:"), output[-2000:]


def served(stub, top_k: int = 5, vocab_size: int | None = None, **asking) -> TeacherServer:
    options = {"retries": 2, "pause": 0.01, "timeout": 20.0} | asking
    return TeacherServer(stub.url + "/v1/", 0, top_k, vocab_size or stub.model.config.vocab_size, Asking(**options))


def test_the_likeliest_tokens_and_the_rest_are_those_of_the_teacher(folder):
    stub = TeacherStub(folder / "teacher", troubles=(500, 503))
    server, text, pad = served(stub), [5, 9, 11, 30, 7], {"pad_token_id": 0}

    def collate(samples, pad_token_id):
        return {"input_ids": torch.tensor([[*sample["input_ids"]] for sample in samples])}

    batch = server.with_top(collate)([{"input_ids": text}], **pad)
    assert len(stub.asked) == 3  # two failures
    found, expected = server.logits(batch).exp(), stub.model(torch.tensor([text])).logits.softmax(-1)
    for place in range(4):
        top = expected[0, place].topk(5)
        torch.testing.assert_close(found[0, place, top.indices], top.values)
        torch.testing.assert_close(found[0, place].sum(), torch.tensor(1.0))


def test_wrong_servers_are_refused_in_one_line(folder, monkeypatch):
    stub, tokenizer = TeacherStub(folder / "teacher", key="k"), load_tokenizer(str(folder / "demo/model"))
    served(stub, key="k").check_vocabulary(tokenizer)
    with pytest.raises(UserError, match=r"--teacher http://127.*: refuses the request: HTTPError: 401 Unauthorized"):
        served(stub).check_vocabulary(tokenizer)
    with pytest.raises(UserError, match="prompt logprobs of 21, which is greater than max allowed: 20"):
        served(stub, 21, key="k")._top([1, 2, 3])
    with pytest.raises(Failed, match=r"no usable answer after 3 tries: ValueError: not 5 tokens with ids below 7"):
        served(stub, vocab_size=7, key="k")._top([1, 2, 3])
    with pytest.raises(
        UserError, match=r"takes 100 tokens with the one that it generates .allowed: a --max-model-len of 101"
    ):
        check_lengths([served(stub)], 100)
    check_lengths([served(stub)], 99)
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decode([{40: 41, 41: 40}.get(one, one) for one in ids]))
    with pytest.raises(UserError, match="has another vocabulary than --pretrain"):
        served(stub, key="k").check_vocabulary(tokenizer)
    stub.server_close()
    stub.shutdown()
    with pytest.raises(Failed, match="no usable answer after 3 tries: URLError"):
        served(stub)
