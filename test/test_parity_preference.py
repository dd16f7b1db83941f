"""train_rm and train_dpo on every kind of layout against the plain loop, on real pairs with a really trained model.

The tolerances are those of test_parity.py. Each command runs on conversations (oasst100, by a chat template) and on plain
prompts (gsm8k), packed and padded. A plain pytest run takes 7 of the 60 configurations of --loss dpo and of rewards, in which
each command meets each backend, each form and each layout of two ranks, and all but two of VARIANTS; all of them:

    PARITY=full python -m pytest test/test_parity_preference.py
"""

import json

import pytest
import torch
from launch import FULL, ROOT, forked, read_rows, read_steps, train_many
from safetensors.torch import load_file
from test_parity import assert_same_tensors
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ m.role + ': ' + m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{% endif %}"
)
DATA = {
    "oasst": [
        "--dataset",
        "{data}/oasst100/pairs.jsonl",
        "--apply_chat_template",
        "--tokenizer_chat_template",
        TEMPLATE,
    ],
    "gsm8k": ["--dataset", "{data}/gsm8k/pairs.jsonl"],
}
BACKENDS = {
    "z1": ["--backend", "deepspeed", "--zero_stage", "1"],
    "z3": ["--backend", "deepspeed", "--zero_stage", "3"],
    "fsdp2": ["--backend", "fsdp2"],
}
LAYOUTS = {
    "dp2": (2, []),
    "tp2": (2, ["--tensor_parallel_size", "2"]),
    "sp2": (2, ["--ring_attn_size", "2"]),
    "dp2-tp2": (4, ["--tensor_parallel_size", "2"]),
    "tp2-sp2": (4, ["--tensor_parallel_size", "2", "--ring_attn_size", "2"]),
}
STEPS = {2: 3, 4: 2}
# one kind of data for each command and form, so that each command meets both
KINDS = {
    ("train_rm", "packed"): "gsm8k", ("train_rm", "padded"): "oasst",
    ("train_dpo", "packed"): "oasst", ("train_dpo", "padded"): "gsm8k",
}  # fmt: skip
FULL_GRID = [
    f"{command}-{backend}-{layout}-{form}" for command, form in KINDS for layout in LAYOUTS for backend in BACKENDS
]
# each layout of two ranks; backends and forms go round. Four ranks are slow
SAMPLE = [
    "train_rm-fsdp2-dp2-packed", "train_rm-z1-tp2-padded", "train_rm-z3-sp2-packed",
    "train_dpo-z1-dp2-padded", "train_dpo-z3-dp2-packed", "train_dpo-fsdp2-tp2-packed", "train_dpo-fsdp2-sp2-padded",
]  # fmt: skip
GRID = FULL_GRID if FULL else SAMPLE
# ipo squares a distance: so its rate is smaller. With a beta of 0.02 the distance is 25, and fp32 rounding of a sum of 190
# log-probs, about 3e-5, is small beside it.
# Every other loss, each on another layout, and the reference's log-probs computed on one layout and read again on another
KTO = ["--loss", "kto", "--desirable_weight", "1.2", "--undesirable_weight", "0.7"]
EXPERTS = ["--pretrain", "{folder}/experts", "--aux_loss_coef", "0.5"]
VARIANTS = {
    "cdpo": ("fsdp2-dp2-packed", ["--loss", "cdpo", "--label_smoothing", "0.2"]),
    "ipo": (
        "z3-sp2-padded",
        ["--loss", "ipo", "--nll_loss_coef", "0.3", "--learning_rate", "1e-4", "--beta", "0.02"],
    ),
    "hinge": ("fsdp2-tp2-padded", ["--loss", "hinge"]),
    "simpo": ("z1-tp2-packed", ["--loss", "simpo", "--beta", "2.0"]),
    "orpo": ("fsdp2-sp2-packed", ["--loss", "orpo"]),
    "kto": ("fsdp2-dp2-packed", KTO),
    "kto_tp": ("fsdp2-tp2-padded", KTO),
    "kto_z1": ("z1-dp2-padded", KTO),
    "precomputed": ("fsdp2-dp2-padded", ["--precompute_ref_logps"]),
    "read_again": ("z1-sp2-padded", ["--precompute_ref_logps"]),
    "experts": ("z3-dp2-packed", EXPERTS),
    "experts_sp": ("fsdp2-sp2-padded", EXPERTS),
    "experts_kto": ("fsdp2-dp2-padded", [*EXPERTS, *KTO]),
}
if not FULL:  # of the same kind on a layout that another one has
    for variant in ("kto", "kto_tp"):
        del VARIANTS[variant]


