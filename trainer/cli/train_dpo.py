"""`train_dpo`: preference optimization of a causal language model from pairs of answers: DPO and its relatives.

torchrun --nproc_per_node 2 -m trainer.cli.train_dpo --backend fsdp2 --pretrain MODEL --dataset pairs.jsonl ...
"""

from trainer.arguments import DPOArguments
from trainer.cli import common
from trainer.cli.entry import close_process_group, quiet_libraries, run_command
from trainer.cli.preference_data import (
    build_pair_loader,
    build_unpaired_loader,
    load_pairs,
    load_unpaired,
    validate_pairs,
)
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

    if args.loss == "kto" and args.train_batch_size == 1:
        raise UserError(
            "--train_batch_size", "1 with --loss kto, whose KL estimate pairs prompts and answers", "2 or more"
        )
    if args.loss == "kto" and args.nll_loss_coef:
        raise UserError("--nll_loss_coef", "with --loss kto, which has no chosen answers", "leave it out")
    if args.loss != "kto":
        defaults = DPOArguments()
        for name in ("desirable_weight", "undesirable_weight", "completion_key", "label_key"):
            if getattr(args, name) != getattr(defaults, name):
                raise UserError(f"--{name}", f"with --loss {args.loss}", "--loss kto")


def load_data(args: DPOArguments, tokenizer, names: str, split: str, flag: str):
    load = load_unpaired if args.loss == "kto" else load_pairs
    return load(args, tokenizer, names, split, flag)


def make_loss(args: DPOArguments, reference, sp_group):
    from trainer.training.dpo import PreferenceOptions, make_preference_loss
    from trainer.training.kto import make_kto_loss

    if args.loss == "kto":
        return make_kto_loss(args.beta, args.desirable_weight, args.undesirable_weight, reference, sp_group)
    options = PreferenceOptions(args.loss, args.beta, args.label_smoothing, args.simpo_gamma, args.nll_loss_coef)
    return make_preference_loss(options, reference, sp_group)


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
    from trainer.datasets.unpaired import render_answer
    from trainer.training.dpo import REFERENCE_FREE

    validate(args)
    setup = common.set_up(args, is_demo)
    is_kto = args.loss == "kto"
    render, build_loader = (render_answer, build_unpaired_loader) if is_kto else (render_pair, build_pair_loader)
    samples, eval_samples, ledger = common.load_sets(args, setup, load_data, render)
    loader = build_loader(args, setup, samples, shuffle=not args.no_shuffle)
    eval_loader = eval_samples and build_loader(args, setup, eval_samples, shuffle=False)
    output_dir = common.open_run(args, setup, COMMAND)
    model = common.load_model(args, setup, setup.folder, AutoModelForCausalLM)
    reference = None if args.loss in REFERENCE_FREE else load_reference(args, setup)
    loss_fn = make_loss(args, reference, setup.sp_group)
    run_facts = common.Run(COMMAND, output_dir, ledger, loader, eval_loader)
    common.train_and_save(args, setup, model, loss_fn, run_facts)


def main() -> None:
    run_command(run)
    close_process_group()


if __name__ == "__main__":
    main()
