"""`verify_run RUN`: check a run against its certificate: same data, same order, same curve, same weights.

python -m trainer.cli.verify_run runs/X                     check files, data, order, learning rates, checkpoints
python -m trainer.cli.verify_run runs/X --certify K         also replay K steps with the plain loop
torchrun --nproc_per_node N -m trainer.cli.verify_run runs/X --rerun DIR [-- FLAGS]
                                                            also train again, in another layout, and compare the curve

Exit code: 0 if all that could be checked is as certified, 1 if something is not, 2 if nothing could be checked.
"""

import sys

from trainer.entry import run_command
from trainer.errors import UserError
from trainer.flags.names.word_parser import ReadingParser


def run(argv: list[str]) -> None:
    own, flags = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = ReadingParser("verify_run", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="the folder of a finished run")
    parser.add_argument("--dataset", metavar="FILE", help="where the data of --dataset is on this machine")
    parser.add_argument("--pretrain", metavar="DIR", help="where the model of --pretrain is on this machine")
    code = "let code of the model folder run; a certificate cannot grant this"
    parser.add_argument("--trust_remote_code", action="store_true", help=code)
    parser.add_argument("--key", metavar="PUB", help="the ed25519 public key that must have signed the certificate")
    parser.add_argument("--sign_key", metavar="FILE", help="with --certify: sign the new certificate with this key")
    parser.add_argument("--certify", type=int, metavar="K", help="replay K random steps and write the result into RUN")
    parser.add_argument("--device", default="cpu", help="where --certify computes (default: cpu)")
    parser.add_argument("--rerun", metavar="DIR", help="train again into the new folder DIR, and compare the curve")
    args = parser.parse_args(own)
    if flags and not args.rerun:
        raise UserError("--", "flags without --rerun", "--rerun DIR -- FLAGS")
    if args.certify is not None and args.certify < 1:
        raise UserError("--certify", str(args.certify), "an integer above 0")
    if args.sign_key and args.certify is None:
        raise UserError("--sign_key", "nothing to sign without --certify", "--certify K --sign_key FILE")
    # not at the top: torch is not needed for --help
    from trainer.compare.certificates.verification import verify_run

    places = {"dataset": args.dataset, "pretrain": args.pretrain}
    if args.rerun and args.trust_remote_code:
        flags = ["--trust_remote_code", *flags]
    rights = (args.trust_remote_code, args.key, args.sign_key)
    if not verify_run(args.run, places, args.certify, args.device, args.rerun, flags, *rights):
        sys.exit(1)


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
