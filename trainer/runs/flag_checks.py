"""Checks of the flags of a run that need no torch, from the cheapest on: before ranks start, before libraries load."""

import importlib.util
import os
from types import SimpleNamespace
from typing import Optional

from trainer.checkpoints.checkpoint_store import LATEST, checkpoints_to_load, find_damage
from trainer.checkpoints.run_identity import check_allowed, check_ended
from trainer.comma_separated import addresses_in, named_models, names_in, names_to_check
from trainer.datasets.files.set_names import check_files, names_on_hub
from trainer.datasets.text_flags import check_input_template, check_template_file, parse_probs, read_arguments
from trainer.distributed.mesh_sizes import check_expert_ranks, default_micro_batch_size, validate_batch_sizes
from trainer.errors import UserError, one_line
from trainer.flags.common_flags import SCHEDULES, DataArguments, LoraArguments, ModelArguments, OutputArguments
from trainer.flags.groups import options_of_flags, public_flags
from trainer.flags.names.loss_names import TABLES, check_loss_names
from trainer.flags.parse_flags import check_numbers, check_secrets, flat
from trainer.flags.rule import knowledge
from trainer.flags.rules import COMMANDS, refuse
from trainer.limits import positions_of, raise_limits
from trainer.metrics import counted
from trainer.mirrors import TRACKERS, check_wandb
from trainer.model_folders.adapter_folder import adapter_here, base_folder, is_adapter, read_adapter
from trainer.model_folders.folder_names import check_on_hub, only_on_hub
from trainer.runs import output_folders
from trainer.runs.start_line import check_device, check_ranks_given, resolve_dtype
from trainer.strategies import refuse_options
from trainer.strategies.options import StrategyOptions

# peak learning rates by command: (all weights, LoRA), as papers and other trainers have them
OF_LABELS, OF_PAIRS, OF_REWARDS = (5e-6, 2e-4), (5e-7, 5e-6), (1e-6, 1e-5)
RATES = {"train_sft": OF_LABELS, "train_rm": OF_LABELS, "train_kd": OF_LABELS, "train_dpo": OF_PAIRS}
RATES |= {"train_dpo --online": OF_PAIRS, "train_ppo": OF_REWARDS}
# they name folders of models
MODEL_FLAGS = ("pretrain", "lora_adapter", "teacher", "ref_model", "reward_pretrain", "critic_pretrain")
SOURCE_FLAGS = (*MODEL_FLAGS, "dataset", "eval_dataset")


def rate_of(command: str, learning_rate: Optional[float], lora_rank: Optional[int]) -> float:
    """The peak learning rate: the flag's value, or without one that of the method."""
    return RATES[command][lora_rank is not None] if learning_rate is None else learning_rate


def check_flags(command: str, args, eval_metrics: tuple[str, ...], is_demo: bool = False, **facts) -> None:
    """Raise UserError for flags that no run could have, before any rank, data or model is used.

    Sets --param_dtype auto, the --learning_rate of the method, --micro_train_batch_size, the --best_metric_key that other flags need, and what
    follows from --pretrain ADAPTER.

    `facts` are those of `rules.refuse`. `eval_metrics` may choose the best checkpoint.
    """
    check_ranks_given()
    check_device(args.layout.device)
    args.model.param_dtype = resolve_dtype(args.model.param_dtype, args.layout.device)
    start_from_adapter(args.model, args.lora)
    args.optimizer.learning_rate = rate_of(command, args.optimizer.learning_rate, args.lora.lora_rank)
    refuse(command, args, is_demo=is_demo, **facts)
    if command in TABLES:
        check_loss_names(command, flat(args)[TABLES[command][0].removeprefix("--")])
    check_texts(args.data)
    check_numbers(flat(args))
    raise_limits(args.data.limits or ())
    check_secrets(flat(args))
    if args.optimizer.lr_scheduler not in SCHEDULES:
        raise UserError("--lr_scheduler", args.optimizer.lr_scheduler, ", ".join(SCHEDULES))
    check_packages(args)
    check_adapter(args.lora)
    flags = args.checkpoint
    if flags.load_best_model_at_end or flags.early_stopping_patience:
        flags.best_metric_key = flags.best_metric_key or eval_metrics[0]
    if flags.best_metric_key and flags.best_metric_key not in eval_metrics:
        found = f"{flags.best_metric_key}, which no evaluation gives"
        raise UserError("--best_metric_key", found, ", ".join(eval_metrics))
    check_layout(args)
    check_outputs(args)
    check_hub(args.output.hub_model_id)
    check_trackers(args.output)  # it may import a tracker, which takes a second


