"""--optim muon, adafactor and adamw_8bit against the plain loop, on real data with a really trained model, and from layout to layout.

The plain loop takes torch's own Adafactor, for Muon singular values in fp64 where the trainer multiplies matrices, and for
8-bit AdamW torch's AdamW, whose moments it rounds after each step. The tolerances are those of test_parity.py.
"""

import pytest
import torch
from launch import FULL, ROOT, forked, in_fork, read_steps, train_many
from reference import round_moments, svd_orthogonalized
from test_parity import assert_same_steps, assert_same_tensors, command_line
from tiny_models import make_model

from trainer.errors import UserError
from trainer.flags.common_flags import SFTArguments
from trainer.flags.parse_flags import from_flat
from trainer.flags.rules import refuse
from trainer.optimizers.adamw_8bit import AdamW8bit
from trainer.optimizers.build import build_optimizer
from trainer.optimizers.muon import orthogonalized
from trainer.strategies.deepspeed import DeepspeedStrategy
from trainer.strategies.fsdp2 import FSDP2Strategy
from trainer.strategies.options import StrategyOptions

STEPS, SAVED_AT = 4, 2
# of each number of ranks: the runs, and what goes on from a checkpoint of another layout
RUNS = {
    1: ["deepspeed-z0-1r-mb4-padded-muon"],
    2: [
        "fsdp2-2r-mb4-packed-muon", "deepspeed-z0-2r-mb4-packed-adafactor",
        "fsdp2-2r-mb4-packed-tp2-adamw_8bit", "deepspeed-z0-2r-mb4-padded-adamw_8bit",
        "fsdp2-2r-mb4-padded-tp2-muon", "fsdp2-2r-mb4-padded-adafactor",
    ],
}  # fmt: skip
RESUMED = {
    1: {"deepspeed-z0-1r-mb4-padded-resumed-muon": "fsdp2-2r-mb4-packed-muon"},
    2: {
        "fsdp2-2r-mb4-packed-tp2-resumed-adafactor": "deepspeed-z0-2r-mb4-packed-adafactor",
        "fsdp2-2r-mb4-padded-resumed-adamw_8bit": "fsdp2-2r-mb4-packed-tp2-adamw_8bit",
        "fsdp2-2r-mb4-packed-tp2-resumed-adamw_8bit": "fsdp2-2r-mb4-packed-tp2-adamw_8bit",
    },
}
if FULL:  # `PARITY=full`: the parts of layouts that stand above
    RUNS[1] += ["fsdp2-1r-mb4-packed-adamw_8bit"]
    RUNS[2] += ["fsdp2-2r-mb1-packed-sp2-muon"]
    RUNS[4] = [
        "fsdp2-4r-mb1-padded-tp2-muon",
        "fsdp2-4r-mb1-packed-hsdp2-adafactor",
        "fsdp2-4r-mb1-padded-tp2-adamw_8bit",
    ]
    RESUMED[2]["fsdp2-2r-mb4-packed-resumed-muon"] = "fsdp2-2r-mb4-packed-muon"
    RESUMED[2]["fsdp2-2r-mb1-padded-resumed-adamw_8bit"] = "fsdp2-4r-mb1-padded-tp2-adamw_8bit"
# 2 ranks: what has no plain loop here repeats its own steps bit by bit from a checkpoint
VERIFIED = {
    "fsdp2-2r-mb4-packed-lora-muon": ["--lora_rank", "4", "--tensor_parallel_size", "2"],
    "fsdp2-2r-mb4-packed-seq-adafactor": ["--tensor_parallel_size", "2", "--sequence_parallel"],
    "deepspeed-z0-2r-mb4-packed-bf16-muon": [],
}
NAMES = [name for names in RUNS.values() for name in names]


def flags(name: str, folder, data) -> list[str]:
    line = [*command_line(name, folder, data), "--max_steps", str(STEPS), "--optim", name.rpartition("-")[2]]
    line += ["--tensor_parallel_size", "2"] if "-tp2" in name else []
    line += ["--dp_replicate_size", "2"] if "-hsdp2" in name else []
    return line + (["--ring_attn_size", "2"] if "-sp2" in name else [])


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_data):
    folder = tmp_path_factory.mktemp("optim")
    for optim in ("muon", "adafactor", "adamw_8bit"):
        line = flags(f"reference-{optim}", folder, shared_data)
        code, output = forked(1, str(ROOT / "test/reference.py"), *line)
        assert code == 0, output[-4000:]
    for ranks, names in RUNS.items():
        lines = [[*flags(name, folder, shared_data), "--save_steps", str(SAVED_AT)] for name in names]
        train_many(ranks, lines, folder, timeout=600)
    for ranks, pairs in RESUMED.items():
        lines = [
            [*flags(name, folder, shared_data), "--load_checkpoint", f"{folder}/{source}/checkpoints/step_{SAVED_AT}"]
            for name, source in pairs.items()
        ]
        train_many(ranks, lines, folder, timeout=600)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_fp32_run_equals_the_plain_loop(runs, name):
    reference = runs / f"reference-{name.rpartition('-')[2]}"
    assert len(read_steps(runs / name)) == STEPS
    assert_same_steps(runs / name, reference, 1e-5, 1e-4)
    assert_same_tensors(runs / name, reference, "weights_final", 1e-4)


