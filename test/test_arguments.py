"""Every flag does what it says: what is given on the command line or in a config file is what the command sees."""

import re
import typing
from types import SimpleNamespace

import pytest
import yaml

from trainer.errors import UserError
from trainer.flags.common_flags import SFTArguments
from trainer.flags.generating_flags import OnlineDPOArguments
from trainer.flags.kd_flags import KDArguments
from trainer.flags.parse_flags import flags_of, flat, parse_arguments
from trainer.flags.preference_flags import DPOArguments, RMArguments
from trainer.flags.rl_flags import PPOArguments

FIELDS = [field for field, _ in flags_of(SFTArguments)]
HINTS = {field.name: hint for field, hint in flags_of(SFTArguments)}


def parse(*argv: str) -> SimpleNamespace:
    """The flags of train_sft, flat."""
    return SimpleNamespace(**flat(parse_arguments(SFTArguments, "train_sft", list(argv))))


def other_value(field, hints=HINTS):
    """A value of the field's type that is not its default, as given on the command line and as seen by the command."""
    default = field.default
    hint = str(hints[field.name])
    if "Literal" in hint:
        kind = hints[field.name]
        kind = kind if typing.get_origin(kind) is typing.Literal else typing.get_args(kind)[0]  # Optional
        choice = next(value for value in typing.get_args(kind) if value != default)
        return [choice], choice
    if "list[str]" in hint:
        return ["one", "two words"], ["one", "two words"]
    if "list" in hint:
        return ["0.5", "0.75"], [0.5, 0.75]
    if "int" in hint:
        return ["7"], 7
    if "float" in hint:
        return ["0.625"], 0.625
    if field.name.endswith("dataset_flags"):
        return ["[]"], "[]"  # of no set
    assert "str" in hint, hint
    return ["some text"], "some text"


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_flag_reaches_the_command(field, tmp_path):
    flag = f"--{field.name}"
    if HINTS[field.name] is bool:
        assert getattr(parse(flag), field.name) is True
        assert getattr(parse(flag, "--seed", "3"), field.name) is True
        for text, value in (("true", True), ("false", False)):
            assert getattr(parse(flag, text), field.name) is value
            assert getattr(parse(f"{flag}={text}"), field.name) is value
        given, expected = [], True
    else:
        given, expected = other_value(field)
        assert getattr(parse(flag, *given), field.name) == expected
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({field.name: expected}))
    from_file = parse("--config", str(config))
    assert getattr(from_file, field.name) == expected
    default = parse()
    changed = {f.name for f in FIELDS if getattr(from_file, f.name) != getattr(default, f.name)}
    assert changed <= {field.name}  # and nothing else moved


OWN_FIELDS = {
    command: [field for field, _ in flags_of(command) if field.name not in HINTS]
    for command in (RMArguments, DPOArguments, PPOArguments, OnlineDPOArguments, KDArguments)
}


@pytest.mark.parametrize("command", OWN_FIELDS)
def test_flags_of_the_other_commands_reach_them(command, tmp_path):
    """All that train_sft lacks, set together; each keeps its own value, from the command line and from a file."""
    assert OWN_FIELDS[command]
    hints, argv, expected = {field.name: hint for field, hint in flags_of(command)}, [], {}
    for field in OWN_FIELDS[command]:
        given, expected[field.name] = ([], True) if hints[field.name] is bool else other_value(field, hints)
        argv += [f"--{field.name}", *given]
    args, default = (parse_arguments(command, "command", flags) for flags in (argv, []))
    for name, value in expected.items():
        assert flat(args)[name] == value != flat(default)[name], name
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(expected))
    assert parse_arguments(command, "command", ["--config", str(config)]) == args


@pytest.mark.parametrize(
    "field", [field for field in FIELDS if field.metadata["aliases"]], ids=lambda field: field.name
)
def test_aliases_are_the_same_flag(field):
    given, expected = other_value(field)
    for alias in field.metadata["aliases"]:
        assert getattr(parse(f"--{alias}", *given), field.name) == expected


@pytest.mark.parametrize("flag", ["--ref_offload", "--offload_ref"])
def test_the_reference_is_offloaded_by_either_name(flag):
    assert parse_arguments(DPOArguments, "train_dpo", [flag]).preference.ref_offload
    assert parse_arguments(PPOArguments, "train_ppo", [flag]).kl.offload_ref


def test_a_switch_takes_nothing_but_true_and_false():
    with pytest.raises(UserError, match="--no_save"):
        parse("--no_save", "perhaps")


def test_flags_after_a_config_override_it(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("no_save: true\nseed: 5\n")
    args = parse("--config", str(config), "--no_save", "false")
    assert (args.no_save, args.seed) == (False, 5)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("report_to", ["wandb", "mlflow"], "a text, as in report_to: wandb,mlflow"),
        ("system", ["a"], "a text"),
        ("dataset_probs", [0.5, 0.5], "a text, as in dataset_probs: 0.5,0.5"),
        ("limits", "pixels=5", r"a list, as in limits: \[pixels=5\]"),
        ("allow_change", True, r"a list, as in allow_change: \[true\]"),
        ("adam_betas", "0.9,0.95", r"a list of 2, as in adam_betas: \[0.9, 0.95\]"),
        ("adam_betas", 0.9, r"a list of 2, as in adam_betas: \[0.9\]"),
        ("learning_rate", "fast", "a number above 0"),
        ("packing_samples", "maybe", "true or false"),
        ("backend", "ddp", "deepspeed, fsdp2"),
        ("max_steps", 1.5, "an integer above 0"),
        ("adam_betas", ["a", "b"], "a number"),
    ],
)
def test_a_value_of_another_type_is_refused_in_words(tmp_path, name, value, allowed):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({name: value}))
    with pytest.raises(UserError, match=rf"^--{name}: .*\(allowed: .*{allowed}\)$"):
        parse("--config", str(config))


@pytest.mark.parametrize("name", ["output_dir", "pretrain", "dataset", "save_path"])
@pytest.mark.parametrize("variable", ["${OUT}", "$OUT"])
def test_a_variable_that_no_shell_replaced_makes_no_folder(tmp_path, monkeypatch, name, variable):
    monkeypatch.chdir(tmp_path)
    config, path = tmp_path / "config.yaml", f"{variable}/x"
    config.write_text(yaml.safe_dump({name: path}))
    for argv in (["--config", str(config)], [f"--{name}", path]):
        with pytest.raises(
            UserError, match=rf"^--{name}: {re.escape(path)}: {re.escape(variable)} is not replaced here"
        ):
            parse(*argv)
    (tmp_path / variable / "x").mkdir(parents=True)  # a folder may have such a name
    assert getattr(parse("--config", str(config)), name) == path


def test_a_key_twice_in_a_config_is_named(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("seed: 1\nlearning_rate: 0.1\nseed: 2\n")
    with pytest.raises(UserError, match=re.escape(f'the key seed twice in "{config}", line 3')):
        parse("--config", str(config))
    config.write_text("dataset:\n- path: a.jsonl\n  input_key: q\n  input_key: p\n")
    with pytest.raises(UserError, match="the key input_key twice"):
        parse("--config", str(config))


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"- a\n- b\n", "a list"), (b"a: [1\n", "not a YAML file: "), (b"\xfc\x00", "not a YAML file: ")],
)
def test_a_config_that_holds_no_flags_is_named(tmp_path, content, told):
    config = tmp_path / "run.yaml"
    config.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(f"--config {config}: {told}")):
        parse("--config", str(config))
