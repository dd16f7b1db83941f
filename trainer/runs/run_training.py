"""The steps that all training commands share, in the order of the calls: parse, check, set up, build, run."""

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

from trainer.errors import UserError
from trainer.flags.common_flags import VisionArguments, parse_arguments

DEMO_DIR = "demo"


def parse_or_demo(arguments_class: type, command: str, argv: list[str], demo: Callable[[], dict]) -> tuple[Any, bool]:
    """Return the arguments, and whether they are for the demo. `demo()` gives its defaults, with bare file names."""
    args = parse_arguments(arguments_class, command, argv)
    if args.pretrain is None and args.dataset is None:
        defaults = demo()
        for name in ("dataset", "eval_dataset", "pretrain"):
            defaults[name] = f"{DEMO_DIR}/{defaults[name]}"
        return parse_arguments(arguments_class, command, argv, defaults), True
    for flag, value in (("--pretrain", args.pretrain), ("--dataset", args.dataset)):
        if value is None:
            raise UserError(flag, "missing", "a path or hub name; without both --pretrain and --dataset, the demo")
    return args, False


def validate_shared(args, eval_metrics: tuple[str, ...]) -> None:
    """Check the shared flags before any rank, data or model is used. Raises UserError.

    `eval_metrics` are the evaluation metrics that may choose the best checkpoint.
    """
    from trainer.optimizers.build import check_scheduler_name, has_min_lr
    from trainer.runs.outputs import check_checkpoint_flags, check_mirrors, saved_models

    if args.sp_mode != "ring" and args.ring_attn_size == 1:
        raise UserError("--sp_mode", f"{args.sp_mode} with --ring_attn_size 1", "--ring_attn_size 2 or more")
    if args.activation_offload and not args.gradient_checkpointing:
        raise UserError("--activation_offload", "without --gradient_checkpointing", "both")
    if args.gradient_checkpointing and args.selective_checkpointing:
        raise UserError("--gradient_checkpointing", "with --selective_checkpointing", "one of them")
    if args.dataset_probs and args.dataset is None:
        raise UserError("--dataset_probs", "without --dataset", "leave it out")
    own = (args.lora_alpha, args.lora_dropout, args.target_modules, args.load_in_4bit, args.lora_experts)
    if args.lora_rank or any(own):
        from trainer.runs.lora_flags import validate_adapter_flags

        validate_adapter_flags(args)
    idle = [
        ("eval_steps eval_split", bool(args.eval_dataset), "--eval_dataset"),
        ("ring_attn_kernel", args.ring_attn_size > 1 and args.sp_mode == "ring", "--ring_attn_size 2, --sp_mode ring"),
        ("wandb_project", args.use_wandb, "--use_wandb"),
        ("save_path certificate", not args.no_save, "without --no_save"),
        ("certificate", not args.verify_resume, "without --verify_resume"),
        ("min_lr_ratio", has_min_lr(args.lr_scheduler), "a scheduler *_with_min_lr, or warmup_stable_decay"),
        ("lr_warmup_ratio", args.lr_scheduler != "constant", "another --lr_scheduler, such as constant_with_warmup"),
    ]
    check_scheduler_name(args.lr_scheduler)
    refuse_idle(args, idle, usual={"lr_warmup_ratio": 0.0})
    check_numbers(args)
    if args.save_path or any(map(os.path.exists, saved_models(args, args.output_dir))):
        from trainer.runs.saved_models import check_saved_models

        check_saved_models(args)
    check_mirrors(args.use_wandb, args.use_tensorboard)
    check_checkpoint_flags(args, eval_metrics=eval_metrics if args.eval_dataset else ())


