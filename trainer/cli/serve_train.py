"""`serve_train`: train and sample for clients over HTTP, in the shape of Tinker's API.

torchrun --nproc_per_node 2 -m trainer.cli.serve_train --pretrain MODEL --lora_rank 32 --port 8002
"""

import importlib.util

from trainer.entry import run_command
from trainer.errors import UserError
from trainer.flags.common_flags import SFTArguments
from trainer.flags.generating_flags import ServeTrainArguments
from trainer.flags.groups import flat, from_flat
from trainer.flags.names.sources import naming_sources
from trainer.flags.parse_flags import check_given, check_port, parse_arguments
from trainer.flags.rollout_rules import SERVE_TRAIN_RULES
from trainer.flags.rule import first_broken
from trainer.limits import limit, raise_limits
from trainer.rollout.rewards.remote_rewards import read_key
from trainer.runs.flag_checks import check_files_of, check_flags
from trainer.runs.start_line import begin

COMMAND = "serve_train"
DEFAULT_ALPHA = 32  # that of Tinker
PACKAGES = ("uvicorn", "starlette", "google.protobuf")


def check(argv: list[str]) -> tuple[SFTArguments, ServeTrainArguments]:
    """The flags for the code of `train_sft`, and all flags of the server, checked without torch."""
    given = parse_arguments(ServeTrainArguments, COMMAND, argv)
    check_given(given, ("pretrain",))
    if error := first_broken(SERVE_TRAIN_RULES, flat(given), flat(ServeTrainArguments())):
        raise error
    check_port(given.server.port)
    raise_limits(given.server.limits or ())
    if importlib.util.find_spec("google") is None or any(importlib.util.find_spec(name) is None for name in PACKAGES):
        raise UserError(COMMAND, "uvicorn, starlette or protobuf is not installed", "pip install -e '.[serve]'")
    own = {name: value for name, value in flat(given).items() if name not in vars(given.server)}
    own |= {"train_batch_size": 2**20, "no_save": True}
    if given.lora.lora_rank:
        own["lora_alpha"] = given.lora.lora_alpha or DEFAULT_ALPHA
    args = from_flat(SFTArguments, own)
    check_flags("train_sft", args, ("eval_loss",))
    check_files_of(args)
    return args, given


def run(argv: list[str]) -> None:
    args, given = check(argv)
    server = given.server
    begin(COMMAND, args, trains=False)
    # these import torch, which --help does not need, and the extra `serve`
    from trainer.rollout.rewards.http_service import HTTPLimits
    from trainer.runs.api.api_run import serve

    limits = HTTPLimits(
        max_body=(server.max_body_mb or limit("body_mb")) << 20,
        max_connections=server.max_connections or limit("connections"),
        read_timeout=server.read_timeout or limit("request_s"),
        api_key=read_key("--api_key", server.api_key) if server.api_key else None,
    )
    serve(args, server, limits)


def main() -> None:
    run_command(naming_sources(run))


if __name__ == "__main__":
    main()
