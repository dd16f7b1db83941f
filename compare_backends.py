"""Check that two backends, or all configurations of a matrix, give the same run, by loss curves and parity dumps.

  compare_backends.py --deepspeed_log A --fsdp2_log B            two logs; the deepspeed one is the reference
  compare_backends.py --logs a=A b=B c=C --reference a           any number of logs
  compare_backends.py --run quick|full|FILE.yaml -- TRAIN_ARGS   launch each configuration and the plain loop
  compare_backends.py --exact MODEL... -- [COMMAND] TRAIN_ARGS   COMMAND --exact on every layout: are all bits equal?
                                                                 (default: train_sft)
  compare_backends.py --exact MODEL --resumes N -- TRAIN_ARGS    stop runs, resume them on other layouts: equal bits?
  compare_backends.py --locate A B -- TRAIN_ARGS                 one step of two configurations: where do they differ?
  compare_backends.py --locate RUN_A RUN_B                       the same for two runs with --parity_trace
  compare_backends.py --logs theirs=LOG --reference plain --data FILE --model DIR --training_args FILE
                                                                 replay another trainer's run with the plain loop
  compare_backends.py --audit hf|trl|MODULE:CLASS --data FILE --model DIR --training_args FILE
                                                                 one step of another trainer, gradient by gradient

A log is a metrics.jsonl, a run folder with a metrics.jsonl, the text that a run printed, or a log of another trainer:
trainer_state.json, TensorBoard events, files of wandb, and others (docs/other_trainers.md).
Exit code: 0 if everything passed, 1 if something did not, 2 if nothing could be compared.
"""

import argparse
import math
import os
import signal
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

from trainer.compare.runs.comparison_report import comparison_dict, comparison_text, write_json
from trainer.compare.runs.dumps import add_dumps
from trainer.compare.runs.logs import read_run
from trainer.compare.runs.matrix import check_args, load_matrix, matrix_thresholds
from trainer.compare.runs.parity import Thresholds, compare_runs
from trainer.compare.runs.plots import plot_comparisons, require_matplotlib
from trainer.compare.runs.run_matrix import run_matrix
from trainer.entry import quiet_libraries
from trainer.errors import UserError

ROOT = Path(__file__).resolve().parent
LOG_ONLY = ("deepspeed_log", "fsdp2_log", "logs", "reference", "dumps", "plot", "json", "max_rows")
RUN_ONLY = ("output_dir", "only", "jobs", "timeout", "update_table", "share_launch")
EXACT = ("exact", "resumes", "output_dir", "only", "jobs", "timeout", "update_table")
LOCATE = ("locate", "json", "run", "output_dir", "timeout")
REPLAY = ("data", "model", "training_args", "sample_ids", "world_size", "device")
WITH_REPLAY = (*REPLAY, "audit", "logs", "reference", "json", "max_rows", "plot", "threshold", "grad_norm_threshold")


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError("arguments", message, "see --help")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    own_args, dashes, train_args = _split_at_dashes(argv)
    try:
        options = build_parser().parse_args(own_args)
        _check_mode(options, dashes)
        mode = _exact if options.exact else _locate if options.locate else _run if options.run else _compare_logs
        if options.data or options.audit:
            mode = _audit if options.audit else _replay
        passed = mode(options, train_args)
    except UserError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0 if passed else 1


