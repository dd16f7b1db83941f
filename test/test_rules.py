"""Every row of the table of rules refuses something, and says in one line what, against what, why, and what to do."""

import contextlib
import dataclasses
import itertools
import re
import typing
from types import SimpleNamespace

import pytest

from trainer.flags.parse_flags import flags_of
from trainer.flags.rule import UNKNOWN, Rule, defaults_of, first_broken
from trainer.flags.rules import BACKEND_RULES, COMMANDS, RULES
from trainer.strategies.options import StrategyOptions, excluded_flags

KINDS = {field.name: (field, hint) for command in COMMANDS.values() for field, hint in flags_of(command)}
OTHERS = {  # values that a predicate may look for, besides those that a type gives
    "loss": ["kto", "simpo", "logexp", "dpo"],
    "loss_names": [("dpo",), ("simpo",)],
    "max_logprob_diff": [float("inf"), 0.5],
    "optim": ["adafactor", "muon"],
    "preset": ["opd", "vapo", "grpo", "rloo", "reinforce++", "ppo"],
    "ref_model": ["another"],
    "policy_loss": ["reinforce", "sapo", "gspo"],
    "lr_scheduler": ["constant", "linear"],
    "load_checkpoint": ["latest"],
    "zero_stage": [0, 1, 2, 3],
    "reward_func": ["math", "math,exact_match", "judge"],
    "reward_weights": [[1.0], [1.0, 2.0, 3.0]],
    "eval_temperature": [0.005, 0.7],
    "train_on": ["last", "all"],
    "teacher": ["a", "a,b", "math=a", "http://a"],
    "teacher_weights": [[1.0], [1.0, 2.0, 3.0], [-1.0]],
}


class Asked(SimpleNamespace):
    """All flags and facts, which notes what a predicate reads."""

    def __getattribute__(self, name: str):
        if not name.startswith("_"):
            super().__getattribute__("_read").add(name)
        return super().__getattribute__(name)


def candidates(name: str) -> list:
    """The default of a flag or fact, and some other values."""
    if name in UNKNOWN:
        return [UNKNOWN[name], *OTHERS.get(name, [True, False, 1, 2, 3])]
    field, hint = KINDS[name]
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    if hint is bool:
        return [default, not default]
    if typing.get_origin(hint) is typing.Literal:
        return [default, *(value for value in typing.get_args(hint) if value != default)]
    texts = str(hint)
    found = (
        [1, 2, 0, 4096]
        if "int" in texts
        else [0.5, 0.0, 2.0, 1.0]
        if "float" in texts and "list" not in texts
        else ["x"]
    )
    if "list" in texts:
        found = [[0.5, 0.25], ["x"]]
    return [default, *OTHERS.get(name, found)]


def broken(rule: Rule, flag: str, defaults: dict):
    """Flags and facts with which the rule refuses `flag`, or None."""
    read = {flag}
    for _ in range(6):  # what a predicate reads depends on what it finds
        names = sorted(read)
        for values in itertools.islice(itertools.product(*map(candidates, names)), 20_000):
            chosen = dict(zip(names, values))
            if not rule.uses(flag, chosen, defaults):
                continue
            known = Asked(_read=set(), **{**defaults, **UNKNOWN, **chosen})
            try:
                is_broken = rule.when(known)
            except (TypeError, AttributeError, ZeroDivisionError):  # a value of another type than the flag's
                is_broken = False
            read |= {name for name in vars(known)["_read"] if name in defaults or name in UNKNOWN}
            if is_broken:
                return SimpleNamespace(**{**defaults, **UNKNOWN, **chosen})
        if names == sorted(read):
            break
    return None


OF_FLAGS = {"needs_labels": "reward_func"}  # facts that a flag decides
OF_FLAGS |= dict.fromkeys(("loss_has_reference", "loss_has_smoothing", "loss_has_divergence"), "loss")


