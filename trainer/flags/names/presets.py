"""--preset of `train_ppo`: the algorithm of a paper as default values of flags. Sizes, lengths and rates stay the user's.

docs/algorithms.md has the table with the papers and their equations.
"""

from collections.abc import Callable

from trainer.comma_separated import models_in, named_in, names_in
from trainer.errors import UserError
from trainer.flags.groups import flat
from trainer.flags.rl_flags import PPOArguments

OF_KL = ("use_kl_loss", "kl_in_score", "kl_estimator")  # they need --init_kl_coef above 0
GROUP = {"advantage_estimator": "group_norm", "policy_loss": "ppo"}
PRESETS: dict[str, dict] = {
    # the KL weight is that of section 4.2
    "grpo": {**GROUP, "loss_agg": "sequence", "eps_clip": 0.2, "init_kl_coef": 0.04}
    | {"use_kl_loss": True, "kl_estimator": "k3"},
    "dr_grpo": {"advantage_estimator": "dr_grpo", "policy_loss": "ppo", "loss_agg": "fixed_length", "eps_clip": 0.2},
    "dapo": {**GROUP, "loss_agg": "token", "eps_clip": 0.2, "eps_clip_high": 0.28}
    | {"dynamic_filtering": True, "mask_truncated": True, "overlong_penalty_factor": 1.0},
    "gspo": {**GROUP, "policy_loss": "gspo", "loss_agg": "sequence", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
    # a weight from 0 to 5. The paper has no lower bound and does not tell the upper one: 5 is that of ScaleRL
    "cispo": {**GROUP, "policy_loss": "cispo", "loss_agg": "token", "eps_clip": 1.0, "eps_clip_high": 4.0},
    # without the parts of its recipe that are no flags: see docs/algorithms.md
    "scalerl": {"advantage_estimator": "scalerl", "policy_loss": "cispo", "loss_agg": "prompt"}
    | {"eps_clip": 1.0, "eps_clip_high": 4.0},
    # GSPO's ratio, and sums of tokens instead of means; the bounds are those of TRL's page of papers
    "luspo": {**GROUP, "policy_loss": "gspo", "loss_agg": "sum", "eps_clip": 2e-3, "eps_clip_high": 2.5e-3},
    "sapo": {**GROUP, "policy_loss": "sapo", "loss_agg": "sequence"},
    "maxrl": {"advantage_estimator": "maxrl", "policy_loss": "ppo", "loss_agg": "token", "eps_clip": 0.2},
    "rloo": {"advantage_estimator": "rloo", "policy_loss": "reinforce", "loss_agg": "sum", "init_kl_coef": 0.03}
    | {"kl_in_score": True, "kl_estimator": "k1"},
    # the KL weight is that of OpenRLHF's examples/scripts/train_reinforce_ray_hybrid_engine.sh
    "reinforce++": {"advantage_estimator": "reinforce", "gamma": 1.0, "policy_loss": "ppo", "loss_agg": "token"}
    | {"eps_clip": 0.2, "init_kl_coef": 1e-4, "kl_estimator": "k1"},
    "vapo": {"advantage_estimator": "gae", "gamma": 1.0, "lambd": 1.0, "policy_lambd_alpha": 0.05, "policy_loss": "ppo"}
    | {"loss_agg": "token", "eps_clip": 0.2, "eps_clip_high": 0.28, "positive_nll_coef": 0.1},
    # it needs --teacher, which sets the rest; the loss of the post's code is the ratio without a clip
    "opd": {"policy_loss": "ppo", "loss_agg": "token", "eps_clip": 1.0, "eps_clip_high": 1e9},
    "ppo": {"advantage_estimator": "gae", "gamma": 1.0, "lambd": 0.95, "policy_loss": "ppo", "loss_agg": "token"}
    | {"eps_clip": 0.2, "value_clip": 0.2, "init_kl_coef": 0.02, "kl_estimator": "k1"},
}
DAPO_BUFFER = 5  # 4096 of 20480 tokens, section 4.1


def recipe(args: PPOArguments) -> dict:
    """The flags that --preset sets, with their values, among them DAPO's buffer as a share of --generate_max_len."""
    chosen = PRESETS[args.advantage.preset]
    return (
        chosen | {"overlong_buffer_len": args.rollout.generate_max_len // DAPO_BUFFER}
        if args.advantage.preset == "dapo"
        else chosen
    )


def with_preset(parse: Callable, argv: list[str]) -> tuple[PPOArguments, bool]:
    """`parse(argv)`, with the flags of --preset in front: what the user gives, in a file too, overrides them.

    A user who gives --init_kl_coef 0 gives up the other flags of the KL too. Raises UserError for an unknown preset.
    """
    args, is_demo = parse(argv)
    if args.advantage.preset is None:
        return args, is_demo
    if args.advantage.preset not in PRESETS:
        raise UserError("--preset", args.advantage.preset, ", ".join(PRESETS))
    values = recipe(args)
    args, is_demo = parse([*_as_flags(values), *argv])
    if not args.kl.init_kl_coef:
        values = {name: value for name, value in values.items() if name not in OF_KL}
        args, is_demo = parse([*_as_flags(values), *argv])
    return args, is_demo


def with_teacher(args: PPOArguments, is_demo: bool, parse: Callable, argv: list[str]) -> tuple[PPOArguments, bool]:
    """The arguments with what --teacher sets: the reference is the teacher, or several, and its KL has the weight 1.

    Advantages are this KL alone, unless --advantage_estimator or a preset adds those of scores. Flags that the user gives win.
    """
    if args.kl.teacher is None:
        return args, is_demo
    if args.kl.teacher_key:
        named_in(
            args.kl.teacher,
            "--teacher",
            "NAME=MODEL, or several of different names (comma-separated), for --teacher_key",
        )
    elif not names_in(args.kl.teacher):
        raise UserError("--teacher", args.kl.teacher, "a model, or several (comma-separated)")
    chosen, models = recipe(args) if args.advantage.preset else {}, models_in(args.kl.teacher, args.kl.teacher_key)
    values = {"advantage_estimator": "distill"} | chosen | {"ref_model": ",".join(models), "init_kl_coef": 1.0}
    return parse([*_as_flags(values), *argv])


def _as_flags(values: dict) -> list[str]:
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}
    return [t for name, text in texts.items() for t in (f"--{name}", text)]


def describe_preset(args: PPOArguments) -> str:
    """The line that says what the preset sets, and which of its flags the user gave another value."""
    values, found = recipe(args), flat(args)
    kept = [f"--{name} {value}" for name, value in values.items() if found[name] == value]
    given = [f"--{name} {found[name]} instead of {value}" for name, value in values.items() if found[name] != value]
    return f"--preset {args.advantage.preset}: {' '.join(kept)}" + (f"; given: {', '.join(given)}" if given else "")
