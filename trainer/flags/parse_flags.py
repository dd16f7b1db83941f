"""Parse flags: groups of flags are dataclasses, a command is a dataclass of groups, and its flags stay flat.

Nothing here imports torch, so `--help` and a wrong flag answer at once.
"""

import dataclasses
import math
import os
import re
import typing
from collections.abc import Iterable
from types import NoneType
from typing import Any, Optional

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter
from jsonargparse import typing as restricted

from trainer.comma_separated import names_in
from trainer.errors import LEFT_OUT, UserError, has_left_out
from trainer.flags.groups import arg, flags_of, flat, from_flat, group, groups_of, set_names, with_flags
from trainer.flags.names.repeats import refuse_repeated
from trainer.flags.names.set_entries import spread
from trainer.flags.names.suggestions import GIVEN, leaves, listed, no_such_flags, suggestion, value_of
from trainer.help_texts import example_of, typed, with_default
from trainer.metrics import counted

__all__ = ["arg", "flags_of", "flat", "from_flat", "group", "groups_of", "with_flags"]  # the rooms above take them here
DEMO_DIR = "demo"
TAKEN_BACK = {"reward_func", "env"}  # an empty value takes back that of a file or a preset
# a path each, or several with commas; --dataset finds its files itself
PATHS = {
    "pretrain", "lora_adapter", "ref_model", "teacher", "reward_pretrain", "critic_pretrain", "output_dir", "save_path", "load_checkpoint",
    "rollouts_from", "sync_folder", "parity_dump", "parity_trace", "reward_func", "env", "judge_rubric", "tokenizer_chat_template", "sign_key",
    "api_key", "engine_api_key", "remote_rm_api_key", "teacher_api_key",
}  # fmt: skip
TEXTS_OR_PATHS = {"tokenizer_chat_template", "judge_rubric"}  # a text may have a $
ALLOWED = {
    "PositiveInt": "an integer above 0",
    "NonNegativeInt": "an integer of 0 or more",
    "PositiveFloat": "a number above 0",
    "NonNegativeFloat": "a number of 0 or more",
    "ClosedUnitInterval": "a number from 0 to 1",
    "OpenUnitInterval": "a number above 0 and below 1",
    set_names: "a text, or in a file of --config a list of sets",
    str: "a text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
}

# of single flags, where more than the values of its type helps
ALLOWED_OF = {"device": "auto, cpu, cuda; CUDA_VISIBLE_DEVICES=0,1 before the command chooses GPUs"}


class _Help(DefaultHelpFormatter):
    """Each flag with its text and its default, without the names of types."""

    def _get_help_string(self, action) -> str:
        return with_default(action.help or "", action.default)


class _Parser(ArgumentParser):
    """Its help begins with the example of the command."""

    def format_help(self) -> str:
        return example_of(self.prog) + super().format_help()


def _add_field(shown, field: dataclasses.Field, hint) -> None:
    flags = [f"--{name}" for name in (field.name, *field.metadata["aliases"])]
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    common = {"default": default, "help": field.metadata["help"], **field.metadata["kwargs"]}
    if hint is bool:
        # jsonargparse's ActionYesNo would read --no_save as "save: no" and leave it False
        shown.add_argument(*flags, type=bool, nargs="?", const=True, **common)
        return
    kind = field.metadata["type"] or hint
    if kind == Optional[str]:
        kind = str  # else jsonargparse reads the text as YAML; a template "### Question: {}" is a comment there
    if isinstance(kind, str):
        kind = getattr(restricted, kind)
        kind = Optional[kind] if default is None else kind
    if typing.get_origin(inner := _without_none(kind)) is not typing.Literal:
        common = {"metavar": _placeholder(field.name, inner), **common}
    shown.add_argument(*flags, type=kind, **common)


def _without_none(kind: Any) -> Any:
    """X of Optional[X]."""
    inner = [one for one in typing.get_args(kind) if one is not type(None)]
    return inner[0] if typing.get_origin(kind) is typing.Union and len(inner) == 1 else kind


