"""Training goes on from an adapter folder, as peft's plain loop does from the loaded one; and adapters of frozen models.

One launch holds all runs. The folder that runs go on from was written by a run of the same launch.
"""

import json

import pytest
import torch
from launch import FULL, read_steps, train_many
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from test_lora import BACKENDS, LAYOUTS, merge, run_reference
from test_parity import assert_same_steps, assert_same_tensors
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.cli import train_sft
from trainer.compare.certificates.plain_replay import planned_batches
from trainer.compare.certificates.verification import missing_rights
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.flags.groups import flat
from trainer.model_folders.adapter_tensors import initial_tensors, merge_adapter
from trainer.model_folders.model_folder import all_tensors
from trainer.models.lora import LoraOptions, add_adapter
from trainer.runs.flag_checks import start_from_adapter

STEPS = ["--max_steps", "2", "--max_samples", "24", "--learning_rate", "1e-3", "--weight_decay", "0.1"]
GOES_ON = ["fsdp2-dp2", "fsdp2-tp2", "z1-dp2", "z3-dp2"]
ON_MERGED = ["fsdp2-tp2", "z3-dp2"]
MERGED = ["fsdp2-tp2", "z2-dp2", "z3-dp2"]
PAIRS = ["fsdp2-tp2", "z3-dp2"]
DORA = ["fsdp2-sp2", "fsdp2-recompute", "z2-packed"]
if not FULL:  # one of each kind on each backend
    GOES_ON, MERGED, DORA = ["fsdp2-tp2", "z3-dp2"], ["fsdp2-tp2", "z3-dp2"], ["fsdp2-sp2", "z2-packed"]
    ON_MERGED, PAIRS = ["fsdp2-tp2"], ["z3-dp2"]  # what MERGED and test_lora.py have on the other backend
DORA_FLAGS = ["--lora_rank", "4", "--use_dora", "--use_rslora"]


def line(name: str, folder, data, pretrain, *more: str, run: str = "", command: str = "") -> list[str]:
    run, rows = run or name, "pairs" if "dpo" in command else "train"
    flags = ["--pretrain", str(pretrain), "--dataset", f"{data}/gsm8k/{rows}.jsonl", "--param_dtype", "fp32"]
    flags += ["--train_batch_size", "8", "--micro_train_batch_size", "2", "--max_len", "128", *STEPS]
    flags += ["--output_dir", f"{folder}/{run}", "--parity_dump", f"{folder}/{run}/parity"]
    flags += [] if rows == "pairs" else ["--input_key", "question", "--output_key", "answer"]
    if name != "reference":
        backend, layout = name.split("-")
        flags += [*BACKENDS[backend], *LAYOUTS[layout]]
    return [*([command] if command else []), *flags, *more]


