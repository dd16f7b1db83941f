"""`train_dpo`: preference optimization of a causal language model from pairs of answers: DPO and its relatives.

torchrun --nproc_per_node 2 -m trainer.cli.train_dpo --backend fsdp2 --pretrain MODEL --dataset pairs.jsonl ...
"""

from trainer.arguments import DPOArguments
from trainer.cli import common
from trainer.cli.entry import close_process_group, quiet_libraries, run_command
from trainer.cli.preference_data import build_pair_loader, load_pairs, validate_pairs
from trainer.errors import UserError

COMMAND = "train_dpo"
EVAL_METRICS = ("eval_loss", "eval_reward_accuracy", "eval_reward_margin")


def demo_defaults() -> dict:
    from trainer.datasets.demo import DPO_DEFAULTS

    return {**DPO_DEFAULTS, "dataset": "pairs.jsonl", "eval_dataset": "pairs_eval.jsonl", "pretrain": "model"}


def parse(argv: list[str]) -> tuple[DPOArguments, bool]:
    """The arguments, and whether they are those of the embedded demo."""
    return common.parse_or_demo(DPOArguments, COMMAND, argv, demo_defaults)


def validate(args: DPOArguments) -> None:
    from trainer.training.dpo import REFERENCE_FREE

    validate_pairs(args, EVAL_METRICS)
    if (args.label_smoothing > 0) != (args.loss == "cdpo") or args.label_smoothing >= 0.5:
        found = f"{args.label_smoothing} with --loss {args.loss}"
        raise UserError("--label_smoothing", found, "above 0 and below 0.5 with --loss cdpo, 0 with any other")
    if args.ref_model and args.loss in REFERENCE_FREE:
        raise UserError("--ref_model", f"with --loss {args.loss}, which has no reference", "leave it out")
    if args.ref_model and args.load_in_4bit:
        raise UserError("--ref_model", "with --load_in_4bit, whose reference is the model without its adapter")


def load_reference(args: DPOArguments, setup: common.Setup):
    """The reference model, frozen and sharded like the policy."""
    from transformers import AutoModelForCausalLM

    from trainer.models.actor import resolve_model_folder

    folder = setup.folder
    if args.ref_model:
        folder = setup.strategy.rank_0_first(lambda: resolve_model_folder(args.ref_model))
    reference = common.load_model(args, setup, folder, AutoModelForCausalLM)
    return setup.strategy.prepare(reference.eval().requires_grad_(False))


def run(argv: list[str]) -> None:
    args, is_demo = parse(argv)
    quiet_libraries()

    from transformers import AutoModelForCausalLM

    from trainer.datasets.preference import render_pair
    from trainer.training.dpo import PreferenceOptions, make_preference_loss

    validate(args)
    setup = common.set_up(args, is_demo)
    pairs, eval_pairs, ledger = common.load_sets(args, setup, load_pairs, render_pair)
    loader = build_pair_loader(args, setup, pairs, shuffle=not args.no_shuffle)
    eval_loader = eval_pairs and build_pair_loader(args, setup, eval_pairs, shuffle=False)
    output_dir = common.open_run(args, setup, COMMAND)
    options = PreferenceOptions(args.loss, args.beta, args.label_smoothing, args.simpo_gamma, args.nll_loss_coef)
    model = common.load_model(args, setup, setup.folder, AutoModelForCausalLM)
    # the base of an adapter is the reference, unless another is named
    needs_model = options.needs_reference() and (args.ref_model or not args.lora_rank)
    reference = load_reference(args, setup) if needs_model else None
    loss_fn = make_preference_loss(options, reference, setup.sp_group)
    run_facts = common.Run(COMMAND, output_dir, ledger, loader, eval_loader)
    common.train_and_save(args, setup, model, loss_fn, run_facts)


def main() -> None:
    run_command(run)
    close_process_group()


if __name__ == "__main__":
    main()
