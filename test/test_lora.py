"""LoRA: on every layout the plain loop of peft; the adapter alone is trained, saved and resumed; merged, it is the model.

The plain loops are reference.py and preference_reference.py with peft's own model. Two launches hold all runs.
"""

import importlib.util
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from launch import FULL, ROOT, forked, in_fork, read_steps, train_many
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from test_parity import assert_same_steps, assert_same_tensors
from test_parity_preference import assert_equals_the_plain_loop
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trainer.cli.train_sft import check as check_sft
from trainer.errors import UserError, one_line
from trainer.flags.common_flags import LoraArguments, SFTArguments
from trainer.flags.parse_flags import from_flat
from trainer.models.model_loading import resolve_model_folder
from trainer.runs.features.adapter import add_adapter_of_flags
from trainer.runs.flag_checks import check_flags

BACKENDS = {f"z{n}": ["--backend", "deepspeed", "--zero_stage", str(n)] for n in (0, 1, 2, 3)} | {
    "fsdp2": ["--backend", "fsdp2"]
}
LAYOUTS = {
    "dp2": [],
    "tp2": ["--tensor_parallel_size", "2"],
    "sp2": ["--ring_attn_size", "2"],
    "recompute": ["--gradient_checkpointing"],
    "packed": ["--packing_samples"],
}
STEPS = 5
SFT = [
    "fsdp2-dp2", "fsdp2-tp2", "fsdp2-sp2", "fsdp2-recompute", "z0-dp2", "z1-dp2", "z2-packed", "z3-dp2", "z3-sp2",
]  # fmt: skip
BF16 = ["fsdp2-dp2", "z2-dp2", "z3-dp2"]
PREFERENCE = [
    "train_dpo-fsdp2-dp2", "train_dpo-fsdp2-sp2", "train_dpo-z1-dp2", "train_dpo-z3-dp2",
    "train_rm-fsdp2-tp2", "train_rm-z2-dp2", "train_rm-z3-dp2",
]  # fmt: skip
RESUMED = ["fsdp2-dp2", "fsdp2-tp2", "z1-dp2", "z2-dp2", "z3-dp2"]
if not FULL:  # one of each kind on each backend
    SFT = ["fsdp2-tp2", "fsdp2-dp2", "fsdp2-sp2", "fsdp2-recompute", "z0-dp2", "z2-packed", "z3-dp2"]
    BF16 = ["fsdp2-dp2", "z3-dp2"]
    PREFERENCE = ["train_dpo-fsdp2-dp2", "train_dpo-z3-dp2", "train_rm-fsdp2-tp2", "train_rm-z3-dp2"]
    RESUMED = ["fsdp2-dp2", "z3-dp2"]
NUM_TRAINED = 5 * 8 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 172))  # layers, rank, inputs and outputs of each


def flags_of(name: str, data) -> list[str]:
    """All flags but the folders of a run named <backend>-<layout>, or "reference"."""
    flags = ["--pretrain", f"{data}/models/stories260K-hf", "--lora_rank", "8", "--weight_decay", "0.1", "--max_len"]
    flags += ["128", "--train_batch_size", "8", "--micro_train_batch_size", "2", "--learning_rate", "1e-3"]
    flags += ["--lr_scheduler", "constant_with_warmup", "--param_dtype", "fp32"]
    if name == "reference":
        return flags
    backend, layout = name.split("-")
    return [*flags, *BACKENDS[backend], *LAYOUTS[layout]]


def sft_line(name: str, folder, data, *more: str, run: str = "") -> list[str]:
    gsm8k = ["--dataset", f"{data}/gsm8k/train.jsonl", "--input_key", "question", "--output_key", "answer"]
    where = ["--output_dir", f"{folder}/{run or name}", "--parity_dump", f"{folder}/{run or name}/parity"]
    steps = ["--max_samples", "80", "--max_steps", str(STEPS)]
    return [*flags_of(name, data), *gsm8k, *steps, *where, *more]


def pair_line(command: str, name: str, folder, data, *more: str, run: str = "") -> list[str]:
    run = run or f"{command}-{name}"
    where = ["--output_dir", f"{folder}/{run}", "--parity_dump", f"{folder}/{run}/parity"]
    pairs = ["--dataset", f"{data}/gsm8k/pairs.jsonl", "--max_samples", "60", "--max_steps", "4", "--max_len", "192"]
    # with its usual epsilon, Adam's first update is the sign of each gradient, also of one that is only rounding
    pairs += ["--learning_rate", "1e-4", "--adam_eps", "1e-5"]
    return [command, *flags_of(name, data), *pairs, *where, *more]


