"""`train_kd`: knowledge distillation of a causal language model, from a teacher's answers, its probabilities, or both.

torchrun --nproc_per_node 2 -m trainer.cli.train_kd --backend fsdp2 --pretrain MODEL --teacher MODEL --dataset data.jsonl ...
"""

import dataclasses
import os

from trainer.cli import train_sft
from trainer.entry import quiet_libraries, run_command
from trainer.errors import UserError
from trainer.flags.common_flags import parse_arguments
from trainer.flags.kd_flags import KDArguments
from trainer.runs import run_training

COMMAND, ANSWERS = "train_kd", "answers"


def parse(argv: list[str]) -> KDArguments:
    args = parse_arguments(KDArguments, COMMAND, argv)
    for name in ("pretrain", "dataset", "teacher"):
        if vars(args)[name] is None:
            raise UserError(f"--{name}", "missing", "a path or hub name")
    return args


def coefficient(args: KDArguments) -> float:
    """The weight of the KL."""
    return args.kd_coef if args.kd_coef is not None else float(not args.teacher_answers)


def validate(args: KDArguments) -> None:
    run_training.validate_shared(args, eval_metrics=("eval_loss", "eval_teacher_kl", "eval_nll"))
    others = {
        "--streaming": args.streaming,
        "--aux_loss_coef": args.aux_loss_coef,
        "--expert_bias_update_rate": args.expert_bias_update_rate,
        "--load_in_4bit": args.load_in_4bit,
        "--layout": args.layout == "auto",
        "--teacher_offload": args.teacher_offload and args.teacher_answers,
    }
    for flag in (flag for flag, value in others.items() if value):
        found = "with --teacher_answers" if flag == "--teacher_offload" else "with train_kd"
        raise UserError(flag, found, "leave it out")
    if not args.teacher_answers and not coefficient(args):
        found = "0 without --teacher_answers: nothing comes from the teacher"
        raise UserError("--kd_coef", found, "above 0, or train_sft")
    answers = "generate_max_len temperature micro_rollout_batch_size"
    rules = [
        (answers, bool(args.teacher_answers), "--teacher_answers"),
        ("kd_temperature", coefficient(args) > 0, "--kd_coef above 0"),
        ("teacher_offload", coefficient(args) > 0, "--kd_coef above 0"),
        ("streaming_buffer", False, "train_sft --streaming"),
        ("output_key multiturn pretrain_mode", not args.teacher_answers, "answers of --dataset"),
    ]
    run_training.refuse_idle(args, rules)
    if args.teacher_answers and args.eval_dataset:
        raise UserError("--eval_dataset", "with --teacher_answers", "leave it out")
    if args.teacher_answers and args.generate_max_len >= args.max_len:
        found = f"{args.generate_max_len} with --max_len {args.max_len}, which leaves no room for prompts"
        raise UserError("--generate_max_len", found, "less than --max_len")


def load_teacher(args: KDArguments, setup: run_training.Setup):
    """Return (teacher, its folder). It is frozen, and sharded like the model."""
    from transformers import AutoModelForCausalLM

    from trainer.distributed.collectives import rank_0_first
    from trainer.model_folders.model_folder import read_config
    from trainer.models.model_loading import load_tokenizer, resolve_model_folder

    folder = rank_0_first(lambda: resolve_model_folder(args.teacher, "--teacher"))
    if load_tokenizer(folder, args.trust_remote_code).get_vocab() != setup.tokenizer.get_vocab():
        found = f"{args.teacher} has another vocabulary than --pretrain"
        raise UserError("--teacher", found, "a model with the same one")
    configs = [read_config(name, args.trust_remote_code).get_text_config() for name in (folder, setup.folder)]
    if coefficient(args) and len({config.vocab_size for config in configs}) > 1:
        found = f"{args.teacher} has {configs[0].vocab_size} logits, and --pretrain {configs[1].vocab_size}"
        raise UserError("--teacher", found, "equal numbers, or --teacher_answers with --kd_coef 0")
    teacher = run_training.load_model(args, setup, folder, AutoModelForCausalLM, "--teacher", trained=False)
    return setup.strategy.prepare(teacher.eval().requires_grad_(False), offload=args.teacher_offload), folder


def with_answers(args: KDArguments, setup: run_training.Setup, teacher, folder: str, output_dir: str) -> KDArguments:
    """The flags to read the teacher's answers with. They are drawn, unless a resumed run has them."""
    from trainer.distributed.collectives import broadcast_object
    from trainer.runs.teacher_answers import draw_answers

    target = os.path.abspath(os.path.join(output_dir, ANSWERS))
    if not broadcast_object(bool(args.load_checkpoint) and os.path.isdir(target)):
        draw_answers(args, setup, teacher, folder, target)
    given = {"dataset_split": "train", "dataset_probs": None, "max_samples": None, "input_key": None}
    return dataclasses.replace(
        args, dataset=target, **given, input_template=None, apply_chat_template=False, tokenizer_chat_template=None
    )


def run(argv: list[str]) -> None:
    args = parse(argv)
    quiet_libraries()

    from transformers import AutoModelForCausalLM

    from trainer.datasets.batches.packing import collate_packed, collate_padded
    from trainer.datasets.samples.sft_samples import render_sample
    from trainer.methods.sft import sft_loss
    from trainer.methods.teacher_loss import make_teacher_loss

    validate(args)
    setup = run_training.set_up(args, False)
    output_dir = run_training.open_run(args, setup, COMMAND)
    teacher, folder = load_teacher(args, setup)
    of_data = with_answers(args, setup, teacher, folder, output_dir) if args.teacher_answers else args
    samples, eval_samples, ledger = run_training.load_sets(of_data, setup, train_sft.load_data, render_sample)
    if "images" in samples.column_names:
        raise UserError("--dataset", "rows with images with train_kd", "rows without images")
    collate, coef = collate_packed if args.packing_samples else collate_padded, coefficient(args)
    loader = run_training.build_loader(args, setup, samples, collate, shuffle=not args.no_shuffle)
    eval_loader = eval_samples and run_training.build_loader(args, setup, eval_samples, collate, shuffle=False)
    loss_fn = make_teacher_loss(teacher, coef, args.kd_temperature) if coef else sft_loss
    del teacher
    model = run_training.load_model(args, setup, setup.folder, AutoModelForCausalLM)
    run_facts = run_training.Run(COMMAND, output_dir, ledger, loader, eval_loader)
    run_training.train_and_save(args, setup, model, loss_fn, run_facts)


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
