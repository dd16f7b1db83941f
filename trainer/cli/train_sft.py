"""`train_sft`: supervised fine-tuning of a causal language model.

torchrun --nproc_per_node 2 -m trainer.cli.train_sft --backend fsdp2 --pretrain MODEL --dataset data.jsonl ...
"""

from trainer.datasets.demos.demo_flags import SFT_DEFAULTS
from trainer.entry import quiet_libraries, run_command
from trainer.flags.common_flags import SFTArguments
from trainer.runs import run_training

COMMAND = "train_sft"


def demo_defaults() -> dict:
    return {**SFT_DEFAULTS, "dataset": "sft.jsonl", "eval_dataset": "sft_eval.jsonl", "pretrain": "model"}


def parse(argv: list[str]) -> tuple[SFTArguments, bool]:
    """Return the arguments, and whether they are for the embedded demo."""
    return run_training.parse_or_demo(SFTArguments, COMMAND, argv, demo_defaults)


def load_data(args: SFTArguments, tokenizer, names: str, split: str, flag: str):
    """Return (tokenized samples, ledger) of --dataset or --eval_dataset."""
    # after the flags are read: --help must not import torch
    from trainer.datasets.samples.sft_samples import tokenize_sft
    from trainer.runs.image_runs import tokenizer_of_rows
    from trainer.runs.streamed_run import open_stream

    if args.streaming and flag == "--dataset":
        return open_stream(args, tokenizer)
    rows = run_training.load_flag_rows(args, names, split, flag)
    return tokenizer_of_rows(args, rows, tokenize_sft)(
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
        num_proc=args.dataset_num_proc,
    )


def run(argv: list[str]) -> None:
    args, is_demo = parse(argv)
    quiet_libraries()

    from transformers import AutoModelForCausalLM

    from trainer.datasets.batches.packing import collate_packed, collate_padded
    from trainer.datasets.samples.sft_samples import render_sample
    from trainer.methods.sft import sft_loss

    run_training.validate_shared(args, eval_metrics=("eval_loss",))
    run_training.refuse_idle(args, [("streaming_buffer", args.streaming, "--streaming")])
    if args.certify:
        from trainer.compare.certificates.plain_replay import check_replay_flags

        check_replay_flags(vars(args))
        args.certificate = True
    setup = run_training.set_up(args, is_demo)
    samples, eval_samples, ledger = run_training.load_sets(args, setup, load_data, render_sample)
    collate, loss_fn = collate_packed if args.packing_samples else collate_padded, sft_loss
    auto_class, image_run = AutoModelForCausalLM, run_training.image_run_of(args, setup, samples, eval_samples)
    if image_run:
        collate, auto_class = image_run.collate, image_run.auto_class
    if args.aux_loss_coef or args.expert_bias_update_rate:
        from trainer.methods.load_balance import balance_batches

        collate, loss_fn = balance_batches(
            setup.folder,
            collate,
            loss_fn,
            aux_loss_coef=args.aux_loss_coef,
            trust_remote_code=args.trust_remote_code,
        )
    build_loader = run_training.build_loader
    if args.streaming:
        from trainer.runs.streamed_run import build_loader
    loader = build_loader(args, setup, samples, collate, shuffle=not args.no_shuffle)
    eval_loader = eval_samples and run_training.build_loader(args, setup, eval_samples, collate, shuffle=False)
    output_dir = run_training.open_run(args, setup, COMMAND)
    model = run_training.load_model(args, setup, setup.folder, auto_class)
    if image_run:
        image_run.use(model)
    run_facts = run_training.Run(COMMAND, output_dir, ledger, loader, eval_loader, args.vision_learning_rate)
    if args.expert_bias_update_rate:
        from trainer.methods.expert_bias import balance_by_bias

        loss_fn = balance_by_bias(setup.strategy, model, loss_fn, args.expert_bias_update_rate)
    if args.parity_trace:
        from trainer.runs.module_trace import trace_first_step
        from trainer.runs.outputs import make_writable

        make_writable("--parity_trace", args.parity_trace)
        trace = trace_first_step(args, setup.strategy, loss_fn)
        loss_fn, run_facts.hooks = trace.loss, trace.hooks
    run_training.train_and_save(args, setup, model, loss_fn, run_facts)
    if args.certify and setup.strategy.is_rank_0():
        from trainer.compare.certificates.plain_replay import certify_steps

        print(certify_steps(output_dir, args.certify, str(setup.strategy.device), setup.folder), flush=True)


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
