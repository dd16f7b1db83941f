"""`train_dpo`: preference optimization of a causal language model on pairs of answers, with DPO or a related loss.

torchrun --nproc_per_node 2 -m trainer.cli.train_dpo --backend fsdp2 --pretrain MODEL --dataset pairs.jsonl ...
"""

import functools

from trainer.datasets.demos.demo_flags import DPO_DEFAULTS
from trainer.entry import quiet_libraries, run_command
from trainer.errors import UserError
from trainer.flags.preference_flags import DPOArguments
from trainer.runs import run_training
from trainer.runs.preference_rules import make_loss, needs_reference, validate_losses
from trainer.runs.preference_runs import (
    build_pair_loader,
    build_unpaired_loader,
    load_pairs,
    load_unpaired,
    validate_pairs,
)

COMMAND = "train_dpo"
EVAL_METRICS = ("eval_loss", "eval_reward_accuracy", "eval_reward_margin")


def demo_defaults() -> dict:
    return {**DPO_DEFAULTS, "dataset": "pairs.jsonl", "eval_dataset": "pairs_eval.jsonl", "pretrain": "model"}


def parse(argv: list[str]) -> tuple[DPOArguments, bool]:
    """Return the arguments, and whether they are for the embedded demo."""
    return run_training.parse_or_demo(DPOArguments, COMMAND, argv, demo_defaults)


def validate(args: DPOArguments) -> None:
    if args.online:
        raise UserError("--online", "in a file of --config", "--online on the command line")
    names = validate_losses(args)
    validate_pairs(args, EVAL_METRICS[:2] if args.loss == "kto" else EVAL_METRICS)  # kto has no pairs, so no margin
    reference_flags = {
        "--ref_model": args.ref_model,
        "--ref_offload": args.ref_offload,
        "--precompute_ref_logps": args.precompute_ref_logps,
    }
    for flag, value in reference_flags.items():
        if value and not needs_reference(args):
            raise UserError(flag, f"with --loss {args.loss}, which has no reference", "leave it out")
        if value and args.load_in_4bit:
            raise UserError(flag, "with --load_in_4bit: the reference is the model without its adapter", "leave it out")
    if args.ref_offload and args.lora_rank and not args.ref_model:
        raise UserError("--ref_offload", "with --lora_rank: the reference is the model itself", "leave it out")
    if args.precompute_ref_logps and args.loss == "kto":
        found = "with --loss kto, which pairs prompts and answers again in every epoch"
        raise UserError("--precompute_ref_logps", found, "leave it out, or --ref_offload")
    if args.precompute_ref_logps and args.ref_offload:
        raise UserError("--ref_offload", "with --precompute_ref_logps, which frees the reference", "one of them")
    if args.loss == "kto" and args.train_batch_size == 1:
        raise UserError(
            "--train_batch_size", "1 with --loss kto: its KL estimate pairs prompts with other answers", "2 or more"
        )
    if args.loss == "kto" and args.nll_loss_coef:
        raise UserError("--nll_loss_coef", "with --loss kto, which has no chosen answers", "leave it out")
    idle = [
        ("simpo_gamma", "simpo" in names, "--loss simpo"),
        ("f_alpha", args.f_divergence == "alpha", "--f_divergence alpha"),
        ("completion_key label_key", args.loss == "kto", "--loss kto"),
    ]
    run_training.refuse_idle(args, idle)
    if args.loss != "kto" and (args.desirable_weight, args.undesirable_weight) != (1, 1):
        found = f"{args.desirable_weight}, {args.undesirable_weight} with --loss {args.loss}"
        raise UserError("--desirable_weight, --undesirable_weight", found, "--loss kto")


def load_data(args: DPOArguments, tokenizer, names: str, split: str, flag: str):
    if args.loss == "kto":
        return load_unpaired(args, tokenizer, names, split, flag)
    # losses without a reference compare means over the answer's tokens
    mean_flag = "--nll_loss_coef" if args.nll_loss_coef else None
    mean_flag = mean_flag if needs_reference(args) else f"--loss {args.loss}"
    return load_pairs(args, tokenizer, names, split, flag, mean_flag=mean_flag)


def reference_folder(args: DPOArguments, setup: run_training.Setup) -> str:
    from trainer.distributed.collectives import rank_0_first
    from trainer.models.model_loading import resolve_model_folder

    if not args.ref_model:
        return setup.folder
    return rank_0_first(lambda: resolve_model_folder(args.ref_model, "--ref_model"))


def load_reference(args: DPOArguments, setup: run_training.Setup, image_run=None):
    """The reference model, frozen and sharded like the policy. `image_run`: rows have images."""
    from transformers import AutoModelForCausalLM

    auto_class = image_run.auto_class if image_run else AutoModelForCausalLM
    if args.ref_offload and setup.strategy.device.type == "cpu":
        setup.strategy.print("--ref_offload: the device is the CPU, so the reference is already in host memory")
    folder, flag = reference_folder(args, setup), "--ref_model" if args.ref_model else "--pretrain"
    if image_run and args.ref_model:
        image_run.check_kind(folder, flag)
    reference = run_training.load_model(args, setup, folder, auto_class, flag, trained=False)
    if image_run:
        image_run.fit(reference)
    return setup.strategy.prepare(reference.eval().requires_grad_(False), offload=args.ref_offload)


def run(argv: list[str]) -> None:
    if "--online" in argv:
        from trainer.runs.rl.online_dpo import run_online

        return run_online(argv)
    args, is_demo = parse(argv)
    quiet_libraries()

    from transformers import AutoModelForCausalLM

    from trainer.datasets.samples.preference import render_pair
    from trainer.datasets.samples.unpaired import render_answer
    from trainer.runs.precompute import with_reference

    validate(args)
    setup = run_training.set_up(args, is_demo)
    is_kto = args.loss == "kto"
    render, build_loader = (render_answer, build_unpaired_loader) if is_kto else (render_pair, build_pair_loader)
    samples, eval_samples, ledger = run_training.load_sets(args, setup, load_data, render)
    image_run = run_training.image_run_of(args, setup, samples, eval_samples)
    auto_class, rows_of = (image_run.auto_class, image_run.collate) if image_run else (AutoModelForCausalLM, None)
    if args.precompute_ref_logps:
        folder, load = reference_folder(args, setup), functools.partial(load_reference, args, setup, image_run)
        samples, eval_samples = with_reference(args, setup, folder, load, [samples, eval_samples], rows_of)
    loader = build_loader(args, setup, samples, shuffle=not args.no_shuffle, rows_of=rows_of)
    eval_loader = eval_samples and build_loader(args, setup, eval_samples, shuffle=False, rows_of=rows_of)
    output_dir = run_training.open_run(args, setup, COMMAND)
    model = run_training.load_model(args, setup, setup.folder, auto_class)
    if image_run:
        image_run.use(model)
    # with an adapter, its base is the reference, unless --ref_model names another model
    has_reference = needs_reference(args) and not args.precompute_ref_logps
    needs_model = has_reference and (args.ref_model or not args.lora_rank)
    reference = load_reference(args, setup, image_run) if needs_model else None
    loss_fn = make_loss(args, model.config, reference, setup.sp_group)
    run_facts = run_training.Run(COMMAND, output_dir, ledger, loader, eval_loader, args.vision_learning_rate)
    run_training.train_and_save(args, setup, model, loss_fn, run_facts)


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