def make_adapter(base: str, folder, **config) -> None:
    """An adapter whose update is not zero, written by peft."""
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", **config))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_data):
    folder, base = tmp_path_factory.mktemp("adapters"), f"{shared_data}/models/stories260K-hf"
    made = folder / "made"
    make_adapter(base, made, r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"])
    first = [line("fsdp2-dp2", folder, shared_data, made, run="first")]
    saved = folder / "first" / "model"
    lines = [line(name, folder, shared_data, saved) for name in GOES_ON]
    lines += [line(name, folder, shared_data, saved, "--merge_adapter", run=f"{name}-merged") for name in MERGED]
    lines += [line(name, folder, shared_data, base, *DORA_FLAGS, run=f"{name}-dora") for name in DORA]
    anew = ["--merge_adapter", "--lora_rank", "2"]
    lines += [line(name, folder, shared_data, saved, *anew, run=f"{name}-anew") for name in ON_MERGED]
    resume = ["--verify_resume", "1"]
    lines += [line(name, folder, shared_data, saved, *resume, run=f"{name}-again") for name in ("fsdp2-dp2", "z3-dp2")]
    again = folder / "fsdp2-sp2-dora" / "model"
    lines += [line("z1-dp2", folder, shared_data, again, "--verify_resume", "1", run="dora-again")]
    train_many(2, [*first, *lines], folder, timeout=600)
    merge(saved, folder / "whole")
    lines = []
    for name in (
        PAIRS
    ):  # the reference: an adapter of a frozen model, that model merged, the adapter that training goes on from
        for run, model, *more in (
            ("adapter", base, "--ref_model", str(saved)),
            ("whole", base, "--ref_model", f"{folder}/whole"),
            ("default", saved),
            ("named", saved, "--ref_model", str(saved)),
        ):
            lines.append(line(name, folder, shared_data, model, *more, run=f"{name}-{run}", command="train_dpo"))
    train_many(2, lines, folder, timeout=600)
    return folder


def test_a_run_goes_on_from_an_adapter_as_peft_does(runs, shared_data):
    base, saved = f"{shared_data}/models/stories260K-hf", runs / "first" / "model"
    run_reference("reference.py", line("reference", runs, shared_data, base, "--lora_adapter", str(saved)))
    before = load_file(saved / "adapter_model.safetensors")
    assert json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"] == base
    for name in GOES_ON:
        assert_same_steps(runs / name, runs / "reference", 1e-5, 1e-4)
        assert_same_tensors(runs / name, runs / "reference", "weights_final", 1e-4)
        config = json.loads((runs / name / "model" / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 12, ["down_proj", "q_proj"])
        assert config["base_model_name_or_path"] == base
        assert load_file(runs / name / "model" / "adapter_model.safetensors").keys() == before.keys()


def test_a_merged_adapter_is_trained_as_whole_weights(runs, shared_data):
    whole = line("reference", runs, shared_data, runs / "whole", run="reference-merged")
    run_reference("reference.py", whole)
    for name in MERGED:
        assert_same_steps(runs / f"{name}-merged", runs / "reference-merged", 1e-5, 1e-4)
        assert_same_tensors(runs / f"{name}-merged", runs / "reference-merged", "weights_final", 1e-4)
        assert (runs / f"{name}-merged" / "model" / "model.safetensors").exists()


def test_a_new_adapter_is_trained_on_the_merged_model_as_peft_does(runs, shared_data):
    """The merged model is in the run folder, and the new adapter names it. Its weights are those that peft merges."""
    line_of_peft = line("reference", runs, shared_data, runs / "whole", "--lora_rank", "2", run="reference-anew")
    run_reference("reference.py", line_of_peft)
    base = AutoModelForCausalLM.from_pretrained(f"{shared_data}/models/stories260K-hf")
    expected = PeftModel.from_pretrained(base, runs / "first" / "model").merge_and_unload().state_dict()
    for name in ON_MERGED:
        run = runs / f"{name}-anew"
        assert_same_steps(run, runs / "reference-anew", 1e-5, 1e-4)
        assert_same_tensors(run, runs / "reference-anew", "weights_final", 1e-4)
        config = json.loads((run / "model/adapter_config.json").read_text())
        assert (config["r"], config["base_model_name_or_path"]) == (2, str(run / "base"))
        written = load_file(run / "base/model.safetensors")
        assert all(torch.allclose(tensor, expected[name], atol=1e-6) for name, tensor in written.items())


@pytest.mark.parametrize("name", PAIRS)
def test_an_adapter_is_a_reference(runs, name):
    """--ref_model ADAPTER is the merged model; the default of --pretrain ADAPTER is that adapter, not its base."""
    keys = ("loss", "grad_norm", "reward_margin", "chosen_rewards")
    steps = {run: read_steps(runs / f"{name}-{run}") for run in ("adapter", "whole", "default", "named")}
    rows = {run: torch.tensor([[row[key] for key in keys] for row in found]) for run, found in steps.items()}
    torch.testing.assert_close(rows["adapter"], rows["whole"], rtol=1e-4, atol=1e-5)
    assert rows["adapter"][0, 2].abs() > 1e-3 and rows["default"][0, 2].abs() < 1e-5
    assert torch.equal(rows["default"], rows["named"])


def test_dora_and_rslora_equal_the_plain_loop_of_peft(runs, shared_data):
    base = f"{shared_data}/models/stories260K-hf"
    run_reference("reference.py", line("reference", runs, shared_data, base, *DORA_FLAGS, run="reference-dora"))
    for name in DORA:
        assert_same_steps(runs / f"{name}-dora", runs / "reference-dora", 1e-5, 1e-4)
        assert_same_tensors(runs / f"{name}-dora", runs / "reference-dora", "grads_step1", 1e-4)
        assert_same_tensors(runs / f"{name}-dora", runs / "reference-dora", "weights_final", 1e-4)
    final = load_file(runs / "z2-packed-dora" / "parity" / "weights_final.safetensors")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), runs / "z2-packed-dora" / "model")
    loaded = {key.removeprefix("base_model.model."): value for key, value in model.named_parameters()}
    assert all(torch.equal(loaded[key], tensor) for key, tensor in final.items())
    assert sum(".lora_magnitude_vector." in key for key in final) == 35


@pytest.mark.parametrize("kind", [{}, {"use_dora": True}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}])
def test_engines_get_what_peft_merges(base, tmp_path, kind):
    make_adapter(base, tmp_path, r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], **kind)
    model = AutoModelForCausalLM.from_pretrained(base)
    add_adapter(model, LoraOptions(4, 12, start=str(tmp_path)), base)
    for name, tensor in initial_tensors(model, 0).items():
        model.get_parameter(name).data.copy_(tensor)
    merged = dict(merge_adapter(((name, tensor.detach()) for name, tensor in all_tensors(model).items()), model))
    plain = AutoModelForCausalLM.from_pretrained(base)
    expected = PeftModel.from_pretrained(plain, tmp_path).merge_and_unload().state_dict()
    assert all((merged[name] - expected[name]).norm() <= 1e-6 * expected[name].norm() for name in merged)