def build_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    logs = parser.add_argument_group("comparing logs")
    logs.add_argument("--deepspeed_log", metavar="LOG")
    logs.add_argument("--fsdp2_log", metavar="LOG")
    logs.add_argument("--logs", nargs="+", metavar="NAME=LOG")
    logs.add_argument("--reference", metavar="NAME", help="log to compare with (default: deepspeed, or the first log)")
    logs.add_argument("--dumps", nargs="+", metavar="NAME=DIR", help="folders of --parity_dump, by log name")
    logs.add_argument("--plot", metavar="PNG", help="draw the loss curves and the relative differences")
    logs.add_argument("--json", metavar="JSON", help="write every number of the comparison")
    logs.add_argument("--max_rows", type=positive_integer, metavar="N", help="longest table to print (default: 40)")
    run = parser.add_argument_group("launching a matrix (TRAIN_ARGS run in the folder of this script)")
    run.add_argument("--run", metavar="MATRIX", help="quick, full, or a YAML file")
    run.add_argument(
        "--output_dir", metavar="DIR", help="folder of runs, logs and reports (default: runs/compare-<time>)"
    )
    run.add_argument("--only", metavar="REGEX", help="run only configurations with a name that matches")
    run.add_argument("--update_table", metavar="FILE", help="also write the table between the markers of this file")
    run.add_argument(
        "--share_launch",
        action="store_const",
        const=True,
        help="run all configurations with the same number of ranks in one torchrun, which imports only once",
    )
    run.add_argument(
        "--jobs", type=positive_integer, metavar="N", help="configurations that run at a time (default: 1)"
    )
    run.add_argument(
        "--timeout", type=positive_integer, metavar="SECONDS", help="time limit of each configuration (default: 600)"
    )
    bits = parser.add_argument_group("equal bits (--only, --output_dir, --jobs, --timeout and --update_table as above)")
    bits.add_argument(
        "--exact", nargs="+", metavar="MODEL", help="model folders; every layout of --exact runs with each"
    )
    bits.add_argument(
        "--resumes",
        type=positive_integer,
        metavar="N",
        help="instead, resume N runs twice each at random steps and layouts",
    )
    where = parser.add_argument_group("finding the first difference")
    locate_help = "names of two configurations of --run (default: full), or two run folders with --parity_trace"
    where.add_argument("--locate", nargs=2, metavar=("A", "B"), help=locate_help)
    theirs = parser.add_argument_group(
        "replaying another trainer's run (the reference is plain, or an adapter is audited)"
    )
    theirs.add_argument("--data", metavar="FILE", help="the tokenized rows of the run: input_ids, and labels or a mask")
    theirs.add_argument("--model", metavar="DIR", help="the model folder that the run started from")
    args_help = "training_args.bin, or a YAML or JSON file with the names of the HF TrainingArguments"
    theirs.add_argument("--training_args", metavar="FILE", help=args_help)
    ids_help = "row numbers of each step, a JSON list per line (default: the order of the HF Trainer)"
    theirs.add_argument("--sample_ids", metavar="FILE", help=ids_help)
    theirs.add_argument("--world_size", type=positive_integer, metavar="N", help="data-parallel ranks of the run (1)")
    theirs.add_argument("--device", metavar="DEVICE", help="where the plain loop computes (default: cpu)")
    theirs.add_argument("--audit", metavar="ADAPTER", help="hf, trl, or MODULE:CLASS: compare one step's gradients")
    limits = parser.add_argument_group("largest relative differences allowed")
    loss_help = "for the loss (default: 0.05; with --run 1e-5, and 1e-2 for bf16 and fp16)"
    limits.add_argument("--threshold", type=non_negative_number, metavar="X", help=loss_help)
    norm_help = "for the grad norm (default: 10 times the loss threshold; with --run not judged for bf16 and fp16)"
    limits.add_argument("--grad_norm_threshold", type=non_negative_number, metavar="X", help=norm_help)
    dump_help = "for any gradient or weight in the dumps (default: 1e-4; with --run not judged for bf16 and fp16)"
    limits.add_argument("--dump_threshold", type=non_negative_number, metavar="X", help=dump_help)
    return parser