def test_verify_resume_proves_it(runs, shared_data):
    lines = [[*flags(name, runs, shared_data), *more, "--verify_resume", "2"] for name, more in VERIFIED.items()]
    output = train_many(2, lines, runs, timeout=300)
    assert output.count("verify_resume: ") == len(lines), output[-3000:]


@pytest.mark.parametrize("name, source", [pair for pairs in RESUMED.values() for pair in pairs.items()])
def test_a_checkpoint_goes_on_anywhere(runs, name, source):
    """The rest of the curve of the run that saved it; bitwise where the layout is the same."""
    rows, expected = read_steps(runs / name), read_steps(runs / source)[SAVED_AT:]
    assert [row["step"] for row in rows] == list(range(SAVED_AT + 1, STEPS + 1))
    tolerance = 0 if name.replace("-resumed", "") == source else 1e-5
    assert all(abs(row["loss"] / other["loss"] - 1) <= tolerance for row, other in zip(rows, expected))


def test_another_optimizer_is_refused_at_a_checkpoint(runs, shared_data):
    source = runs / "deepspeed-z0-1r-mb4-padded-muon/checkpoints" / f"step_{SAVED_AT}"
    line = command_line("fsdp2-1r-mb4-padded-other", runs, shared_data)
    code, output = in_fork("-m", "trainer.cli.train_sft", *line, "--load_checkpoint", str(source))
    assert code == 2 and f"--optim: adamw, but {source} was trained with muon" in output


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_matrix_products_do_what_singular_values_say(shape):
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    found, expected = orthogonalized(matrix).double(), svd_orthogonalized(matrix)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert 0.6 < torch.linalg.svdvals(found).median() < 1.3


def test_muon_takes_matrices_of_layers_alone():
    model = make_model("qwen3")
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    groups = build_optimizer("muon", model, **options).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    taken = {names[id(parameter)] for group in groups if group["is_matrix"] for parameter in group["params"]}
    assert taken == {name for name in names.values() if ".layers." in name and name.endswith("_proj.weight")}
    assert sum(len(group["params"]) for group in groups) == len(names)


@pytest.mark.parametrize(
    "strategy, options",
    [
        (DeepspeedStrategy, {}),
        (DeepspeedStrategy, {"zero_stage": 0, "tensor_parallel_size": 2}),
        (FSDP2Strategy, {"adam_offload": True}),
    ],
)
def test_it_is_refused_where_no_matrix_is_at_hand(strategy, options):
    with pytest.raises(UserError, match="--optim"):
        strategy(StrategyOptions(optim="muon", **options))


def test_adafactor_refuses_the_betas_that_it_has_not():
    args = from_flat(SFTArguments, {"optim": "adafactor", "adam_betas": [0.8, 0.9]})
    with pytest.raises(UserError, match=r"--adam_betas 0\.8 0\.9 with --optim adafactor"):
        refuse("train_sft", args)


def test_8_bit_moments_of_cut_weights_are_those_of_whole_ones():
    code, output = forked(4, str(ROOT / "test/optimizers/adamw_8bit_checks.py"), timeout=180)
    assert code == 0 and output.count("8 bits agree") == 4, output[-3000:]


@pytest.mark.parametrize("shape", [(16, 700), (64, 64), (5, 1400)])
def test_8_bit_adamw_is_adamw_with_rounded_moments(shape):
    """Rows of several blocks, gradients over five decades, and columns that have none at first."""
    generator = torch.Generator().manual_seed(0)
    own = torch.nn.Parameter(torch.randn(shape, generator=generator))
    plain = torch.nn.Parameter(own.detach().clone())
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    optimizer = AdamW8bit([{"params": [own], "weight_decay": 0.1, "in_8_bits": True}], **options)
    reference = torch.optim.AdamW([plain], weight_decay=0.1, **options)
    for step in range(12):
        own.grad = torch.randn(shape, generator=generator) * torch.logspace(-4, 1, shape[1])
        own.grad[:, :7] *= step > 5
        plain.grad = own.grad.clone()
        optimizer.step()
        reference.step()
        round_moments(reference.state[plain])
        # a last digit may fall on the other side of a code: a step of lr times the distance of two codes, at most
        assert (own - plain).abs().max() <= 1e-2 * 0.07
        assert (own - plain).norm() <= 1e-5 * plain.norm()
    taken = sum(tensor.nbytes for tensor in optimizer.state[own].values())
    assert taken <= 2.2 * own.numel()  # bytes, where AdamW takes 8