def check_numbers(args) -> None:
    """Raise UserError for numbers of the right type that torch could not use."""
    for name, value in vars(args).items():
        endless = value == math.inf and name in ("max_norm", "max_ckpt_mem", "save_interval_minutes")
        if isinstance(value, float) and not math.isfinite(value) and not endless:
            raise UserError(f"--{name}", str(value), "a finite number")
    if not all(0 <= beta < 1 for beta in args.adam_betas):
        raise UserError("--adam_betas", " ".join(map(str, args.adam_betas)), "two numbers from 0 to below 1")
    if args.seed >= 2**63:
        raise UserError("--seed", str(args.seed), "an integer below 2**63")


def refuse_idle(args, rules: list[tuple[str, bool, str]], usual: Optional[dict] = None) -> None:
    """Raise UserError for a flag that would do nothing here.

    `rules` are (names of flags, whether they do something, what they need for it). Default values and the values in
    `usual` are never refused.
    """
    flags, defaults = vars(args), vars(type(args)())
    for names, at_work, needed in rules:
        for name in [] if at_work else names.split():
            if flags[name] not in (defaults[name], (usual or {}).get(name)):
                raise UserError(f"--{name}", f"{flags[name]} would do nothing here", needed)


@dataclass
class Setup:
    """The state after `set_up`: process group, tokenizer and attention function are ready."""

    strategy: Any
    folder: str  # of the model
    tokenizer: Any
    attention: str
    sp_group: Any  # None if sequences are not split


def set_up(args, is_demo: bool, vllm: bool = False) -> Setup:
    """Start the strategy, make the demo if it is requested, and load the tokenizer. `vllm` will run in this process."""
    from transformers import masking_utils

    from trainer import strategies
    from trainer.datasets.demos.demo import make_demo
    from trainer.distributed.collectives import rank_0_first
    from trainer.distributed.mesh import validate_batch_sizes
    from trainer.models.model_loading import load_tokenizer, resolve_model_folder
    from trainer.runs.gpu_settings import set_up_gpu

    def strategy_of(flags):
        return strategies.get_strategy(flags.backend, strategies.StrategyOptions.from_flags(vars(flags)))

    # transformers looks at positions for packed rows, and waits for the GPU. `get` finds no tensor in {}: no packed rows.
    masking_utils.find_packed_sequence_indices = {}.get  # cu_seqlens tell our attention of packed rows
    if args.layout == "auto":
        from trainer.runs.chosen_layout import set_layout

        set_layout(args, is_demo, lambda flags: (strategy_of(flags), choose_attention(flags)))
    strategy = strategy_of(args)
    if not args.max_tokens_per_micro_batch:
        validate_batch_sizes(args.train_batch_size, args.micro_train_batch_size, strategy.sizes.dp)
    if args.activation_offload and strategy.device.type == "cpu":
        raise UserError("--activation_offload", "on CPU: activations are already in host memory", "CUDA")
    attention = choose_attention(args)
    if args.cpu_matmul != "auto" and strategy.device.type != "cpu":
        raise UserError("--cpu_matmul", f"{args.cpu_matmul} on {strategy.device.type}", "--device cpu")
    strategy.setup_distributed()
    if strategy.device.type == "cpu":
        use_cores(args, strategy)
    else:
        set_up_gpu(args.adam_offload, vllm)
    if is_demo:
        strategy.print(f"neither --pretrain nor --dataset given: training on the embedded demo in {DEMO_DIR}/")
        rank_0_first(lambda: make_demo(DEMO_DIR))
    folder, sp_group = rank_0_first(lambda: resolve_model_folder(args.pretrain)), None
    if args.packing_samples or args.ring_attn_size > 1:
        from trainer.models.attention.choice import setup_attention

        kind = {"packed": args.packing_samples, "sp_mode": args.sp_mode, "ring_attn_kernel": args.ring_attn_kernel}
        kind |= {"param_dtype": args.param_dtype, "trust_remote_code": args.trust_remote_code}
        attention, sp_group = setup_attention(strategy, folder, attention, **kind)
    tokenizer = load_tokenizer(folder, args.trust_remote_code)
    if args.tokenizer_chat_template:
        from trainer.datasets.conversations.templates import load_chat_template

        load_chat_template(args.tokenizer_chat_template, tokenizer)
    return Setup(strategy, folder, tokenizer, attention, sp_group)


