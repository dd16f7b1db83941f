"""`train_sft`: supervised fine-tuning of a causal language model.

torchrun --nproc_per_node 2 -m trainer.cli.train_sft --backend fsdp2 --pretrain MODEL --dataset data.jsonl ...
"""

import contextlib
import dataclasses
import functools
import os

from trainer.arguments import SFTArguments, parse_arguments
from trainer.cli.entry import close_process_group, quiet_libraries, run_command
from trainer.errors import UserError

COMMAND = "train_sft"
DEMO_DIR = "demo"


def parse(argv: list[str]) -> tuple[SFTArguments, bool]:
    """The arguments, and whether they are those of the embedded demo."""
    args = parse_arguments(SFTArguments, COMMAND, argv)
    if args.pretrain is None and args.dataset is None:
        from trainer.datasets.demo import SFT_DEFAULTS

        sets = {"dataset": f"{DEMO_DIR}/sft.jsonl", "eval_dataset": f"{DEMO_DIR}/sft_eval.jsonl"}
        defaults = {**SFT_DEFAULTS, **sets, "pretrain": f"{DEMO_DIR}/model"}
        return parse_arguments(SFTArguments, COMMAND, argv, defaults), True
    for flag, value in (("--pretrain", args.pretrain), ("--dataset", args.dataset)):
        if value is None:
            raise UserError(flag, "missing", "a path or hub name; with neither --pretrain nor --dataset, the demo")
    return args, False


def validate(args: SFTArguments) -> None:
    """What can be wrong with the arguments alone, before any rank, data or model is touched."""
    from trainer.cli.outputs import check_checkpoint_flags, check_mirrors
    from trainer.training.schedule import check_scheduler_name

    if args.sp_mode != "ring" and args.ring_attn_size == 1:
        raise UserError("--sp_mode", f"{args.sp_mode} with --ring_attn_size 1", "--ring_attn_size 2 or more")
    if args.dataset_probs and args.dataset is None:
        raise UserError("--dataset_probs", "without --dataset", "leave it out")
    check_scheduler_name(args.lr_scheduler)
    check_mirrors(args.use_wandb, args.use_tensorboard)
    check_checkpoint_flags(args, eval_metrics=("eval_loss",) if args.eval_dataset else ())


def load_data(args: SFTArguments, tokenizer, names: str, split: str, flag: str):
    """(tokenized samples, ledger) of --dataset or --eval_dataset."""
    from trainer.datasets.loading import load_rows
    from trainer.datasets.sft import tokenize_sft

    probs = args.dataset_probs if flag == "--dataset" else None
    rows = load_rows(names, flag=flag, split=split, probs=probs, max_samples=args.max_samples, seed=args.seed)
    return tokenize_sft(
        rows,
        tokenizer,
        flag=flag,
        input_key=args.input_key,
        output_key=args.output_key,
        input_template=args.input_template,
        apply_chat_template=args.apply_chat_template,
        multiturn=args.multiturn,
        pretrain_mode=args.pretrain_mode,
        max_len=args.max_len,
    )


def build_loader(args: SFTArguments, strategy, samples, tokenizer, *, shuffle: bool):
    from trainer.datasets.packing import collate_packed, collate_padded

    collate = collate_packed if args.packing_samples else collate_padded
    capacity = args.max_tokens_per_micro_batch or args.micro_train_batch_size * args.max_len
    return strategy.setup_dataloader(
        samples,
        functools.partial(collate, pad_token_id=tokenizer.pad_token_id),
        batch_size=args.train_batch_size,
        micro_batch_size=args.micro_train_batch_size,
        max_tokens=args.max_tokens_per_micro_batch,
        packed_capacity=capacity if args.packing_samples else None,
        shuffle=shuffle,
    )