def _placeholder(name: str, kind: Any) -> str:
    """What stands for the value of a flag in its help: N for a number, else the last word of its name."""
    return "N" if isinstance(kind, type) and issubclass(kind, (int, float)) else name.split("_")[-1].upper()


def build_parser(groups: Iterable[type], command: str, description: Optional[str]):
    """Build the parser of a command: one help group per group of flags, and flat flags."""
    parser = _Parser(
        prog=command,
        formatter_class=_Help,
        usage=f"{typed(command)} [--config FILE] [--flag value ...]",
        description=description,
        exit_on_error=False,
        allow_abbrev=False,
        default_env=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with flags; flags after it override the file")
    printed = next(action for action in parser._actions if "--print_config" in action.option_strings)
    printed.metavar, printed.help = "", "print all flags as a file for --config, and end"
    for kind in groups:
        shown, hints = parser.add_argument_group(kind.__doc__.splitlines()[0]), typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            _add_field(shown, field, hints[field.name])
    return parser


def parse_arguments(arguments_class: type, command: str, argv: list[str], defaults: Optional[dict] = None):
    """Parse `argv` into an `arguments_class` instance, a dataclass of groups. `defaults` replaces field defaults.

    Raises: UserError for anything that is not accepted, in one line. For a name that is no flag it says what to write instead.
    """
    values = _parse(list(groups_of(arguments_class).values()), command, arguments_class.__doc__, argv, defaults or {})
    return from_flat(arguments_class, values)


def parse_group(kind: type, command: str, argv: list[str]):
    """Parse `argv` into one group of flags, which is all that a small command has. Raises like `parse_arguments`."""
    refuse_repeated(argv)
    return kind(**_parse([kind], command, kind.__doc__, argv, {}))


def _parse(groups: list[type], command: str, description: Optional[str], argv: list[str], defaults: dict) -> dict:
    parser = build_parser(groups, command, description)
    parser.set_defaults(defaults)
    fields = {field.name: field for kind in groups for field in dataclasses.fields(kind)}
    _check_config_files(argv, command, fields)
    try:
        namespace = parser.parse_args(argv)
    except Exception as error:  # jsonargparse raises several types, all for wrong user input
        raise _as_user_error(re.sub(r"\s+", " ", str(error)).strip(), command, fields) from None
    values = {name: _plain(vars(namespace)[name]) for name in fields}
    hints = {name: hint for kind in groups for name, hint in typing.get_type_hints(kind).items()}
    _refuse_empty(values, fields, hints)
    values |= {name: _at_home(value) for name, value in values.items() if name in PATHS and isinstance(value, str)}
    values = spread(values, command, {name: (field, hints[name]) for name, field in fields.items()})
    _refuse_variables(values)
    return values


def _refuse_variables(values: dict[str, Any]) -> None:
    """Raise UserError for a path with ${NAME} or $NAME. A shell replaces it; in quotes and in a file nobody does."""
    for name in sorted(values.keys() & {*PATHS - TEXTS_OR_PATHS, "dataset", "eval_dataset"}):
        variable = re.search(r"\$\{\w+\}|\$[A-Za-z_]\w*", values[name] or "")
        if variable and not any(map(os.path.lexists, names_in(values[name]))):
            found = f"{values[name]}: {variable[0]} is not replaced here, only by a shell"
            raise UserError(f"--{name}", found, "the path itself")


def _refuse_empty(values: dict[str, Any], fields: dict[str, dataclasses.Field], hints: dict[str, Any]) -> None:
    """Raise UserError for `FLAG: null` in a file where a flag always has a value, and for a path without a letter."""
    for name, value in values.items():
        if value is None and fields[name].default is not None and NoneType not in typing.get_args(hints[name]):
            allowed = _allowed(fields[name].metadata["type"] or hints[name])
            raise UserError(f"--{name}", "null", f"{allowed}; or no {name} at all, for its default")
        if name in PATHS - TAKEN_BACK and isinstance(value, str) and not value.strip():
            raise UserError(f"--{name}", repr(value), "a name or a path; or leave the flag out")


def _check_config_files(argv: list[str], command: str, fields: dict[str, dataclasses.Field]) -> None:
    """Raise UserError for a file of --config that is no YAML of flags, or for all keys that are no flags, with their cures."""
    known = {"config", *fields, *(alias for field in fields.values() for alias in field.metadata["aliases"])}
    for place, text in enumerate(argv):
        name, is_joined, path = text.partition("=")
        if name != "--config" or not (is_joined or place + 1 < len(argv)):
            continue
        path = path if is_joined else argv[place + 1]
        try:
            with open(path) as file:
                values = read_yaml(file)
        except OSError:
            continue  # the parser says that there is no such file
        except (ValueError, yaml.YAMLError) as error:
            found = " ".join(str(error).replace('"<unicode string>", ', "").split())
            raise UserError(f"--config {path}", f"not a YAML file: {found}"[:400], "lines FLAG: VALUE") from None
        if not isinstance(values, (dict, NoneType)):
            raise UserError(f"--config {path}", f"a {type(values).__name__}", "lines FLAG: VALUE")
        unknown = list(leaves(values or {}, known))
        if unknown:
            what = counted(len(unknown), "key that is no flag", "keys that are no flags")
            pairs = listed(
                [key for key, _ in unknown], [suggestion(key, command, known, value) for key, value in unknown]
            )
            raise UserError(f"--config {path}", f"{what} of {command}: {pairs}")
        for field in fields.values():
            for name in {field.name, *field.metadata["aliases"]} & (values or {}).keys():
                _check_form(name, values[name], field)


def _check_form(name: str, value: Any, field: dataclasses.Field) -> None:
    """Raise UserError for one value in a file where a flag takes several, or several where it takes one text."""
    many = field.metadata["kwargs"].get("nargs")
    if many not in (None, "?") and not isinstance(value, (list, dict, NoneType)):
        given = re.split(r"[,\s]+", value.strip()) if isinstance(value, str) and name != "stop" else [value]
        if field.metadata["type"] is float:
            given = [yaml.safe_load(one) if isinstance(one, str) else one for one in given]
        form = yaml.safe_dump(given, default_flow_style=True, width=math.inf).strip()
        raise UserError(
            f"--{name}", repr(value), f"a list{f' of {many}' * isinstance(many, int)}, as in {name}: {form}"
        )
    is_text = field.metadata["type"] is None and field.type in (str, Optional[str])
    if is_text and isinstance(value, list) and "comma-separated" in field.metadata["help"]:
        raise UserError(f"--{name}", repr(value), f"a text, as in {name}: {','.join(map(str, value))}")


class _UniqueKeys(yaml.SafeLoader):
    def construct_mapping(self, node, deep=False):
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value} twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(source) -> Any:
    """The value in a text or an open file. Raises YAMLError, also for a key that stands twice in one mapping."""
    return yaml.load(source, _UniqueKeys)