def choose_attention(args) -> str:
    """The name of the attention function. Without packing and splitting, it is a function of transformers."""
    wanted = "sdpa" if args.attn_implementation == "auto" else args.attn_implementation
    if not (args.packing_samples or args.ring_attn_size > 1 or wanted.startswith("flash")):
        return wanted
    from trainer.models.attention.choice import resolve_attention

    kind = {"param_dtype": args.param_dtype, "device": args.device}
    return resolve_attention(wanted, args.packing_samples, args.ring_attn_size > 1, **kind)


def use_cores(args, strategy) -> None:
    """On CPU: choose the library for matrix products. With several ranks, print a hint if cores stay idle."""
    from trainer.models.cpu_matmul import choose_cpu_matmul
    from trainer.runs.cpu_cores import core_hint

    choose_cpu_matmul(args.cpu_matmul)
    if strategy.sizes.world_size > 1 and (hint := core_hint()):
        strategy.print(hint)


def load_flag_rows(args, names: str, split: str, flag: str):
    """The rows of --dataset or --eval_dataset."""
    from trainer.datasets.files.loading import load_rows

    probs = args.dataset_probs if flag == "--dataset" else None
    return load_rows(names, flag=flag, split=split, probs=probs, max_samples=args.max_samples, seed=args.seed)


def image_run_of(args, setup: Setup, *sets):
    """What rows with images change in this run. None if no set has images, and no flag is about them."""
    asks = any(vars(args)[name] != usual for name, usual in vars(VisionArguments()).items())
    if not asks and not any("images" in found.column_names for found in sets if found):
        return None
    from trainer.runs.image_runs import ImageRun

    return ImageRun(args, setup, *sets)


def load_sets(args, setup: Setup, load_data: Callable, render: Callable) -> tuple[Any, Any, Any]:
    """Return (training samples, evaluation samples or None, training ledger). Print ledgers and first sample."""
    from trainer.distributed.collectives import rank_0_first

    strategy, tokenizer = setup.strategy, setup.tokenizer
    rows = functools.partial(load_data, args, tokenizer)
    samples, ledger = rank_0_first(lambda: rows(args.dataset, args.dataset_split, "--dataset"), in_caches=True)
    strategy.print(f"training data: {ledger.summary()}")
    strategy.print(f"first sample, loss tokens in [[ ]]:\n{render(samples[0], tokenizer)}")
    if not args.eval_dataset:
        return samples, None, ledger
    evaluated = args.eval_dataset, args.eval_split, "--eval_dataset"
    eval_samples, eval_ledger = rank_0_first(lambda: rows(*evaluated), in_caches=True)
    strategy.print(f"evaluation data: {eval_ledger.summary()}")
    return samples, eval_samples, ledger


def build_loader(
    args, setup: Setup, samples, collate: Callable, *, shuffle: bool, sequences_per_sample: int = 1, **options
):
    """Build the strategy's loader from the flags under "Batches". `options` go to `setup_dataloader` too."""
    capacity = args.max_tokens_per_micro_batch or args.micro_train_batch_size * args.max_len * sequences_per_sample
    if "images" in getattr(samples, "column_names", ()):  # a stream has none
        from trainer.datasets.images.image_batches import WORKERS

        options["num_workers"] = WORKERS
    return setup.strategy.setup_dataloader(
        samples,
        functools.partial(collate, pad_token_id=setup.tokenizer.pad_token_id),
        batch_size=args.train_batch_size,
        micro_batch_size=args.micro_train_batch_size,
        max_tokens=args.max_tokens_per_micro_batch,
        packed_capacity=capacity if args.packing_samples else None,
        shuffle=shuffle,
        **options,
    )


def reading(args, trained: bool = True):
    """The context to read weights in. Those that a checkpoint will replace are not read: not those below an adapter."""
    if trained and args.load_checkpoint and not args.lora_rank:
        from trainer.runs.resumed_weights import left_to_checkpoint

        return left_to_checkpoint(args)
    return contextlib.nullcontext()