def start_from_adapter(model: ModelArguments, lora: LoraArguments) -> None:
    """Put the base model of --pretrain ADAPTER in its place, and set the flags that the adapter decides.

    Raises UserError for an adapter that is not usable, and for flags that contradict it.
    """
    if is_adapter(adapter_here(model.pretrain)):
        if lora.lora_adapter:
            raise UserError("--pretrain", f"{model.pretrain} is an adapter, too", "the base model of --lora_adapter")
        lora.lora_adapter = adapter_here(model.pretrain)
        model.pretrain = base_folder(lora.lora_adapter, "--pretrain")
    if lora.lora_adapter is None:
        return
    lora.lora_adapter = adapter_here(lora.lora_adapter)
    facts = read_adapter(lora.lora_adapter, "--lora_adapter")
    if lora.merge_adapter:
        return
    names = facts.target_modules if isinstance(facts.target_modules, tuple) else None  # no flag is a regular expression
    given = tuple(sorted(names_in(lora.target_modules))) if lora.target_modules else None
    pairs = {
        "lora_rank": (lora.lora_rank, facts.rank),
        "lora_alpha": (lora.lora_alpha, facts.alpha),
        "target_modules": (given, names),
        "lora_experts": (lora.lora_experts or None, facts.has_experts),
        "use_dora": (lora.use_dora or None, facts.use_dora),
        "use_rslora": (lora.use_rslora or None, facts.use_rslora),
    }
    for name, (wanted, held) in pairs.items():
        if wanted is not None and wanted != held:
            shown = held if held is not None else facts.target_modules
            shown = ",".join(shown) if isinstance(shown, tuple) else shown
            found = f"{vars(lora)[name]}, but {lora.lora_adapter} has {shown}"
            raise UserError(f"--{name}", found, instead=f"Leave out --{name}: the adapter decides it.")
    lora.lora_rank, lora.lora_experts = facts.rank, facts.has_experts
    lora.use_dora, lora.use_rslora = facts.use_dora, facts.use_rslora
    lora.lora_alpha = facts.alpha if isinstance(facts.alpha, int) else None
    lora.target_modules = ",".join(names) if names else None


def check_texts(flags: DataArguments) -> None:
    """Raise UserError for values that no tokenizer and no rows make right."""
    check_input_template(flags.input_template)
    read_arguments(flags.template_args)
    check_template_file(flags.tokenizer_chat_template)
    if flags.dataset_probs is not None and flags.dataset:
        parse_probs(flags.dataset_probs, len(names_in(flags.dataset)))


def check_packages(args) -> None:
    """Raise UserError if a flag needs a package that is not installed."""
    needed = {
        "--lora_rank": ("peft", "lora", args.lora.lora_rank),
        "--load_in_4bit": ("bitsandbytes", "qlora", args.lora.load_in_4bit),
        "--fp8": ("torchao", "fp8", args.model.fp8),
    }
    for flag, (package, extra, is_used) in needed.items():
        if is_used and importlib.util.find_spec(package) is None:
            raise UserError(flag, f"{package} is not installed", f"pip install -e '.[{extra}]'")


def check_adapter(flags: LoraArguments) -> None:
    """Raise UserError for values that no adapter can have."""
    if flags.lora_dropout == 1:
        raise UserError("--lora_dropout", "1, which drops everything", "a number of 0 or more, below 1")
    if flags.target_modules is not None and not names_in(flags.target_modules):
        raise UserError("--target_modules", repr(flags.target_modules), "comma-separated names of layers")


def check_layout(args) -> None:
    """Raise UserError for flags that the backend refuses, or that do not fit the number of ranks.

    Sets --micro_train_batch_size if no flag said how large a micro-batch is.
    """
    layout, batch, options = args.layout, args.batch, options_of_flags(StrategyOptions, args)
    is_auto = layout.layout == "auto"
    if not is_auto:
        refuse_options(layout.backend, options)
    sizes, samples = options.mesh_sizes(), batch.train_batch_size  # with auto, dp is all ranks
    if not is_auto:
        check_expert_ranks(layout.expert_parallel_size, sizes)
    if not batch.max_tokens_per_micro_batch:
        batch.micro_train_batch_size = batch.micro_train_batch_size or default_micro_batch_size(samples, sizes.dp)
    if is_auto:
        return
    if layout.exact:  # each sample is a micro-batch, whatever the flags say
        validate_batch_sizes(batch.train_batch_size, 1, sizes.dp)
    elif not batch.max_tokens_per_micro_batch:
        validate_batch_sizes(batch.train_batch_size, batch.micro_train_batch_size, sizes.dp)


def check_outputs(args) -> None:
    """Raise UserError if the folder of a trained model holds anything but a model to replace."""
    flags, output = knowledge(args, COMMANDS.values()), args.output
    output_folders.check_run_folder(output.output_dir, named_sources(flags, SOURCE_FLAGS))
    saved, places = saved_models(flags, output.output_dir), (output.save_path, output.output_dir, output.overwrite)
    output_folders.check_saved_models(saved, named_sources(flags, MODEL_FLAGS), *places)


def named_sources(flags: SimpleNamespace, names: tuple[str, ...]) -> dict[str, Optional[str]]:
    """{flag: what it names, comma-separated}. With --teacher_key, --ref_model has the teachers without NAME=."""
    found = {name: vars(flags)[name] for name in names}
    return found | ({"teacher": flags.ref_model} if flags.teacher_key else {})