def parse_or_demo(arguments_class: type, command: str, argv: list[str], demo: dict) -> tuple[Any, bool]:
    """Return the arguments, and whether they are for the demo, whose flags are `demo`, with bare file names."""
    args = parse_arguments(arguments_class, command, argv)
    if args.model.pretrain is None and args.data.dataset is None:
        files = {name: f"{DEMO_DIR}/{demo[name]}" for name in ("dataset", "eval_dataset", "pretrain")}
        return parse_arguments(arguments_class, command, argv, demo | files), True
    check_given(args, ("pretrain", "dataset"), "; without both --pretrain and --dataset, the demo")
    return args, False


def check_given(args: Any, names: Iterable[str], more: str = "") -> None:
    """Raise UserError for the first of these flags without a value. `more` follows what it may be."""
    flags = flat(args)
    if missing := next((name for name in names if flags[name] is None), None):
        raise UserError(f"--{missing}", "missing", f"a path or hub name{more}")


def check_numbers(flags: dict[str, Any]) -> None:
    """Raise UserError for numbers of the right type that torch could not use. `flags` are flat."""
    for name, value in flags.items():
        endless = value == math.inf and name in (
            "max_norm",
            "max_ckpt_mem",
            "save_interval_minutes",
            "max_logprob_diff",
        )
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number) and not endless:
                raise UserError(f"--{name}", str(number), "a finite number")
    if not all(0 <= beta < 1 for beta in flags["adam_betas"]):
        raise UserError("--adam_betas", " ".join(map(str, flags["adam_betas"])), "two numbers from 0 to below 1")
    if flags["seed"] >= 2**63:
        raise UserError("--seed", str(flags["seed"]), "an integer below 2**63")