def load_model(args, setup: Setup, folder: str, auto_class, flag: str = "--pretrain", trained: bool = True):
    """Load the model of `folder`, which `flag` asked for, and switch its dropout off."""
    from trainer.model_folders.model_folder import check_weights, find_weights
    from trainer.models.model_loading import disable_dropout, has_sdpa

    find_weights(folder, flag)
    attention = setup.attention
    if attention == "sdpa" and not has_sdpa(folder, auto_class, args.trust_remote_code):
        if args.attn_implementation == "sdpa":
            raise UserError("--attn_implementation", f"sdpa, which the model of {folder} does not have", "auto, eager")
        attention = "eager"
        setup.strategy.print(f"attention of {folder}: eager, since transformers has no sdpa for this model")
    if setup.attention not in ("sdpa", "eager"):
        from trainer.models.attention.choice import validate_model

        validate_model(folder, args.trust_remote_code, setup.attention, args.packing_samples, auto_class)
    options = {"attn_implementation": attention, "trust_remote_code": args.trust_remote_code}
    try:
        with reading(args, trained):
            model = setup.strategy.load_model(folder, auto_class, **options)
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        from trainer.models.folder_faults import load_fault

        raise load_fault(folder, auto_class, args.trust_remote_code, flag, error) from error
    model.name_or_path = folder  # as from_pretrained does; a saved model has the names of this folder
    if len(setup.tokenizer) > model.config.get_text_config().vocab_size:
        from trainer.models.folder_faults import check_tokens

        check_tokens(setup.tokenizer, model.config.get_text_config().vocab_size, folder, flag)
    if unread := check_weights(model, folder, flag):
        names = ", ".join(unread[:3]) + ", ..." * (len(unread) > 3)
        setup.strategy.print(f"warning: {len(unread)} tensors of {folder} are not part of the trained model: {names}")
    disable_dropout(model)
    rope = str(getattr(model.config.get_text_config(), "rope_parameters", ""))
    changes = (args.gradient_checkpointing, args.selective_checkpointing, args.packing_samples, setup.sp_group)
    if any(changes) or args.tensor_parallel_size > 1 or "longrope" in rope or "dynamic" in rope:
        from trainer.runs.layer_flags import change_layers

        change_layers(args, model, setup.sp_group, setup.strategy)
    return model


def prepare_training(args, strategy, model, total_steps: int, tower_lr: Optional[float] = None):
    """Return (model, optimizer, scheduler), prepared by the strategy. `tower_lr`: peak rate of the vision tower."""
    from trainer.distributed.collectives import wait_for_all
    from trainer.optimizers.build import build_scheduler

    if args.print_model and strategy.is_rank_0():
        from trainer.planning.model_page import model_page

        layout = {"tp": args.tensor_parallel_size, "sp": args.ring_attn_size, "use_hf_tp_plan": args.use_hf_tp_plan}
        layout |= {"sequence_parallel": args.sequence_parallel, "trust_remote_code": args.trust_remote_code}
        print(model_page(model, strategy.param_dtype, **layout), flush=True)
    if args.compile:
        from trainer.models.layers.compiled import compile_layers

        compile_layers(model)
    rates = {"lr": args.learning_rate, "betas": args.adam_betas, "weight_decay": args.weight_decay}
    optimizer = strategy.create_optimizer(model, **rates)
    if tower_lr:
        from trainer.models.layers.vision import set_learning_rate

        set_learning_rate(optimizer, model, tower_lr)
    ends = {"warmup_ratio": args.lr_warmup_ratio, "min_lr_ratio": args.min_lr_ratio}
    scheduler = build_scheduler(args.lr_scheduler, optimizer, total_steps=total_steps, **ends)
    with reading(args):
        prepared = strategy.prepare((model, optimizer, scheduler))
    wait_for_all()  # some ranks read their weights later than others; NCCL would wait ten minutes only
    if args.heartbeat_timeout:
        from trainer.distributed.heartbeat import watch

        watch(prepared[0], args.heartbeat_timeout)
    return prepared