def command_line(name: str, folder, data, variant: str | None = None) -> list[str]:
    """The command and flags of a configuration named as in GRID; "train_dpo-reference4-packed" is the plain loop's."""
    command, *parts = name.split("-")
    form = parts[-1]
    flags = [flag.format(data=data) if "{data}" in flag else flag for flag in DATA[KINDS[command, form]]]
    flags += ["--pretrain", f"{data}/models/stories260K-hf", "--max_len", "192", "--max_samples", "60"]
    flags += ["--train_batch_size", "8", "--micro_train_batch_size", "2", "--param_dtype", "fp32", "--no_save"]
    flags += ["--adam_eps", "1e-5"]  # with 1e-8, Adam's first update is the sign of each gradient, also of rounding
    flags += ["--learning_rate", "3e-4", "--weight_decay", "0.1", "--lr_scheduler", "constant_with_warmup"]
    flags += ["--packing_samples"] if form == "packed" else []
    if parts[0].startswith("reference"):
        flags += ["--max_steps", parts[0].removeprefix("reference")]
    else:
        num_ranks, layout = LAYOUTS["-".join(parts[1:-1])]
        flags += [*BACKENDS[parts[0]], *layout, "--max_steps", str(STEPS[num_ranks]), "--check_replicas_every", "2"]
    if variant:
        flags += [flag.replace("{folder}", str(folder)) for flag in VARIANTS[variant][1]]
        name = f"{name}-{variant}"
    return [command, *flags, "--output_dir", f"{folder}/{name}", "--parity_dump", f"{folder}/{name}/parity"]


def reference_of(name: str) -> str:
    command, *parts = name.split("-")
    return f"{command}-reference{STEPS[LAYOUTS['-'.join(parts[1:-1])][0]]}-{parts[-1]}"


def make_mixture_of_experts(folder, tokenizer_folder) -> None:
    """A random model of 4 experts, of which 2 take a token, with weights that tell the experts apart."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1,
        initializer_range=0.2, max_position_embeddings=512,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_data):
    """The folder with all finished runs, and the plain loop's."""
    folder = tmp_path_factory.mktemp("parity_preference")
    variants = [(f"train_dpo-{layout}", variant) for variant, (layout, _) in VARIANTS.items()]
    wanted = [(name, None) for name in GRID] + variants
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        make_mixture_of_experts(folder / "experts", shared_data / "models/stories260K-hf")
        references = dict.fromkeys((reference_of(name), variant) for name, variant in wanted)
        lines = [command_line(reference, folder, shared_data, variant) for reference, variant in references]
        (folder / "references.json").write_text(json.dumps(lines))
        script = [str(ROOT / "test/preference_reference.py"), "--many"]
        code, output = forked(1, *script, str(folder / "references.json"), timeout=1500)
        assert code == 0, output[-4000:]
        for num_ranks in STEPS:
            lines = [
                command_line(name, folder, shared_data, variant)
                for name, variant in wanted
                if LAYOUTS["-".join(name.split("-")[2:-1])][0] == num_ranks
            ]
            if lines:
                train_many(num_ranks, lines, folder, timeout=1500)
    return folder


def assert_equals_the_plain_loop(run, reference) -> None:
    steps, expected_steps = read_steps(run), read_steps(reference)
    assert len(steps) == len(expected_steps)
    for row, expected in zip(steps, expected_steps):
        assert row["tokens"] == expected["tokens"]
        for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
            difference = abs(row[key] - expected[key]) / abs(expected[key])
            assert difference <= tolerance, (row["step"], key, row[key], expected[key], difference)
    trained = load_file(reference / "parity" / "grads_step1.safetensors").keys()
    assert load_file(run / "parity" / "grads_step1.safetensors").keys() == trained
    assert_same_tensors(run, reference, "grads_step1", 1e-4)
    assert_same_tensors(run, reference, "weights_final", 1e-4)


@pytest.mark.parametrize("name", GRID)
def test_fp32_run_equals_the_plain_loop(runs, name):
    assert_equals_the_plain_loop(runs / name, runs / reference_of(name))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_loss_equals_its_paper(runs, variant):
    name = f"train_dpo-{VARIANTS[variant][0]}"
    assert_equals_the_plain_loop(runs / f"{name}-{variant}", runs / f"{reference_of(name)}-{variant}")


def test_the_balance_of_experts_is_part_of_the_loss_and_a_metric(runs):
    first = read_steps(runs / "train_dpo-z3-dp2-packed-experts")[0]
    assert first["aux_loss"] >= 2  # k experts of a token: never under k, which is perfect balance
    assert first["loss"] == pytest.approx(0.6931471805599453 + 0.5 * first["aux_loss"], abs=1e-6)


@pytest.mark.parametrize("command", ["train_rm", "train_dpo"])
def test_metrics_of_pairs_are_the_same_on_every_layout(runs, command):
    names = [name for name in GRID if name.startswith(command) and name.endswith("packed")]
    names = [name for name in names if STEPS[LAYOUTS["-".join(name.split("-")[2:-1])][0]] == STEPS[2]]
    assert len(names) >= 2
    own = {"train_rm": "accuracy margin chosen_reward rejected_reward_std", "train_dpo": "reward_margin chosen_logps"}
    first = read_steps(runs / names[0])[-1]
    for name in names:
        row = read_steps(runs / name)[-1]
        for key in own[command].split():
            assert row[key] == pytest.approx(first[key], rel=1e-4, abs=1e-6), (name, key)


def test_dpo_starts_where_policy_and_reference_agree(runs):
    first = read_steps(runs / "train_dpo-fsdp2-sp2-padded")[0]
    assert first["loss"] == pytest.approx(0.6931471805599453, abs=1e-9) and first["reward_margin"] == 0
    assert first["kl"] == 0 and read_steps(runs / "train_dpo-fsdp2-sp2-padded")[-1]["kl"] != 0
    assert read_rows(runs / "train_dpo-fsdp2-sp2-padded")[0]["mesh"]["sp"] == 2


def test_the_reference_is_computed_once(runs):
    assert len(list((runs / "cache/trainer_reference").iterdir())) == 1
