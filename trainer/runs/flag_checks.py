"""Checks of the flags of a run that need no torch, from the cheapest on: before ranks start, before libraries load."""

import importlib.util
import os
from typing import Optional

from trainer.checkpoints.checkpoint_store import LATEST, checkpoints_to_load
from trainer.checkpoints.run_identity import check_ended
from trainer.comma_separated import names_in, names_to_check
from trainer.datasets.files.set_names import check_files, names_on_hub
from trainer.datasets.text_flags import check_text_flags
from trainer.distributed.mesh_sizes import default_micro_batch_size, validate_batch_sizes
from trainer.errors import UserError, one_line, without_secrets
from trainer.flags.common_flags import SCHEDULES, LoraArguments, ModelArguments, OutputArguments
from trainer.flags.names.loss_names import TABLES, check_loss_names
from trainer.flags.parse_flags import check_numbers, check_secrets, flat
from trainer.flags.rule import knowledge
from trainer.flags.rules import COMMANDS, refuse
from trainer.limits import raise_limits, read_model_config
from trainer.metrics import counted
from trainer.model_folders.adapter_folder import adapter_here, base_folder, is_adapter, read_adapter
from trainer.model_folders.folder_names import check_on_hub, only_on_hub
from trainer.runs import output_folders
from trainer.runs.start_line import check_device, resolve_dtype
from trainer.strategies import refuse_options
from trainer.strategies.options import StrategyOptions

# peak learning rates by command: (all weights, LoRA), as papers and other trainers have them
OF_LABELS, OF_PAIRS, OF_REWARDS = (5e-6, 2e-4), (5e-7, 5e-6), (1e-6, 1e-5)
RATES = {"train_sft": OF_LABELS, "train_rm": OF_LABELS, "train_kd": OF_LABELS, "train_dpo": OF_PAIRS}
RATES |= {"train_dpo --online": OF_PAIRS, "train_ppo": OF_REWARDS}
# they name folders of models
MODEL_FLAGS = ("pretrain", "lora_adapter", "ref_model", "reward_pretrain", "critic_pretrain", "teacher")
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
    check_device(args.layout.device)
    args.model.param_dtype = resolve_dtype(args.model.param_dtype, args.layout.device)
    start_from_adapter(args.model, args.lora)
    args.optimizer.learning_rate = rate_of(command, args.optimizer.learning_rate, args.lora.lora_rank)
    refuse(command, args, is_demo=is_demo, **facts)
    if command in TABLES:
        check_loss_names(command, flat(args)[TABLES[command][0].removeprefix("--")])
    check_text_flags(args.data)
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
    output_folders.check_best_metric(flags.best_metric_key, eval_metrics)
    check_layout(args)
    check_outputs(args)
    check_hub(args.output)
    output_folders.check_trackers(args.output)  # it may import a tracker, which takes a second


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

    Sets --micro_train_batch_size if no flag did.
    """
    flags, layout, batch = flat(args), args.layout, args.batch
    options, is_auto = StrategyOptions.from_flags(flags), layout.layout == "auto"
    if not is_auto:
        refuse_options(layout.backend, options)
    sizes, samples = options.mesh_sizes(), batch.train_batch_size  # with auto, dp is all ranks
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
    output_folders.check_run_folder(output.output_dir, {name: vars(flags)[name] for name in SOURCE_FLAGS})
    saved = output_folders.saved_models(output, output.output_dir, flags.ema_beta is not None)
    output_folders.check_saved_models(output, saved, {name: vars(flags)[name] for name in MODEL_FLAGS})


def check_hub(flags: OutputArguments) -> None:
    """Raise UserError for a --hub_model_id that no repository can have."""
    if flags.hub_model_id is None:
        return
    from huggingface_hub.utils import HFValidationError, validate_repo_id  # only who pushes waits for it

    try:
        validate_repo_id(flags.hub_model_id)
    except HFValidationError as error:
        raise UserError("--hub_model_id", one_line(error), "OWNER/NAME") from None


def check_files_of(args, is_demo: bool = False) -> None:
    """Raise UserError for a run folder in use, absent files, folders without a model, or texts beyond its positions.

    What this machine can tell comes first: an answer of the hub takes up to ten seconds.
    """
    flags, output = knowledge(args, COMMANDS.values()), args.output
    if output.output_dir:
        resumes = args.checkpoint.load_checkpoint is not None
        output_folders.check_free(output.output_dir, output.overwrite, resumes)
    if args.checkpoint.load_checkpoint is not None:
        checkpoints_to_load(os.path.join(output.output_dir or "", "checkpoints"), args.checkpoint.load_checkpoint)
    if args.checkpoint.load_checkpoint == LATEST and not args.checkpoint.verify_resume:
        saved = output_folders.saved_models(output, output.output_dir, flags.ema_beta is not None)
        check_ended(output.output_dir or "", without_secrets(flat(args)), saved)
    output_folders.check_rights(output.output_dir or "runs")
    if is_demo:
        return
    for name in ("dataset", "eval_dataset"):
        check_files(vars(flags)[name], f"--{name}")
    models = [(name, f"--{flag}") for flag in MODEL_FLAGS for name in names_to_check(vars(flags)[flag])]
    to_ask = [(name, flag, "model") for name, flag in models if only_on_hub(name, flag)]
    to_ask += [
        (s, f"--{flag}", "dataset") for flag in ("dataset", "eval_dataset") for s in names_on_hub(vars(flags)[flag])
    ]
    if "rollout" in vars(args):
        check_length(args)
    for question in to_ask:
        check_on_hub(*question)


def check_length(args) -> None:
    """Raise UserError for texts that are longer than the positions of a model in a local folder."""
    try:
        config = read_model_config(args.model.pretrain)
        limit = {**config, **(config.get("text_config") or {})}.get("max_position_embeddings")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, UserError):
        return  # a name on the hub; or the reader of the model says what is wrong with it
    refuse_length(args, limit)


def refuse_length(args, limit: Optional[int]) -> None:
    """Raise UserError if a prompt and its response may have more tokens than the `limit` of a model. None: no limit."""
    prompt, response = args.prompts.prompt_max_len, args.rollout.generate_max_len
    if limit and prompt + response > limit:
        found = f"{prompt} + {counted(response, 'token')}, more than the model's {counted(limit, 'position')}"
        raise UserError("--prompt_max_len + --generate_max_len", found, f"up to {limit} together")
