"""`export SOURCE OUT`: write a checkpoint, a model or an adapter in another form. It runs in one process.

SOURCE                                OUT
a checkpoint                          the model folder of its weights; the adapter folder for a LoRA run
a checkpoint, with --portable         a checkpoint with whole tensors under Hugging Face names, which any layout resumes
an adapter folder                     the model folder of its base model with the adapter merged in
a model folder                        the same model in another dtype, or in files of another size
a GGUF file                           its model folder, with full weights in place of quantized ones
"""

from trainer.entry import quiet_libraries, run_command
from trainer.flags.names.word_parser import ReadingParser
from trainer.runs.output_folders import check_places


def build_parser() -> ReadingParser:
    parser = ReadingParser("export", description=__doc__)
    parser.add_argument(
        "source", metavar="SOURCE", help="RUN/checkpoints/step_N, a model folder, an adapter folder or a GGUF file"
    )
    parser.add_argument("out", metavar="OUT", help="the folder to write; it must not exist yet")
    parser.add_argument("--portable", action="store_true", help="of a checkpoint: write a portable checkpoint")
    parser.add_argument("--base", metavar="MODEL", help="of an adapter: its base model (the one that it names)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="dtype of the weights (that of SOURCE)")
    parser.add_argument("--max_shard_gb", type=float, metavar="N", help="size of a file of weights, in GB (2)")
    return parser


def run(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    check_places(args.source, args.out)
    print(f"exporting {args.source} to {args.out}", flush=True)
    quiet_libraries()
    from trainer.runs.exported_models import export  # it imports torch, which --help does not need

    export(
        args.source,
        args.out,
        portable=args.portable,
        base=args.base,
        dtype_name=args.dtype,
        max_shard_gb=args.max_shard_gb,
    )


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