@dataclass
class Run:
    """What one run reads and where it writes."""

    command: str
    output_dir: str
    ledger: Any  # of the training data
    loader: Any
    eval_loader: Any  # None without evaluation data
    tower_lr: Optional[float] = None  # peak learning rate of the vision tower, if it has its own
    hooks: Any = None  # LoopHooks of the training loop, or None


def open_run(args, setup: Setup, command: str) -> str:
    """Open the run folder (see `outputs.open_output_dir`), and check that other output folders are writable."""
    from trainer.runs.outputs import make_writable, open_output_dir, saved_models

    folder = open_output_dir(setup.strategy, args.output_dir, command, args.overwrite, args.load_checkpoint is not None)
    if setup.strategy.is_rank_0():
        for path in saved_models(args, folder):
            make_writable("--save_path", os.path.dirname(os.path.realpath(path)))
        if args.parity_dump:
            make_writable("--parity_dump", args.parity_dump)
    return folder


def train_and_save(args, setup: Setup, model, loss_fn: Callable, run: Run, at_end: Optional[Callable] = None) -> None:
    """Prepare the model, resume if requested, train, and save. `at_end(model)` runs before the save."""
    from trainer.metrics import flops_per_token, full_size
    from trainer.runs.outputs import save_policy, start_metrics
    from trainer.training.checkpointing import Checkpoints, Trained
    from trainer.training.loop import train

    strategy, ledger = setup.strategy, run.ledger
    if args.lora_rank:
        from trainer.runs.lora_flags import add_adapter_of_flags

        add_adapter_of_flags(args, strategy, model)
    # a frozen weight needs no gradient: 4 FLOPs per token instead of 6
    num_params = sum(full_size(p) * (1 if p.requires_grad else 2 / 3) for p in model.parameters())
    flops = flops_per_token(model.config, num_params, ledger["num_tokens"] / ledger["num_samples"])
    total_steps = args.max_steps or args.max_epochs * len(run.loader)
    model, optimizer, scheduler = prepare_training(args, strategy, model, total_steps, run.tower_lr)
    trained = Trained(strategy, model, optimizer, scheduler, run.loader, setup.tokenizer)
    checkpoints = Checkpoints(run.output_dir, trained, save_policy(args), dataclasses.asdict(args))
    progress = checkpoints.resume(args.load_checkpoint)
    if args.verify_resume:
        from trainer.training.verify_resume import verify_resume

        strategy.print(verify_resume(checkpoints, progress, loss_fn, args.verify_resume))
        return
    facts = {"data": ledger.counts, "total_steps": total_steps}
    metrics = start_metrics(strategy, args, run.output_dir, progress, **facts)
    with metrics or contextlib.nullcontext():
        options, states = loop_options(args, total_steps), {"checkpoints": checkpoints, "progress": progress}
        states |= {"metrics": metrics, "flops_per_token": flops, "eval_loader": run.eval_loader}
        states |= {"hooks": run.hooks} if run.hooks else {}
        train(strategy, model, optimizer, scheduler, run.loader, loss_fn, options, **states)
        if at_end:
            at_end(model)
        if not args.no_save:
            from trainer.runs.model_card import save_model

            save_model(args, setup, model, run, progress)
        if metrics:
            metrics.event("end", steps=total_steps)
    if metrics and args.certificate:
        from trainer.runs.certify import certify_run

        certify_run(args, run.output_dir, run.command, setup.folder, run.loader.fingerprint(), strategy.device)


def loop_options(args, total_steps: int):
    """The flags that the training loop reads. Each has the name of its option."""
    from trainer.training.loop import LoopOptions

    flags = vars(args) | {"total_steps": total_steps}
    return LoopOptions(**{field.name: flags[field.name] for field in dataclasses.fields(LoopOptions)})