def test_verify_run_reads_the_data_with_the_template_of_the_adapter(tmp_path):
    """Not with that of its base. An adapter that is not here is named, and the order is then not checked."""
    make_demo(str(tmp_path))
    base, adapter, data = tmp_path / "model", tmp_path / "adapter", tmp_path / "sft.jsonl"
    make_adapter(str(base), adapter, r=2, lora_alpha=4, target_modules=["q_proj"])
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_start|>", "<|im_start|>= ")
    tokenizer.save_pretrained(adapter)
    args, _ = train_sft.parse(["--pretrain", str(adapter), "--dataset", str(data), "--apply_chat_template"])
    start_from_adapter(args.model, args.lora)
    content = {"command": "train_sft", "arguments": flat(args)}
    samples, _ = planned_batches(content, args.model.pretrain)
    messages = json.loads(data.read_text().splitlines()[0])["messages"]
    expected = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    assert samples[0]["input_ids"] == expected[: len(samples[0]["input_ids"])] and len(expected) < 128
    others = AutoTokenizer.from_pretrained(base).apply_chat_template(messages, tokenize=False)
    assert others != tokenizer.apply_chat_template(messages, tokenize=False)
    assert missing_rights(content, {}, False) == []
    content["arguments"]["lora_adapter"] = "gone"
    assert missing_rights(content, {}, False) == ["--lora_adapter: gone is not here, and is not fetched unasked"]


# --- flags and folders


def folder_of(tmp_path, base: str, **changes):
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "target_modules": ["q_proj"]}
    config |= {"base_model_name_or_path": base, **changes}
    folder = tmp_path / "adapter"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return str(folder)


@pytest.fixture
def base(shared_data):
    return f"{shared_data}/models/stories260K-hf"


def test_the_adapter_sets_flags_that_a_config_repeats(base, tmp_path):
    folder = folder_of(tmp_path, base)
    args, _ = train_sft.check(["--pretrain", folder, "--dataset", __file__])
    assert (args.model.pretrain, args.lora.lora_adapter) == (base, folder)
    assert (args.lora.lora_rank, args.lora.lora_alpha, args.lora.target_modules) == (4, 12, "q_proj")
    again = ["--lora_rank", "4", "--lora_alpha", "12", "--target_modules", "q_proj", "--lora_dropout", "0.1"]
    args, _ = train_sft.check(["--pretrain", base, "--lora_adapter", folder, "--dataset", __file__, *again])
    assert args.lora.lora_dropout == 0.1
    args, _ = train_sft.check(["--pretrain", folder, "--merge_adapter", "--dataset", __file__])
    assert args.lora.lora_rank is None and args.lora.lora_adapter == folder


@pytest.mark.parametrize(
    "flags, changes, expected",
    [
        (["--lora_rank", "8"], {}, "--lora_rank: 8, but .*adapter has 4. Leave out --lora_rank"),
        (["--lora_alpha", "8"], {}, "--lora_alpha: 8, but .*adapter has 12"),
        (["--target_modules", "v_proj"], {}, "--target_modules: v_proj, but .*adapter has q_proj"),
        (["--lora_experts"], {}, "--lora_experts: True, but"),
        (["--use_dora"], {}, "--use_dora: True, but .*adapter has False"),
        (["--tensor_parallel_size", "2"], {"use_dora": True}, "--use_dora with --tensor_parallel_size 2"),
        (["--zero_stage", "3", "--backend", "deepspeed"], {"use_dora": True}, "--use_dora with --zero_stage 3"),
        ([], {"peft_type": "IA3"}, "is an adapter of the kind IA3. Merge it"),
        ([], {"use_qalora": True}, "has use_qalora True, which is not built. Merge it: python -m trainer.cli.export"),
        ([], {"init_lora_weights": "pissa"}, "has init_lora_weights pissa"),
        ([], {"base_model_name_or_path": "some/hub"}, "names the base model some/hub, .* --lora_adapter"),
        ([], {"base_model_name_or_path": None}, "names no base model. Name it"),
        ([], {"r": "x"}, "adapter_config.json cannot be read"),
        ([], {"r": 0}, "adapter_config.json cannot be read: rank 0"),
    ],
)
def test_what_an_adapter_contradicts_is_refused(base, tmp_path, flags, changes, expected):
    folder = folder_of(tmp_path, base, **changes)
    with pytest.raises(UserError, match=expected):
        train_sft.check(["--pretrain", folder, "--dataset", __file__, *flags])


def test_an_adapter_that_does_not_fit_is_one_line(base, tmp_path):
    make_adapter(base, tmp_path / "adapter", r=4, target_modules=["q_proj"])
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["v_proj"]}))
    model = AutoModelForCausalLM.from_pretrained(base)
    with pytest.raises(UserError, match=r"--lora_adapter: .* does not fit the model: 20 tensors"):
        add_adapter(model, LoraOptions(4, 8, start=str(tmp_path / "adapter")), base)
