"""The configurations of a matrix, built in or from a YAML file, and the thresholds that judge them."""

import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path

from trainer.compare.runs.parity import Thresholds
from trainer.errors import UserError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
REFERENCE = "reference"


@dataclass(frozen=True)
class Configuration:
    name: str
    nproc: int
    args: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """One value of an axis: its part of the name, its flags, and its factor in the number of ranks."""

    label: str
    args: tuple[str, ...] = ()
    ranks: int = 1


ZERO = tuple(Choice(f"deepspeed-z{n}", ("--backend", "deepspeed", "--zero_stage", str(n))) for n in range(4))
FSDP2 = Choice("fsdp2", ("--backend", "fsdp2"))
PACKED = (Choice(""), Choice("packed", ("--packing_samples",)))


def _layout(label: str, dp: int = 1, sp: int = 1, tp: int = 1, replicate: int = 1, *more: str) -> Choice:
    sizes = {"--ring_attn_size": sp, "--tensor_parallel_size": tp, "--dp_replicate_size": replicate}
    args = [text for flag, size in sizes.items() if size > 1 for text in (flag, str(size))]
    return Choice(label, (*args, *more, "--micro_train_batch_size", "2"), ranks=dp * sp * tp)


LAYOUTS = (
    _layout("tp2", tp=2),
    _layout("tp4", tp=4),
    _layout("sp2", sp=2),
    _layout("sp4", sp=4),
    _layout("ulysses2", 1, 2, 1, 1, "--sp_mode", "ulysses"),
    _layout("tp2-sp2", sp=2, tp=2),
    _layout("dp2-tp2", dp=2, tp=2),
    _layout("dp2-sp2", dp=2, sp=2),
    _layout("dp2-tp2-sp2", dp=2, sp=2, tp=2),
)
# ZeRO 0 to 2 never gather weights, so hybrid sharding does nothing there; AutoTP has no sequence parallelism
HYBRID = (_layout("hsdp2x2", dp=4, replicate=2), _layout("hsdp2x2-tp2", dp=4, tp=2, replicate=2))
SEQUENCE = (_layout("tp2-seq", 1, 1, 2, 1, "--sequence_parallel"),)

# The full matrix is the sum of these products. A new axis is a tuple here. A new layout is a line above.
PRODUCTS = (
    (
        (*ZERO, FSDP2),
        tuple(Choice(f"{n}r", ranks=n) for n in (1, 2)),
        tuple(Choice(f"mb{n}", ("--micro_train_batch_size", str(n))) for n in (1, 4)),
        PACKED,
    ),
    ((*ZERO[1:], FSDP2), LAYOUTS, PACKED),
    ((ZERO[3], FSDP2), HYBRID, PACKED),
    ((FSDP2,), SEQUENCE, PACKED),
)
QUICK = (
    "fsdp2-1r-mb4", "fsdp2-2r-mb4-packed", "deepspeed-z1-2r-mb1", "deepspeed-z2-2r-mb4-packed",
    "deepspeed-z3-2r-mb4",
)  # fmt: skip


def full_matrix() -> list[Configuration]:
    return [configuration_of(choices) for axes in PRODUCTS for choices in itertools.product(*axes)]


def configuration_of(choices: tuple[Choice, ...]) -> Configuration:
    name = "-".join(choice.label for choice in choices if choice.label)
    args = tuple(arg for choice in choices for arg in choice.args)
    return Configuration(name, math.prod(choice.ranks for choice in choices), args)


def load_matrix(matrix: str, only: str | None = None) -> list[Configuration]:
    """Load `quick`, `full` or a YAML file. `only` keeps the configurations with a name that the pattern matches."""
    if matrix in ("quick", "full"):
        configurations = [c for c in full_matrix() if matrix == "full" or c.name in QUICK]
    else:
        configurations = _read_matrix(Path(matrix))
    if only is None:
        return configurations
    try:
        kept = [c for c in configurations if re.search(only, c.name)]
    except re.error as error:
        raise UserError("--only", f"{only!r} is not a regular expression: {error}") from None
    if not kept:
        raise UserError("--only", f"{only!r} matches no configuration", ", ".join(c.name for c in configurations))
    return kept


def _read_matrix(path: Path) -> list[Configuration]:
    # not needed for --help
    import yaml

    from trainer.flags.parse_flags import read_yaml

    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        raise UserError("--run", f"cannot read {path}", "quick, full, or a YAML file") from None
    except yaml.YAMLError as error:
        raise UserError(str(path), " ".join(f"is not YAML: {error}".split())) from None
    if not isinstance(content, dict) or set(content) != {"configurations"}:
        found = f"top-level keys {sorted(map(str, content))}" if isinstance(content, dict) else "not a mapping"
        raise UserError(str(path), found, "one key, configurations")
    entries = content["configurations"]
    if not isinstance(entries, list) or not entries:
        raise UserError(str(path), "configurations is not a list, or is empty", "a list of {name, nproc, args}")
    configurations = [_parse_entry(f"{path} configuration {n}", entry) for n, entry in enumerate(entries, start=1)]
    _check_names(path, [configuration.name for configuration in configurations])
    return configurations


def _parse_entry(where: str, entry: object) -> Configuration:
    if not isinstance(entry, dict) or set(entry) != {"name", "nproc", "args"}:
        found = f"keys {sorted(map(str, entry))}" if isinstance(entry, dict) else f"{entry!r}"
        raise UserError(where, found, "only the keys name, nproc and args")
    name, nproc, args = entry["name"], entry["nproc"], entry["args"]
    if not isinstance(name, str) or not NAME.fullmatch(name) or name == REFERENCE:
        raise UserError(where, f"name {name!r}", f"letters, digits and . _ - and not {REFERENCE!r}")
    if type(nproc) is not int or nproc < 1:
        raise UserError(where, f"nproc {nproc!r}", "an integer, at least 1")
    if not isinstance(args, list) or any(type(arg) not in (str, int, float) for arg in args):
        raise UserError(where, f"args {args!r}", "a list of strings and numbers")
    args = tuple(str(arg) for arg in args)
    check_args(where, args)
    return Configuration(name, nproc, args)


def _check_names(path: Path, names: list[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(str(path), f"the name {twice[0]!r} occurs twice", "each name once")


def check_args(where: str, argv: tuple[str, ...] | list[str]) -> None:
    """Raise UserError for the flags that the matrix sets."""
    for flag in ("--output_dir", "--parity_dump", "--parity_trace"):
        if any(arg == flag or arg.startswith(f"{flag}=") for arg in argv):
            raise UserError(where, f"holds {flag}", "any other flag; the matrix sets this one for each run")


def given_param_dtype(argv: list[str]) -> str | None:
    """The value of the last --param_dtype in the arguments. None if there is none, or auto."""
    dtype = None
    for i, arg in enumerate(argv):
        if arg == "--param_dtype" and i + 1 < len(argv):
            dtype = argv[i + 1]
        elif arg.startswith("--param_dtype="):
            dtype = arg.partition("=")[2]
    return None if dtype == "auto" else dtype


def matrix_thresholds(dtype: str, loss: float | None, grad_norm: float | None, dump: float | None) -> Thresholds:
    """The given thresholds, with defaults for None. For bf16 and fp16 the default judges only the loss."""
    if dtype in ("bf16", "fp16"):
        return Thresholds(1e-2 if loss is None else loss, grad_norm, dump)
    loss = 1e-5 if loss is None else loss
    return Thresholds(loss, 10 * loss if grad_norm is None else grad_norm, 1e-4 if dump is None else dump)