def run(argv: list[str]) -> None:
    args, is_demo = parse(argv)
    quiet_libraries()

    from transformers import AutoModelForCausalLM

    from trainer.cli.outputs import open_output_dir, save_policy, start_metrics, write_model_card
    from trainer.datasets.sft import render_sample
    from trainer.datasets.templates import load_chat_template
    from trainer.models.actor import (
        flops_per_token,
        load_tokenizer,
        resolve_attention,
        resolve_model_folder,
        setup_split_attention,
        validate_packed_model,
    )
    from trainer.strategies import get_strategy
    from trainer.strategies.mesh import validate_batch_sizes
    from trainer.training.checkpointing import Checkpoints, Trained
    from trainer.training.loop import train
    from trainer.training.schedule import build_scheduler
    from trainer.training.sft import sft_loss
    from trainer.training.verify_resume import verify_resume

    validate(args)
    strategy = get_strategy(args)
    if not args.max_tokens_per_micro_batch:
        validate_batch_sizes(args.train_batch_size, args.micro_train_batch_size, strategy.sizes.dp)
    attention = resolve_attention(args.attn_implementation, args.packing_samples, args.ring_attn_size > 1)
    strategy.setup_distributed()
    if is_demo:
        from trainer.datasets.demo import make_demo

        strategy.print(f"neither --pretrain nor --dataset given: training on the embedded demo in {DEMO_DIR}/")
        strategy.rank_0_first(lambda: make_demo(DEMO_DIR))

    # data
    folder = strategy.rank_0_first(lambda: resolve_model_folder(args.pretrain))
    if args.packing_samples:
        validate_packed_model(folder, args.trust_remote_code)
    if args.ring_attn_size > 1:
        sp_group, tp_size = strategy.setup_ring_attn(), args.tensor_parallel_size
        attention = setup_split_attention(folder, sp_group, args.sp_mode, tp_size, args.trust_remote_code)
    tokenizer = load_tokenizer(folder, args.trust_remote_code)
    load_chat_template(args.tokenizer_chat_template, tokenizer)
    samples, ledger = strategy.rank_0_first(
        lambda: load_data(args, tokenizer, args.dataset, args.dataset_split, "--dataset")
    )
    strategy.print(f"training data: {ledger.summary()}")
    strategy.print(f"first sample, loss tokens in [[ ]]:\n{render_sample(samples[0], tokenizer)}")
    loader = build_loader(args, strategy, samples, tokenizer, shuffle=not args.no_shuffle)
    eval_loader = None
    if args.eval_dataset:
        eval_samples, eval_ledger = strategy.rank_0_first(
            lambda: load_data(args, tokenizer, args.eval_dataset, args.eval_split, "--eval_dataset")
        )
        strategy.print(f"evaluation data: {eval_ledger.summary()}")
        eval_loader = build_loader(args, strategy, eval_samples, tokenizer, shuffle=False)
    output_dir = open_output_dir(strategy, args.output_dir, COMMAND, args.overwrite, args.load_checkpoint is not None)

    # model, optimizer, scheduler
    model = strategy.load_model(
        folder,
        AutoModelForCausalLM,
        attn_implementation=attention,
        gradient_checkpointing=args.gradient_checkpointing,
        trust_remote_code=args.trust_remote_code,
    )
    num_params = sum(parameter.numel() for parameter in model.parameters())
    flops = flops_per_token(model.config, num_params, ledger.num_tokens / ledger.num_samples)
    optimizer = strategy.create_optimizer(
        model, lr=args.learning_rate, betas=args.adam_betas, weight_decay=args.weight_decay
    )
    total_steps = args.max_steps or args.max_epochs * len(loader)
    scheduler = build_scheduler(
        args.lr_scheduler,
        optimizer,
        total_steps=total_steps,
        warmup_ratio=args.lr_warmup_ratio,
        min_lr_ratio=args.min_lr_ratio,
    )
    model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))

    # training
    trained = Trained(strategy, model, optimizer, scheduler, loader, tokenizer)
    checkpoints = Checkpoints(output_dir, trained, save_policy(args), dataclasses.asdict(args))
    progress = checkpoints.resume(args.load_checkpoint)
    if args.verify_resume:
        strategy.print(verify_resume(checkpoints, progress, sft_loss, args.verify_resume))
        return
    metrics = start_metrics(strategy, args, output_dir, progress, data=ledger.as_dict(), total_steps=total_steps)
    with metrics or contextlib.nullcontext():
        train(
            strategy,
            model,
            optimizer,
            scheduler,
            loader,
            sft_loss,
            total_steps=total_steps,
            metrics=metrics,
            checkpoints=checkpoints,
            progress=progress,
            flops_per_token=flops,
            eval_loader=eval_loader,
            eval_steps=args.eval_steps,
            logging_steps=args.logging_steps,
            max_skipped_steps=args.max_skipped_steps,
            check_replicas_every=args.check_replicas_every,
            parity_dump=args.parity_dump,
        )
        if not args.no_save:
            save_path = args.save_path or os.path.join(output_dir, "model")
            strategy.save_model(model, tokenizer, save_path)
            if metrics:
                write_model_card(save_path, COMMAND, args, progress, ledger)
            strategy.print(f"model saved to {save_path}")
        if metrics:
            metrics.event("end", steps=total_steps)


def main() -> None:
    run_command(run)
    close_process_group()


if __name__ == "__main__":
    main()