def run_reference(script: str, line: list[str]) -> None:
    code, output = forked(1, str(ROOT / "test" / script), *line)
    assert code == 0, output[-4000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_data):
    """The folder with all finished runs; those that save a model, into <run>/model."""
    folder = tmp_path_factory.mktemp("lora")
    run_reference("reference.py", sft_line("reference", folder, shared_data))
    for command in ("train_dpo", "train_rm"):
        run_reference("preference_reference.py", pair_line(command, "reference", folder, shared_data))
    lines = [sft_line(name, folder, shared_data, "--check_replicas_every", "4") for name in SFT]
    lines += [sft_line(name, folder, shared_data, "--param_dtype", "bf16", run=f"{name}-bf16") for name in BF16]
    for line in PREFERENCE:
        command, name = line.split("-", 1)
        lines.append(pair_line(command, name, folder, shared_data))
    for backend in ("fsdp2", "z3"):
        reference = ["--ref_model", f"{shared_data}/models/stories260K-hf", "--no_save"]
        lines.append(pair_line("train_dpo", f"{backend}-dp2", folder, shared_data, *reference, run=f"{backend}-copy"))
    train_many(2, lines, folder, timeout=1200)
    return folder


# --- what is trained and saved


@pytest.mark.parametrize("name", ["fsdp2-tp2", "z0-dp2", "z3-dp2"])
def test_only_the_adapter_is_trained_and_saved(runs, name):
    saved = load_file(runs / name / "model" / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == NUM_TRAINED
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    for dump in ("grads_step1", "weights_final"):
        tensors = load_file(runs / name / "parity" / f"{dump}.safetensors")
        assert sum(tensor.numel() for tensor in tensors.values()) == NUM_TRAINED
    assert not (runs / name / "model" / "model.safetensors").exists()


def peft_model(folder, data):
    base = AutoModelForCausalLM.from_pretrained(f"{data}/models/stories260K-hf", dtype=torch.float32)
    return PeftModel.from_pretrained(base, folder)


@pytest.mark.parametrize("name", ["fsdp2-tp2", "z3-dp2"])
def test_peft_loads_the_saved_adapter_and_finds_what_was_trained(runs, shared_data, name):
    model = peft_model(runs / name / "model", shared_data)
    final = load_file(runs / name / "parity" / "weights_final.safetensors")
    loaded = {key.removeprefix("base_model.model."): value for key, value in model.named_parameters()}
    for key, tensor in final.items():
        assert torch.equal(loaded[key], tensor), key


# --- one loss curve


@pytest.mark.parametrize("name", SFT)
def test_fp32_run_equals_the_plain_loop_of_peft(runs, name):
    assert len(read_steps(runs / name)) == STEPS
    assert_same_steps(runs / name, runs / "reference", 1e-5, 1e-4)
    assert_same_tensors(runs / name, runs / "reference", "grads_step1", 1e-4)
    assert_same_tensors(runs / name, runs / "reference", "weights_final", 1e-4)


@pytest.mark.parametrize("name", BF16)
def test_bf16_run_stays_within_1e_2_of_the_plain_fp32_loop(runs, name):
    assert_same_steps(runs / f"{name}-bf16", runs / "reference", 1e-2, None)


@pytest.mark.parametrize("name", PREFERENCE)
def test_preference_runs_equal_the_plain_loop_of_peft(runs, name):
    assert_equals_the_plain_loop(runs / name, runs / f"{name.split('-')[0]}-reference")


@pytest.mark.parametrize("backend", ["fsdp2", "z3"])
def test_the_adapter_switched_off_is_the_reference(runs, backend):
    """DPO without a second model, against DPO with an explicit copy of the base: bitwise, at every step."""
    off, copy = read_steps(runs / f"train_dpo-{backend}-dp2"), read_steps(runs / f"{backend}-copy")
    keys = ("loss", "grad_norm", "reward_margin", "chosen_rewards", "chosen_logps")
    assert [[row[key] for key in keys] for row in off] == [[row[key] for key in keys] for row in copy]
    assert off[0]["reward_margin"] == 0 and off[-1]["reward_margin"] != 0


# --- merging


def merge(adapter, out, *flags: str) -> str:
    code, output = in_fork("-m", "trainer.cli.export", str(adapter), str(out), *flags)
    assert code == 0, output[-3000:]
    return output


def test_the_merged_model_is_base_plus_adapter(runs, shared_data, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(f"{shared_data}/models/stories260K-hf", base, copy_function=os.symlink)
    (base / "generation_config.json").unlink(missing_ok=True)
    (base / "generation_config.json").write_text('{"temperature": 0.6}')  # which transformers reads and would not write
    shutil.copytree(runs / "fsdp2-dp2" / "model", tmp_path / "adapter")
    config = tmp_path / "adapter" / "config.json"  # as --load_in_4bit leaves it
    of_base = json.loads((base / "config.json").read_text())
    config.write_text(json.dumps({**of_base, "quantization_config": {"load_in_4bit": True}}))
    merge(tmp_path / "adapter", tmp_path / "merged", "--base", str(base))
    assert json.loads((tmp_path / "merged" / "generation_config.json").read_text())["temperature"] == 0.6
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(tmp_path / "merged")("Lily went to the park.", return_tensors="pt")["input_ids"]
    adapted = peft_model(runs / "fsdp2-dp2" / "model", shared_data)
    with torch.no_grad():
        expected, logits = adapted(input_ids=ids).logits, merged(input_ids=ids).logits
        with adapted.disable_adapter():
            plain = adapted(input_ids=ids).logits
    assert (logits - expected).norm() <= 1e-5 * expected.norm()
    assert (plain - expected).norm() > 1e-2 * expected.norm()  # the adapter does something


def test_transformers_loads_the_adapter_folder_as_it_is(runs, shared_data):
    """From another working directory too: the base's folder is named by its whole path."""
    folder = runs / "fsdp2-dp2" / "model"
    assert not (folder / "config.json").exists()
    loaded, adapted = AutoModelForCausalLM.from_pretrained(folder), peft_model(folder, shared_data)
    ids = AutoTokenizer.from_pretrained(folder)("Lily went to the park.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=ids).logits, adapted(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert os.path.isabs(base)
    with pytest.raises(UserError, match=r"is an adapter, not a model.* Merge it: python -m trainer.cli.export"):
        resolve_model_folder(str(folder), "--ref_model")
    with pytest.raises(UserError, match=r"Did you mean .*fsdp2-dp2/model"):
        resolve_model_folder(str(folder.parent), "--pretrain")


def test_an_adapter_of_another_depth_does_not_fit(runs, shared_data, tmp_path):
    source = f"{shared_data}/models/stories260K-hf"
    shutil.copytree(source, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(source)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    model.save_pretrained(tmp_path / "base")
    arguments = [str(runs / "fsdp2-dp2" / "model"), str(tmp_path / "merged"), "--base", str(tmp_path / "base")]
    code, output = in_fork("-m", "trainer.cli.export", *arguments)
    assert code == 2 and "error: SOURCE:" in output and "does not fit" in output, output[-3000:]
    assert not (tmp_path / "merged").exists()


def test_an_adapter_of_another_width_names_its_tensor():
    linear = torch.nn.Linear(4, 2, bias=False)
    with pytest.raises(RuntimeError) as found:
        linear.load_state_dict({"weight": torch.zeros(2, 3)})
    assert one_line(found.value).startswith("size mismatch for weight: copying a param with shape torch.Size([2, 3])")


def test_a_reward_model_is_merged_with_its_head(runs, shared_data, tmp_path):
    folder = runs / "train_rm-z3-dp2"
    merge(folder / "model", tmp_path / "merged")  # the adapter names its base
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    head = load_file(folder / "parity" / "weights_final.safetensors")["score.weight"]
    initial = load_file(folder / "initial" / "score.safetensors")["score.weight"]
    assert torch.equal(merged.score.weight, head) and (head - initial).norm() > 1e-3 * initial.norm()
    base = AutoModelForSequenceClassification.from_pretrained(folder / "initial", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, folder / "model")
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        assert torch.allclose(merged(input_ids=ids).logits, adapted(input_ids=ids).logits, rtol=1e-5, atol=1e-6)
    card = (tmp_path / "merged/README.md").read_text()
    assert "library_name: transformers" in card and "| lora_rank |" in card
    usage = (
        card.partition("```python\n")[2]
        .partition("```")[0]
        .replace('folder = "."', f"folder = {str(tmp_path / 'merged')!r}")
    )
    loaded: dict = {}
    exec(usage, loaded)
    assert torch.equal(loaded["model"].score.weight.float(), merged.score.weight)


# --- checkpoints


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, shared_data):
    """(folder, output) of runs that prove their own resume, with dropout where the layout allows it."""
    folder = tmp_path_factory.mktemp("lora_resume")
    lines = []
    for name in RESUMED:
        dropout = [] if "tp" in name else ["--lora_dropout", "0.1"]
        lines.append(sft_line(name, folder, shared_data, "--verify_resume", "2", *dropout))
    return folder, train_many(2, lines, folder, timeout=600)


def test_a_checkpoint_loses_nothing(resumed):
    _, output = resumed
    proofs = [line for line in output.splitlines() if line.startswith("verify_resume: 2 steps from ")]
    assert [line.split("/checkpoints/")[0].rpartition("/")[2] for line in proofs] == RESUMED
    assert all(line.endswith("replayed, bitwise the same") for line in proofs)


@pytest.mark.parametrize("name", ["fsdp2-dp2", "z3-dp2"])
def test_a_checkpoint_holds_the_adapter_and_its_optimizer_state_only(resumed, name, tmp_path):
    folder = resumed[0] / name / "checkpoints" / "step_2"
    counts: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                kind = key.split("/")[0]
                counts[kind] = counts.get(kind, 0) + file.get_tensor(key).numel()
    assert (counts["weight"], counts["exp_avg"], counts["exp_avg_sq"]) == (NUM_TRAINED,) * 3
    code, output = in_fork("-m", "trainer.cli.export", str(folder), str(tmp_path / "out"))
    assert code == 0, output[-3000:]
    exported = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in exported.values()) == NUM_TRAINED
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["r"] == 8


# --- what is refused


@pytest.mark.parametrize(
    "given, where",
    [
        ({"lora_dropout": 0.1}, "--lora_dropout 0.1 without --lora_rank"),
        ({"target_modules": "q_proj"}, "--target_modules q_proj without --lora_rank"),
        ({"lora_rank": 8, "lora_dropout": 0.1, "tensor_parallel_size": 2}, "--lora_dropout 0.1 with --tensor_par"),
        ({"lora_rank": 8, "lora_dropout": 0.1, "ring_attn_size": 2}, "--lora_dropout 0.1 with --ring_attn_size 2"),
        ({"lora_rank": 8, "lora_dropout": 1.0}, "--lora_dropout: 1"),
        ({"lora_rank": 8, "target_modules": " , "}, "--target_modules"),
        ({"lora_experts": True}, "--lora_experts without --lora_rank"),
        ({"lora_rank": 8, "lora_experts": True, "lora_dropout": 0.1}, "--lora_experts with --lora_dropout 0.1"),
        ({"lora_rank": 8, "lora_experts": True, "tensor_parallel_size": 2}, "--lora_experts with --tensor_par"),
        ({"lora_rank": 8, "lora_experts": True, "compile": True}, "--lora_experts with --compile"),
    ],
)
def test_flags_that_cannot_work_are_refused(given, where):
    with pytest.raises(UserError, match=where):
        args = from_flat(SFTArguments, {"pretrain": "m", "dataset": "d", **given})
        check_flags("train_sft", args, ())


def test_four_bits_without_their_package_are_refused(tmp_path, shared_data, monkeypatch):
    line = sft_line("fsdp2-dp2", tmp_path, shared_data, "--load_in_4bit")
    find = importlib.util.find_spec
    absent = {"bitsandbytes": None}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: absent[name] if name in absent else find(name, *of)
    )
    with pytest.raises(UserError, match=r"--load_in_4bit: bitsandbytes is not installed .allowed: pip install"):
        check_sft(line)


def test_all_linear_is_every_linear_layer_but_the_head(shared_data):
    """The names of peft and of LLaMA-Factory mean what no flag means."""
    folder, found = f"{shared_data}/models/stories260K-hf", {}
    for names in (None, "all-linear", "all"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
        flags = LoraArguments(lora_rank=4, target_modules=names)
        add_adapter_of_flags(flags, SimpleNamespace(print=print), model, folder)
        found[names] = {name.removesuffix(".lora_A") for name, _ in model.named_modules() if name.endswith(".lora_A")}
        assert found[names] == linear and len(linear) == 5 * 7


@pytest.mark.parametrize(
    "more, expected",
    [
        (
            ["--backend", "deepspeed", "--tensor_parallel_size", "2"],
            "error: --lora_rank 8 with --backend deepspeed and",
        ),
        (
            ["--backend", "fsdp2", "--tensor_parallel_size", "2", "--sequence_parallel"],
            "error: --lora_rank 8 with --seq",
        ),
        (
            ["--backend", "fsdp2", "--target_modules", "w_proj"],
            "error: --target_modules: no layer is named w_proj (allo",
        ),
        (
            ["--backend", "fsdp2", "--target_modules", "q_proj,w_proj,x"],
            "error: --target_modules: no layer is named w_proj, x (allowed: down_proj, gate_proj, k_proj, o_proj, q_proj,",
        ),
        (
            ["--backend", "fsdp2", "--target_modules", "embed_tokens"],
            "error: --target_modules: model.embed_tokens is no",
        ),
        (["--backend", "fsdp2", "--lora_experts"], "error: --lora_experts: LlamaForCausalLM has no experts"),
    ],
)
def test_a_command_refuses_in_one_line(tmp_path, shared_data, more, expected):
    line = [*sft_line("reference", tmp_path, shared_data, "--device", "cpu"), *more]
    code, output = in_fork("-m", "trainer.cli.train_sft", *line)
    assert code == 2 and "Traceback" not in output
    assert next(row for row in output.splitlines() if row.startswith("error: ")).startswith(expected), output[-2000:]
