"""`train_rm`: train a reward model on pairs of answers, and save it as a sequence classifier with one label.

torchrun --nproc_per_node 2 -m trainer.cli.train_rm --backend fsdp2 --pretrain MODEL --dataset pairs.jsonl ...
"""

import os

from trainer.datasets.demos.demo_flags import RM_DEFAULTS
from trainer.entry import quiet_libraries, run_command
from trainer.errors import UserError
from trainer.flags.preference_flags import RMArguments
from trainer.runs import run_training
from trainer.runs.preference_runs import build_pair_loader, load_pairs, validate_pairs

COMMAND = "train_rm"
EVAL_METRICS = ("eval_loss", "eval_accuracy", "eval_margin")


def demo_defaults() -> dict:
    return {**RM_DEFAULTS, "dataset": "pairs.jsonl", "eval_dataset": "pairs_eval.jsonl", "pretrain": "model"}


def parse(argv: list[str]) -> tuple[RMArguments, bool]:
    """Return the arguments, and whether they are for the embedded demo."""
    return run_training.parse_or_demo(RMArguments, COMMAND, argv, demo_defaults)


def validate(args: RMArguments) -> None:
    from trainer.models.losses.preference_loss import REWARD_LOSSES

    if args.loss not in REWARD_LOSSES:
        raise UserError("--loss", args.loss, ", ".join(REWARD_LOSSES))
    validate_pairs(args, EVAL_METRICS)
    if args.margin_key and args.loss != "sigmoid":
        raise UserError("--margin_key", f"with --loss {args.loss}", "--loss sigmoid")
    if args.sequence_parallel:
        raise UserError("--sequence_parallel", "with train_rm: its head scores whole sequences", "leave it out")


def load_data(args: RMArguments, tokenizer, names: str, split: str, flag: str):
    return load_pairs(args, tokenizer, names, split, flag, args.margin_key)


def run(argv: list[str]) -> None:
    args, is_demo = parse(argv)
    quiet_libraries()

    from transformers import AutoModelForSequenceClassification

    from trainer.datasets.samples.preference import render_pair
    from trainer.distributed.collectives import rank_0_alone
    from trainer.methods.rm import evaluation_scores, make_reward_loss
    from trainer.model_folders.model_folder import unwrapped
    from trainer.models.reward import make_initial_reward_model, return_token_scores
    from trainer.reports.score_plot import plot_scores

    validate(args)
    setup = run_training.set_up(args, is_demo)
    strategy = setup.strategy
    pairs, eval_pairs, ledger = run_training.load_sets(args, setup, load_data, render_pair)
    image_run = run_training.image_run_of(args, setup, pairs, eval_pairs)
    rows_of = image_run.collate if image_run else None
    loader = build_pair_loader(args, setup, pairs, shuffle=not args.no_shuffle, rows_of=rows_of)
    eval_loader = eval_pairs and build_pair_loader(args, setup, eval_pairs, shuffle=False, rows_of=rows_of)
    output_dir = run_training.open_run(args, setup, COMMAND)
    initial = os.path.join(output_dir, "initial")
    rank_0_alone(
        lambda: make_initial_reward_model(
            setup.folder, initial, args.seed, args.trust_remote_code, args.value_head_prefix
        )
    )
    model = run_training.load_model(args, setup, initial, AutoModelForSequenceClassification)
    if image_run:
        image_run.use(model)
    return_token_scores(model, args.compute_fp32_loss)

    def at_end(model) -> None:
        """Write statistics of the scores into the config, and a plot of them into the run folder."""
        if not eval_loader:
            return
        scores = evaluation_scores(strategy, model, eval_loader, eval_pairs, setup.sp_group)
        config = unwrapped(model).config
        config.reward_mean, config.reward_std = scores.mean().item(), scores.std(correction=0).item()
        if strategy.is_rank_0():
            plot_scores(*scores.unbind(1), os.path.join(output_dir, "reward_histogram.png"))

    loss_fn = make_reward_loss(args.loss, setup.sp_group, args.center_rewards_coef)
    run_facts = run_training.Run(COMMAND, output_dir, ledger, loader, eval_loader, args.vision_learning_rate)
    run_training.train_and_save(args, setup, model, loss_fn, run_facts, at_end)


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
