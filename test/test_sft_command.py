"""train_sft from the command line on the embedded demo: it learns, saves what it evaluated, and can be repeated."""

import json
import sys

import pytest
import torch
import yaml
from launch import ROOT, forked, in_fork, read_rows, read_steps, run_process, train_many
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from trainer.datasets.demos.demo import make_demo
from trainer.flags.common_flags import EpochArguments
from trainer.runs import run_setup
from trainer.runs.run_setup import idle_cores
from trainer.runs.run_training import steps_by_epoch

RUNS = {
    "fsdp2": ["--backend", "fsdp2", "--param_dtype", "fp32", "--use_tensorboard"],
    "deepspeed": ["--backend", "deepspeed", "--zero_stage", "2", "--param_dtype", "fp32"],
    "fsdp2-bf16": ["--backend", "fsdp2", "--packing_samples", "--eval_steps", "30"],
    "deepspeed-bf16": ["--backend", "deepspeed", "--zero_stage", "3", "--gradient_checkpointing", "--print_model"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the demo and four runs of 60 steps on two ranks, made by the command without --pretrain."""
    folder = tmp_path_factory.mktemp("sft")
    make_demo(str(folder / "demo"))
    data = ["--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/demo/sft.jsonl", "--apply_chat_template"]
    data += ["--eval_dataset", f"{folder}/demo/sft_eval.jsonl", "--max_len", "128", "--max_steps", "60"]
    data += ["--learning_rate", "2e-3", "--lr_scheduler", "constant"]
    data += ["--train_batch_size", "16", "--micro_train_batch_size", "8"]
    lines = [[*data, *flags, "--output_dir", f"{folder}/{name}"] for name, flags in RUNS.items()]
    auto = ["--layout", "auto", "--max_steps", "3", "--no_save", "--output_dir"]
    lines.append([*data, "--param_dtype", "fp32", *auto, f"{folder}/auto"])
    lines.append(["--config", f"{folder}/auto/config.yaml", "--output_dir", f"{folder}/auto-again"])
    pairs = [*data[:2], "--dataset", f"{folder}/demo/pairs.jsonl", "--max_len", "128", "--train_batch_size", "8"]
    lines.append(["train_dpo", *pairs, "--micro_train_batch_size", "2", *auto, f"{folder}/auto-dpo"])
    output = train_many(2, lines, folder, timeout=400)
    (folder / "output.txt").write_text(output)
    return folder


@pytest.mark.parametrize(
    ("num_ranks", "num_threads", "num_cores", "hint"),
    [(1, 1, 8, None), (2, 1, 2, None), (2, 1, 7, None), (4, 2, 16, None), (2, 4, 32, "2 ranks of 4 threads on 32 cores: "),
     (2, 1, 8, "2 ranks of 1 thread on 8 cores: more threads (OMP_NUM_THREADS in the environment) would be quicker")],
)  # fmt: skip
def test_ranks_that_leave_most_cores_idle_get_a_hint(num_ranks, num_threads, num_cores, hint):
    found = idle_cores(num_ranks, num_threads, num_cores)
    assert found is None if hint is None else hint in found


def test_adam_in_host_memory_takes_the_cores_of_its_rank(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(16))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    try:
        for threads, expected in ((1, 4), (3, 3)):  # torchrun's one thread, and a number that a user chose
            torch.set_num_threads(threads)
            run_setup.set_up_gpu(adam_offload=True, vllm=True)
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_print_model_tells_once_what_the_model_is(runs):
    """On ZeRO 3, where each rank holds a part of every parameter."""
    output = (runs / "output.txt").read_text()
    for line in (
        f"model           Qwen3ForCausalLM, model_type qwen3, of {runs}/demo/model",
        "parameters      216,000; all are trained",
        "layers          2 full_attention (Qwen3Attention, Qwen3MLP)",
        "attention       sdpa",
        "compute dtype   bfloat16",
        "refused         nothing",
        "                --expert_parallel_size with --backend deepspeed: ZeRO does not know the ep axis",
    ):
        assert output.count(f"{line}\n") == 1, line


def test_processes_that_tokenize_change_no_batch(runs, tmp_path):
    flags = ["--dataset", f"{runs}/demo/sft.jsonl", "--pretrain", f"{runs}/demo/model", "--apply_chat_template"]
    flags += ["--max_len", "128", "--train_batch_size", "16", "--micro_train_batch_size", "8", "--param_dtype", "fp32"]
    flags += ["--max_steps", "2", "--no_save", "--dataset_num_proc", "2", "--output_dir", str(tmp_path / "run")]
    code, output = forked(2, "-m", "trainer.cli.train_sft", *flags, cache=str(tmp_path / "cache"))
    assert code == 0, output[-4000:]
    assert len(list((tmp_path / "cache/trainer_sft").glob("*_of_00002.arrow"))) == 2
    hashes = [row["batch_hash"] for row in read_steps(runs / "fsdp2")]
    assert [row["batch_hash"] for row in read_steps(tmp_path / "run")] == hashes[:2]


@pytest.mark.parametrize("name", RUNS)
def test_loss_falls_under_half_of_its_start_within_60_steps(runs, name):
    losses = [row["loss"] for row in read_steps(runs / name)]
    assert len(losses) == 60
    assert losses[-1] < losses[0] / 2, (losses[0], losses[-1])


@pytest.mark.parametrize(("name", "tolerance"), [("fsdp2", 1e-5), ("deepspeed", 1e-5), ("fsdp2-bf16", 1e-2)])
def test_saved_model_gives_the_loss_of_the_final_evaluation(runs, name, tolerance):
    """With transformers alone, one sample at a time, masks found by searching the text."""
    model = AutoModelForCausalLM.from_pretrained(runs / name / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(runs / name / "model")
    total, count = 0.0, 0
    for line in (runs / "demo" / "sft_eval.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer_ids = tokenizer(messages[-1]["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
        ids = torch.tensor([prompt_ids + answer_ids])
        with torch.no_grad():
            log_probs = model(ids).logits[0, :-1].log_softmax(-1)
        total -= sum(log_probs[len(prompt_ids) - 1 + i, token].item() for i, token in enumerate(answer_ids))
        count += len(answer_ids)
    eval_rows = [row for row in read_rows(runs / name) if "eval_loss" in row]
    assert eval_rows[-1]["step"] == 60
    assert total / count == pytest.approx(eval_rows[-1]["eval_loss"], rel=tolerance)


def test_both_backends_give_the_same_curve(runs):
    for row, other in zip(read_steps(runs / "fsdp2"), read_steps(runs / "deepspeed")):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4), row["step"]


def test_evaluation_steps_and_saved_dtype(runs):
    eval_steps = [row["step"] for row in read_rows(runs / "fsdp2-bf16") if "eval_loss" in row]
    assert eval_steps == [30, 60]
    config = json.loads((runs / "fsdp2-bf16" / "model" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["Qwen3ForCausalLM"]


def test_start_shows_the_ledger_and_a_sample_with_its_loss_tokens_marked(runs):
    output = (runs / "output.txt").read_text()
    assert "training data: 4000 rows: 4000 samples, 0 excluded" in output
    assert "stop token trained in 4000 of 4000" in output
    marked = output.split("loss tokens in [[ ]]:\n")[1].split("]]")[0]
    assert marked.count("[[") == 1 and marked.endswith("<|im_end|>") and "Sort" in marked.split("[[")[0]


def test_config_yaml_repeats_the_run(runs, tmp_path):
    config = yaml.safe_load((runs / "fsdp2" / "config.yaml").read_text())
    assert config["backend"] == "fsdp2" and config["train_batch_size"] == 16
    repeat = [
        "--config",
        f"{runs}/fsdp2/config.yaml",
        "--max_steps",
        "3",
        "--output_dir",
        f"{tmp_path}/again",
        "--no_save",
    ]
    train_many(2, [repeat], tmp_path, timeout=120)
    first = [row["loss"] for row in read_steps(runs / "fsdp2")][:3]
    assert [row["loss"] for row in read_steps(tmp_path / "again")] == first


def test_layout_auto_trains_the_same_batches_and_can_be_repeated(runs):
    line = "--layout auto: fsdp2 2, dp 2"
    assert (runs / "output.txt").read_text().count(line) == 2, "train_sft and train_dpo, on rank 0 only"
    rows, again, expected = (read_steps(runs / name) for name in ("auto", "auto-again", "fsdp2"))
    assert [row["loss"] for row in rows] == [row["loss"] for row in again] and len(rows) == 3
    for row, other in zip(rows, expected):
        assert row["batch_hash"] == other["batch_hash"] and row["loss"] == pytest.approx(other["loss"], rel=1e-5)
    config = yaml.safe_load((runs / "auto/config.yaml").read_text())
    assert (config["layout"], config["backend"], config["zero_stage"]) == ("flags", "fsdp2", 2)
    dpo = yaml.safe_load((runs / "auto-dpo/config.yaml").read_text())
    assert dpo["reduce_once"] and not config["reduce_once"], "8 pairs on 2 ranks are two micro-batches each"


def test_dropout_of_the_model_makes_no_batch_shape_another_run(runs, tmp_path):
    """GPT-2, whose config drops a tenth of everything: micro-batches, and a ring, which has no dropout in its attention."""
    config = GPT2Config(vocab_size=512, n_layer=2, n_head=4, n_embd=32, n_positions=128)
    assert config.resid_pdrop == config.attn_pdrop == 0.1
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    AutoTokenizer.from_pretrained(runs / "demo/model").save_pretrained(tmp_path / "gpt2")
    data = ["--pretrain", f"{tmp_path}/gpt2", "--dataset", f"{runs}/demo/sft.jsonl", "--apply_chat_template"]
    data += ["--backend", "fsdp2", "--param_dtype", "fp32", "--max_len", "128", "--max_steps", "3"]
    data += ["--train_batch_size", "16", "--learning_rate", "1e-3"]
    shapes = {
        "4": ["--micro_train_batch_size", "4"],
        "8": ["--micro_train_batch_size", "8"],
        "ring": ["--micro_train_batch_size", "8", "--ring_attn_size", "2"],
    }
    lines = [[*data, *flags, "--output_dir", f"{tmp_path}/{name}"] for name, flags in shapes.items()]
    train_many(2, lines, tmp_path, timeout=200)
    losses = {name: [row["loss"] for row in read_steps(tmp_path / name)] for name in shapes}
    assert losses["4"] == pytest.approx(losses["8"], rel=1e-6)
    assert losses["ring"] == pytest.approx(losses["8"], rel=1e-6)
    assert json.loads((tmp_path / "8/model/config.json").read_text())["resid_pdrop"] == 0.1


def test_tensorboard_mirrors_the_metrics(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(runs / "fsdp2" / "tensorboard")).Reload()
    assert {"train/learning_rate", "train/grad_norm", "eval/loss"} <= set(events.Tags()["scalars"])
    losses = [event.value for event in events.Scalars("train/loss")]
    assert losses == pytest.approx([row["loss"] for row in read_steps(runs / "fsdp2")], rel=1e-6)


def test_evaluations_and_checkpoints_by_epoch_come_at_their_steps(tmp_path):
    """32 rows of 8 a step are 4 steps an epoch. Of three evaluations in four steps, every second step has one."""
    make_demo(str(tmp_path / "demo"))
    flags = (
        "--pretrain demo/model --dataset demo/sft.jsonl#32 --eval_dataset demo/sft_eval.jsonl#8 --apply_chat_template"
    )
    flags += " --train_batch_size 8 --max_epochs 2 --evals_per_epoch 3 --saves_per_epoch 1 --output_dir run --no_save"
    code, output = in_fork("-m", "trainer.cli", "sft", *flags.split(), cwd=tmp_path)
    assert code == 0, output[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "eval_loss" in row] == [2, 4, 6, 8]
    saved = [int(path.name.removeprefix("step_")) for path in (tmp_path / "run/checkpoints").glob("step_*")]
    assert sorted(saved) == [4, 8]


def test_flags_by_epoch_are_steps():
    found = steps_by_epoch(EpochArguments(evals_per_epoch=4, saves_per_epoch=1), range(10))
    assert found == {"eval_steps": 3, "save_steps": 10}  # never more often than asked
    assert steps_by_epoch(EpochArguments(evals_per_epoch=9), range(2)) == {"eval_steps": 1, "save_steps": None}


def test_wandb_offline_and_no_flags_mean_the_demo(tmp_path):
    """Without torchrun and without --pretrain and --dataset: one rank on the demo, which it writes and names."""
    command = [sys.executable, "-m", "trainer.cli.train_sft", "--max_steps", "2", "--use_wandb", "--output_dir", "run"]
    code, output = run_process(command, cwd=tmp_path, timeout=120, WANDB_MODE="offline")
    assert code == 0, output[-3000:]
    assert "training on the embedded demo" in output
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*")), output[-2000:]
    assert "WANDB_API_KEY" not in (tmp_path / "run" / "config.yaml").read_text()
    assert len(read_steps(tmp_path / "run")) == 2


def test_compare_tool_passes_on_these_runs(runs):
    logs = ["--deepspeed_log", f"{runs}/deepspeed", "--fsdp2_log", f"{runs}/fsdp2", "--threshold", "1e-4"]
    code, output = run_process([sys.executable, str(ROOT / "compare_backends.py"), *logs])
    assert code == 0 and "PASS" in output, output


def test_memory_of_gpus_is_expandable_unless_somebody_chose(monkeypatch):
    for name in run_setup.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    kinds = []
    for chosen, vllm in (("", False), ("", True), ("expandable_segments:False", False)):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        if chosen:
            monkeypatch.setenv("PYTORCH_ALLOC_CONF", chosen)
        run_setup.set_up_gpu(adam_offload=False, vllm=vllm)
        kinds.append(torch._C._accelerator_getAllocatorSettings())
    assert kinds == ["expandable_segments:True", "expandable_segments:False", "expandable_segments:False"]