def check_port(port: int, lowest: int = 0) -> None:
    """Raise UserError for a --port that no machine has."""
    if not lowest <= port <= 65535:
        raise UserError("--port", str(port), f"a port from {lowest} to 65535")


def check_secrets(flags: dict[str, Any]) -> None:
    """Raise UserError for an address whose secret config.yaml does not have. `flags` are flat."""
    for name, value in flags.items():
        if has_left_out(value):
            found = f"{value}: a run writes {LEFT_OUT} in place of a secret"
            raise UserError(f"--{name}", found, instead="Give the flag with the whole address.")


def _plain(value):
    """Turn a number of one of jsonargparse's restricted types into a plain number, as YAML and JSON need it."""
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return value


def _at_home(paths: str) -> str:
    """Comma-separated paths, or NAME=PATH, with `~/` as a shell has it. In `--flag=~/x` and in a file no shell replaces it."""
    return re.sub(r"(?:^|(?<=[,=])|(?<=, ))~(?=/)", lambda _: os.path.expanduser("~"), paths)


def _as_user_error(message: str, command: str, fields: dict[str, dataclasses.Field]) -> UserError:
    """Turn jsonargparse's message into one line with the flag, what was found and what is allowed."""
    if unknown := re.search(r"unrecognized arguments: (.*)|Option '([^']+)' is not accepted", message):
        words = (unknown.group(1) or unknown.group(2)).split()
        named = {word.partition("=")[0]: value_of(words, place) for place, word in enumerate(words) if word[0] == "-"}
        if not named and "=" in words[0]:  # as hydra has flags
            named = dict(word.split("=", 1) for word in words if "=" in word)
        names = list(named) or words[:1]
        if names[0].endswith((".yaml", ".yml")):
            return UserError(names[0], "a file without a flag", instead=f"Did you mean --config {names[0]}?")
        return no_such_flags({name: named.get(name, GIVEN) for name in names}, command, fields)
    named = re.search(r'Parser key "([^"]+)"(?: element \d+)?: ?(.*)|argument --(\w+)[^:]*: (.*)', message)
    if not named:
        return UserError("arguments", message)
    name, detail = named.group(1) or named.group(3), named.group(2) or named.group(4)
    value = re.search(
        r"(?:Got|Given) value: (.*)$|base 10: (.*?)(?: -|$)|to float: (.*?)(?: -|$)|: (\S+) does not conform", detail
    )
    field = fields.get(name)
    if not (value and field):
        return UserError(f"--{name}", detail)
    allowed = ALLOWED_OF.get(name) or _allowed(field.metadata["type"] or field.type)
    return UserError(f"--{name}", next(filter(None, value.groups())), allowed)


def _allowed(kind: Any) -> str:
    """The values of a type in words: "a text", "auto, bf16, fp16", "a list of texts"."""
    if isinstance(kind, str) or not typing.get_args(kind):
        return ALLOWED.get(kind) or getattr(kind, "__name__", str(kind))
    inner = [one for one in typing.get_args(kind) if one is not type(None)]
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(map(str, inner))
    words = " or ".join(map(_allowed, inner))
    return f"a list: each is {words}" if typing.get_origin(kind) is list else words
