"""One training run on fixed data, from flags to a saved model. `train` shows its order."""

import contextlib
import dataclasses
import functools
from collections.abc import Sized

from trainer.datasets.batches.packing import collate_packed, collate_padded
from trainer.datasets.files.image_files import has_images
from trainer.datasets.images.image_batches import WORKERS
from trainer.datasets.samples.bounds import Bounds
from trainer.errors import UserError
from trainer.flags.common_flags import EpochArguments, LengthArguments
from trainer.flags.groups import options_of_flags
from trainer.flags.rules import refuse
from trainer.metrics import counted, flops_per_token, full_size
from trainer.models.model_bounds import bounds_of
from trainer.runs import outputs
from trainer.runs.feature import apply
from trainer.runs.feature_list import FEATURES
from trainer.runs.flag_checks import check_flags
from trainer.runs.run import Method, Run
from trainer.runs.run_data import build_loader, load_sets, note_long_samples, note_small_data
from trainer.runs.run_models import shard_model
from trainer.runs.run_record import identity_of
from trainer.runs.run_setup import set_up
from trainer.training.checkpointing import Checkpoints, Trained
from trainer.training.loop import LoopOptions
from trainer.training.loop import train as run_loop
from trainer.training.stop_request import ENDING, StopRequest
from trainer.training.verify_resume import verify_resume


def train(args, method: Method, is_demo: bool = False) -> None:
    """One run, in the order of its parts: flags, strategy, data, model, features, optimizer, loop, save."""
    run, features = Run(method=method, args=args), (*FEATURES, *method.features)
    # the door has done so; a program may call `train` itself
    check_flags(method.command, args, method.eval_metrics, is_demo=is_demo, **method.facts)
    apply(features, run, "before_setup")
    start(run, is_demo)
    args, setup, strategy = run.args, run.setup, run.setup.strategy

    apply(features, run, "before_data")
    sets = load_sets(args.data, args.batch.seed, setup, run.load_data, method.render, bool(run.flags.streaming))
    run.samples, run.eval_samples, run.ledger = sets
    refuse(method.command, args, has_images=run.has_images, no_images=not run.has_images, **method.facts)
    apply(features, run, "with_data")
    note_small_data(strategy, "--train_batch_size", args.batch.train_batch_size, run.samples, "samples")
    note_long_samples(strategy, args.batch.max_tokens_per_micro_batch, run.samples)
    run.loader = run.build_loader(run.samples, shuffle=not args.batch.no_shuffle)
    if run.eval_samples:
        run.eval_loader = loader_of(run, run.eval_samples, shuffle=False)

    run.open()
    run.model = run.load(method.model_folder(run), adapter=run.merged_adapter)
    apply(features, run, "with_model")
    run.loss_fn = method.make_loss(run)
    apply(features, run, "with_loss")

    flops = model_flops(run.model, run.ledger)
    run.total_steps = args.batch.max_steps or args.batch.max_epochs * len(run.loader)
    groups, tower_lr = (args.model, args.optimizer, args.layout), run.flags.vision_learning_rate
    run.model, optimizer, scheduler = shard_model(*groups, setup, run.model, run.total_steps, tower_lr)

    trained = Trained(strategy, run.model, optimizer, scheduler, run.loader, setup.tokenizer)
    policy, every = outputs.save_policy(args.checkpoint), steps_by_epoch(args.epochs, run.loader)
    policy = dataclasses.replace(policy, save_steps=every["save_steps"] or policy.save_steps)
    checkpoints = run.checkpoints = Checkpoints(run.output_dir, trained, policy, identity_of(run, args))
    run.progress = checkpoints.resume(args.checkpoint.load_checkpoint, run.total_steps)
    if args.checkpoint.verify_resume:
        strategy.print(verify_resume(checkpoints, run.progress, run.loss_fn, args.checkpoint.verify_resume))
        return

    facts = {"data": run.ledger.counts, "total_steps": run.total_steps}
    metrics = outputs.start_metrics(strategy, args, run.output_dir, checkpoints, **facts)
    with contextlib.ExitStack() as ending:
        with metrics or contextlib.nullcontext():
            options = options_of_flags(LoopOptions, args, total_steps=run.total_steps)
            options = dataclasses.replace(options, eval_steps=every["eval_steps"] or options.eval_steps)
            states = {"checkpoints": checkpoints, "progress": run.progress}
            states |= {"metrics": metrics, "flops_per_token": flops, "eval_loader": run.eval_loader, "hooks": run.hooks}
            run_loop(strategy, run.model, optimizer, scheduler, run.loader, run.loss_fn, options, **states)
            ending.enter_context(StopRequest(ENDING))
            method.after_training(run)
            steps = run.progress.step
            apply(features, run, "before_save")
            save(run)
            if metrics:
                metrics.event("end", steps=steps)
        apply(features, run, "at_end")


def steps_by_epoch(flags: EpochArguments, batches_of_epoch: Sized) -> dict[str, int | None]:
    """The steps between two evaluations and two checkpoints that the flags by epoch say; None without such a flag."""
    counts = {"eval_steps": flags.evals_per_epoch, "save_steps": flags.saves_per_epoch}
    return {name: count and -(-len(batches_of_epoch) // count) for name, count in counts.items()}


def start(run: Run, is_demo: bool) -> None:
    """Set the run up: the strategy, the tokenizer, and what reads and collates the data of its method."""
    run.setup = setup = set_up(run.method.command, run.args, longest=run.args.length.max_len, is_demo=is_demo)
    check_max_len(run.args.length.max_len, bounds_of(setup.folder, setup.trust_remote_code))
    run.load_data = functools.partial(run.method.load_data, run.args, setup.tokenizer)
    run.collate_rows = collate_packed if setup.is_packed else collate_padded
    run.auto_class = run.method.auto_class
    run.build_loader = functools.partial(loader_of, run)


def check_max_len(max_len: int, bounds: Bounds) -> None:
    """Raise UserError, before rows are tokenized, for a --max_len beyond learned positions. With its default, the rows decide."""
    if bounds.learned and bounds.positions < max_len != LengthArguments.max_len:
        found = f"{counted(max_len, 'token')}, more than the model's {counted(bounds.positions, 'position')}"
        raise UserError("--max_len", found, f"up to {bounds.positions}")


def loader_of(run: Run, samples, *, shuffle: bool):
    """The strategy's loader of a set that is in memory or on disk."""
    collate, options = run.method.collate(run.collate_rows, run.setup.is_packed), dict(run.method.loader_options)
    if has_images(samples):
        options["num_workers"] = WORKERS
    return build_loader(run.args.batch, run.setup, samples, collate, shuffle=shuffle, **options)


def model_flops(model, ledger) -> float:
    """FLOPs per token. A frozen weight needs no gradient: 4 FLOPs per token instead of 6."""
    num_params = sum(full_size(p) * (1 if p.requires_grad else 2 / 3) for p in model.parameters())
    return flops_per_token(model.config, num_params, ledger["num_tokens"] / ledger["num_samples"])


def save(run: Run) -> None:
    """Write the trained model, unless --no_save is given."""
    for path in run.saved_models(run.output_dir):
        facts = (run.method.command, run.args, run.progress, run.ledger, run.output_dir)
        outputs.save_model(run.setup.strategy, run.model, run.setup.tokenizer, path, *facts)