def test_a_row_about_some_values_of_its_flag_names_them():
    """`when` does not look at the row's own flag, unless `which` says in words what it looks for."""
    defaults = defaults_of(COMMANDS.values())
    for command, rule in ROWS.values():
        flags, read = set(rule.flags.split()), set()
        own = defaults | (defaults_of([COMMANDS[command]]) if command in COMMANDS else {})
        for _ in range(6):
            before = set(read)
            for values in itertools.islice(itertools.product(*map(candidates, sorted(before | flags))), 3_000):
                known = Asked(_read=set(), **{**own, **UNKNOWN, **dict(zip(sorted(before | flags), values))})
                with contextlib.suppress(TypeError, AttributeError, ZeroDivisionError):
                    rule.when(known)
                read |= vars(known)["_read"] & (own.keys() | UNKNOWN.keys())
            if read == before:
                break
        looks = flags & {OF_FLAGS.get(name, name) for name in read}
        assert bool(looks) == bool(rule.which), f"{rule.flags} {rule.against}: `when` looks at {looks or 'no flag'}"
        assert not (rule.values and (rule.which or len(flags) > 1))
        words = rule.subject().replace(",", "").split()
        assert all(str(value) in words for value in rule.values) and rule.which in rule.subject()
        for value in rule.values:
            known_values = candidates(rule.flags)
            assert value in known_values and value != own[rule.flags], f"{rule.flags} {value}"


def test_losses_with_label_smoothing_are_named():
    from trainer.models.losses.preference_loss import PAIR_LOSSES

    row = next(rule for _, rule in ROWS.values() if rule.flags == "loss" and rule.which)
    assert row.which == " or ".join(name for name, loss in PAIR_LOSSES.items() if loss.has_label_smoothing)


ROWS = {id(rule): (command, rule) for command, rules in [*RULES.items(), *BACKEND_RULES.items()] for rule in rules}


@pytest.mark.parametrize(
    ("command", "rule"),
    ROWS.values(),
    ids=[f"{command}-{rule.flags[:40]}-{rule.against[:40]}" for command, rule in ROWS.values()],
)
def test_a_row_refuses_each_of_its_flags_in_one_line(command, rule):
    defaults = defaults_of(COMMANDS.values())
    if command in COMMANDS:
        defaults |= defaults_of([COMMANDS[command]])
    for flag in rule.flags.split():
        assert flag in defaults, f"no command has --{flag}"
        found = broken(rule, flag, defaults)
        assert found is not None, f"nothing makes --{flag} {rule.against} a refusal"
        line = str(rule.refusal(flag, found))
        assert line.startswith(f"--{flag}") and "\n" not in line
        assert rule.against.startswith(("with ", "without ", "on ", "for ")), rule.against
        assert rule.why and not rule.why.endswith(".") and rule.instead.endswith("."), line


def test_the_options_of_a_strategy_break_the_same_rules():
    from trainer.errors import UserError
    from trainer.strategies import get_strategy

    with pytest.raises(UserError, match=r"--load_in_4bit with --tensor_parallel_size 2: .* Set it to 1, or remove"):
        get_strategy("fsdp2", StrategyOptions(load_in_4bit=True, tensor_parallel_size=2))


@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed"])
@pytest.mark.parametrize("layout", [{}, {"zero_stage": 3}, {"tensor_parallel_size": 2}], ids=str)
def test_what_a_layout_excludes_is_what_it_refuses(backend, layout):
    """`--print_model` and `check` list these flags: each one alone, added to the layout, is refused."""
    base, refused = StrategyOptions(**layout), set()
    values, defaults = dataclasses.asdict(base), dataclasses.asdict(StrategyOptions())
    for name in values.keys() - layout.keys():
        for value in candidates(name):
            added = values | {name: value}
            known = SimpleNamespace(**{**UNKNOWN, **added, "on_cpu": True})
            if first_broken(BACKEND_RULES[backend], added, defaults, known):
                refused.add(f"--{name}")
    subjects = " ".join(line.split(" with")[0] for line in excluded_flags(backend, base, on_cpu=True))
    assert refused and set(re.findall(r"--\w+", subjects)) == refused