def models_of(arguments: dict) -> dict[str, str]:
    """{flag, with the name or number of one of several models: the model} of all flags that name models."""
    found: dict[str, str] = {}
    for flag in MODEL_FLAGS:
        found |= named_models(flag, arguments.get(flag), arguments.get("teacher_key") if flag == "teacher" else None)
    return found


def saved_models(flags: SimpleNamespace, output_dir: Optional[str]) -> list[str]:
    """The folder of the trained model, from the flags or under `output_dir`; a second one for the average of --ema_beta."""
    if flags.no_save or not (flags.save_path or output_dir):
        return []
    path = (flags.save_path or os.path.join(output_dir, "model")).rstrip("/") or "/"
    return [path, f"{path}_ema"] if flags.ema_beta is not None else [path]


def trackers_of(output: OutputArguments) -> tuple[str, ...]:
    """The names of the trackers that a run uses, from --report_to, --use_wandb and --use_tensorboard."""
    named = [] if output.report_to == "none" else names_in(output.report_to)
    also = {"wandb": output.use_wandb, "tensorboard": output.use_tensorboard}
    return tuple(dict.fromkeys([*named, *(name for name, is_used in also.items() if is_used)]))


def check_trackers(output: OutputArguments) -> None:
    """Raise UserError for a name that is no tracker, or for a package that is not installed."""
    for name in trackers_of(output):
        if name not in TRACKERS:
            raise UserError("--report_to", repr(name), f"{', '.join(TRACKERS)} (comma-separated), or none")
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--report_to {name}", f"{name} is not installed", f"pip install -e '.[{name}]'")
        if name == "wandb" and int(os.environ.get("RANK", 0)) == 0:
            check_wandb()


def check_hub(name: Optional[str]) -> None:
    """Raise UserError for a --hub_model_id that no repository can have."""
    if name is None:
        return
    from huggingface_hub.utils import HFValidationError, validate_repo_id  # only who pushes waits for it

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError("--hub_model_id", one_line(error), "OWNER/NAME") from None


def _check_checkpoint(root: str, wanted: str) -> None:
    """Raise UserError for a --load_checkpoint that names none, or one whose files are not all there. Hashes come with its load."""
    folders = checkpoints_to_load(root, wanted)
    if wanted != LATEST and (damage := find_damage(*folders, by_size=True)):
        raise UserError("--load_checkpoint", f"{folders[0]} is damaged: {damage}")


def check_files_of(args, is_demo: bool = False) -> None:
    """Raise UserError for a run folder in use, absent files, folders without a model, or texts beyond its positions.

    What this machine can tell comes first: an answer of the hub takes up to ten seconds.
    """
    flags, output = knowledge(args, COMMANDS.values()), args.output
    if output.output_dir:
        resumes = args.checkpoint.load_checkpoint is not None
        output_folders.check_free(output.output_dir, output.overwrite, resumes)
    if args.checkpoint.load_checkpoint is not None:
        _check_checkpoint(os.path.join(output.output_dir or "", "checkpoints"), args.checkpoint.load_checkpoint)
    check_allowed(args.checkpoint.allow_change or (), type(args))
    if args.checkpoint.load_checkpoint == LATEST and not args.checkpoint.verify_resume:
        check_ended(output.output_dir or "", public_flags(args), saved_models(flags, output.output_dir))
    output_folders.check_rights(output.output_dir or "runs")
    if is_demo:
        return
    for name in ("dataset", "eval_dataset"):
        check_files(vars(flags)[name], f"--{name}")
    named = named_sources(flags, MODEL_FLAGS)
    models = [(name, f"--{flag}") for flag, value in named.items() for name in names_to_check(value)]
    models = [(name, flag) for name, flag in models if flag != "--teacher" or not addresses_in(name)]
    to_ask = [(name, flag, "model") for name, flag in models if only_on_hub(name, flag)]
    to_ask += [
        (s, f"--{flag}", "dataset") for flag in ("dataset", "eval_dataset") for s in names_on_hub(vars(flags)[flag])
    ]
    if "rollout" in vars(args):
        check_length(args)
    for question in to_ask:
        check_on_hub(*question)


def check_length(args) -> None:
    """Raise UserError for texts that are longer than the positions of a model in a local folder: policy, reward models, critic."""
    others = {f"--reward_pretrain {name}": name for name in names_in(args.scores.reward_pretrain)}
    if "critic" in vars(args) and args.critic.critic_pretrain:
        others["--critic_pretrain"] = args.critic.critic_pretrain
    for whose, folder in {"the model": args.model.pretrain, **others}.items():
        if folder:
            refuse_length(args, positions_of(folder), whose)


def refuse_length(args, limit: Optional[int], whose: str = "the model") -> None:
    """Raise UserError if a prompt and its response may have more tokens than the `limit` of a model. None: no limit."""
    prompt, response = args.prompts.prompt_max_len, args.rollout.generate_max_len
    if limit and prompt + response > limit:
        found = f"{prompt} + {counted(response, 'token')}, more than {whose}'s {counted(limit, 'position')}"
        raise UserError("--prompt_max_len + --generate_max_len", found, f"up to {limit} together")