def non_negative_number(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError
    return value


def positive_integer(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _split_at_dashes(argv: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in argv:
        return argv, False, []
    at = argv.index("--")
    return argv[:at], True, argv[at + 1 :]


def _check_mode(options: argparse.Namespace, dashes: bool) -> None:
    """Raise UserError for flags that the chosen mode does not use."""
    if options.data or options.audit:
        unused, why = [flag for flag in vars(options) if flag not in WITH_REPLAY], "with --data"
    elif options.exact:
        unused, why = [flag for flag in vars(options) if flag not in EXACT], "with --exact"
    elif options.locate:
        unused, why = [flag for flag in vars(options) if flag not in LOCATE], "with --locate"
    elif options.run:
        unused, why = (*LOG_ONLY, *REPLAY, "resumes"), "with --run"
    else:
        unused, why = (
            (*RUN_ONLY, *REPLAY, "resumes"),
            "without --data" if any(vars(options)[n] for n in REPLAY) else "without --run",
        )
    for flag in unused:
        if vars(options)[flag] is not None:
            raise UserError(f"--{flag}", f"has no effect {why}")
    if dashes and not (options.run or options.locate or options.exact):
        raise UserError("--", "arguments for training without --run", "--run MATRIX -- TRAIN_ARGS")


def _exact(options: argparse.Namespace, train_args: list[str]) -> bool:
    # not at the top: --help and the comparison of logs do without torch
    from trainer.compare.runs.exact_matrix import Places, run_exact, run_resumes

    if not train_args:
        raise UserError("--exact", "no arguments for training", "--exact MODEL... -- TRAIN_ARGS")
    check_args("TRAIN_ARGS", train_args)
    output_dir = Path(options.output_dir or f"runs/exact-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    places = Places(ROOT, output_dir, options.jobs or 1, options.timeout or 600)
    if options.resumes:
        if len(options.exact) > 1 or options.update_table:
            raise UserError("--resumes", "with several models or --update_table", "one model, without --update_table")
        passed = run_resumes(options.resumes, options.exact[0], train_args, options.only, places)
    else:
        passed = run_exact(options.exact, train_args, options.only, places, options.update_table)
    print(f"{'PASS' if passed else 'FAIL'}: {output_dir}")
    return passed


def _locate(options: argparse.Namespace, train_args: list[str]) -> bool:
    # not at the top: --help and the comparison of logs do without torch
    from trainer.compare.locate.locate_report import configurations_of, is_folder_pair, locate_folders, run_pair

    if is_folder_pair(options.locate) and not train_args:
        for flag in ("run", "output_dir", "timeout"):
            if vars(options)[flag] is not None:
                raise UserError(f"--{flag}", "has no effect with two run folders")
        return locate_folders(options.locate, options.json)
    configurations = configurations_of(options.locate, options.run)
    if not train_args:
        raise UserError("--locate", "no arguments for training", "--locate A B -- TRAIN_ARGS")
    check_args("TRAIN_ARGS", train_args)
    output_dir = Path(options.output_dir or f"runs/locate-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    places = {"cwd": ROOT, "output_dir": output_dir, "timeout": options.timeout or 600}
    return locate_folders(run_pair(configurations, train_args, **places), options.json)


def _job(options: argparse.Namespace, num_steps: int):
    # not at the top: --help and the comparison of logs do without torch
    from trainer.compare.other_trainers.plain_reference import make_job
    from trainer.compare.other_trainers.their_config import read_their_config

    quiet_libraries()
    for flag in ("data", "model", "training_args"):
        if not vars(options)[flag]:
            raise UserError(f"--{flag}", "missing", "--data FILE --model DIR --training_args FILE")
    values = read_their_config(options.training_args)
    ranks, device = options.world_size or 1, options.device or "cpu"
    return make_job(options.data, options.model, values, ranks, options.sample_ids, num_steps, device), values


def _audit(options: argparse.Namespace, _train_args: list[str]) -> bool:
    # not at the top: --help and the comparison of logs do without torch
    from trainer.compare.other_trainers.adapters import audit, audit_text, open_adapter

    job, values = _job(options, 1)
    found = audit(open_adapter(options.audit), job, values)
    if os.environ.get("RANK", "0") != "0":  # an adapter may need several ranks
        return True
    print(audit_text(options.audit, found))
    if options.json:
        write_json(options.json, {**asdict(found), "passed": found.passed})
    return found.passed


def _replay(options: argparse.Namespace, _train_args: list[str]) -> bool:
    # not at the top: --help and the comparison of logs do without torch
    from trainer.compare.other_trainers.plain_reference import difference_text, first_difference, plain_run
    from trainer.compare.other_trainers.their_config import dtype_of

    logs = _named_paths("--logs", options.logs or [])
    if len(logs) != 1 or options.reference != "plain":
        raise UserError("--data", "a replay compares one log with the plain loop", "--logs NAME=LOG --reference plain")
    theirs = read_run(*next(iter(logs.items())))
    job, values = _job(options, max(theirs.steps))
    thresholds = matrix_thresholds(dtype_of(values), options.threshold, options.grad_norm_threshold, None)
    mine = plain_run(job, theirs)
    comparison = compare_runs(mine, theirs, thresholds)
    print(comparison_text(comparison, options.max_rows or 40).rsplit("\n", 1)[0], end="\n\n")
    print(difference_text(job, mine, theirs, comparison))
    passed = first_difference(comparison, theirs.rounding) is None
    if options.json:
        write_json(options.json, {"thresholds": asdict(thresholds), **comparison_dict(comparison), "passed": passed})
    if options.plot:
        plot_comparisons(options.plot, [mine, theirs], [comparison])
    print("PASS" if passed else "FAIL")
    return passed


def _run(options: argparse.Namespace, train_args: list[str]) -> bool:
    if not train_args:
        raise UserError("--run", "no arguments for training", "--run MATRIX -- TRAIN_ARGS")
    check_args("TRAIN_ARGS", train_args)
    configurations = load_matrix(options.run, options.only)
    output_dir = Path(options.output_dir or f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that all launched jobs are ended
    passed = run_matrix(
        configurations,
        train_args,
        partial(
            matrix_thresholds,
            loss=options.threshold,
            grad_norm=options.grad_norm_threshold,
            dump=options.dump_threshold,
        ),
        cwd=ROOT,
        output_dir=output_dir,
        num_parallel=options.jobs or 1,
        timeout=options.timeout or 600,
        update_table=options.update_table,
        share_launch=bool(options.share_launch),
    )
    print(f"{'PASS' if passed else 'FAIL'}: {output_dir}/report.md, report.json, report.png")
    return passed


def _compare_logs(options: argparse.Namespace, _train_args: list[str]) -> bool:
    if options.plot:
        require_matplotlib("--plot")
    paths = _log_paths(options)
    names = list(paths)
    reference_name = options.reference or names[0]
    if reference_name not in paths:
        raise UserError("--reference", repr(reference_name), ", ".join(names))
    dumps = _dump_paths(options, names, reference_name)
    thresholds = _log_thresholds(options)

    reference = read_run(reference_name, paths.pop(reference_name))
    runs = [read_run(name, path) for name, path in paths.items()]
    comparisons = [compare_runs(reference, run, thresholds) for run in runs]
    for comparison in comparisons:
        if comparison.name in dumps:
            add_dumps(comparison, dumps[reference_name], dumps[comparison.name])
        print(comparison_text(comparison, options.max_rows or 40), end="\n\n")
    passed = all(comparison.passed for comparison in comparisons)
    if options.json:
        rows = [comparison_dict(comparison) for comparison in comparisons]
        head = {"reference": reference_name, "thresholds": asdict(thresholds)}
        write_json(options.json, {**head, "comparisons": rows, "passed": passed})
    if options.plot:
        plot_comparisons(options.plot, [reference, *runs], comparisons)
    print("PASS" if passed else "FAIL")
    return passed


def _log_thresholds(options: argparse.Namespace) -> Thresholds:
    loss, grad_norm, dump = options.threshold, options.grad_norm_threshold, options.dump_threshold
    loss = 0.05 if loss is None else loss  # 0 is allowed; it means bitwise equal
    return Thresholds(loss, 10 * loss if grad_norm is None else grad_norm, 1e-4 if dump is None else dump)


def _log_paths(options: argparse.Namespace) -> dict[str, str]:
    """The log of each run by its name, with the default reference first."""
    pair = {"deepspeed": options.deepspeed_log, "fsdp2": options.fsdp2_log}
    given = [name for name, path in pair.items() if path]
    if options.logs and given:
        raise UserError("--logs", f"together with --{given[0]}_log", "one or the other")
    if options.logs:
        paths = _named_paths("--logs", options.logs)
        if len(paths) < 2:
            raise UserError("--logs", "one log", "two or more")
        return paths
    if len(given) < 2:
        raise UserError(
            "arguments", "fewer than two logs", "--deepspeed_log A --fsdp2_log B, --logs a=A b=B, or --run MATRIX"
        )
    return pair


def _named_paths(flag: str, items: list[str]) -> dict[str, str]:
    paths = {}
    for item in items:
        name, _, path = item.partition("=")
        if not name or not path or name in paths:
            raise UserError(flag, repr(item), "NAME=PATH, each name once")
        paths[name] = path
    return paths


def _dump_paths(options: argparse.Namespace, names: list[str], reference: str) -> dict[str, str]:
    if not options.dumps:
        return {}
    dumps = _named_paths("--dumps", options.dumps)
    if unknown := [name for name in dumps if name not in names]:
        raise UserError("--dumps", repr(unknown[0]), f"the names of the logs: {', '.join(names)}")
    if reference not in dumps or len(dumps) < 2:
        raise UserError("--dumps", ", ".join(dumps), f"the reference ({reference}) and at least one other")
    return dumps


if __name__ == "__main__":
    raise SystemExit(main())
