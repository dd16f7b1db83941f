"""`serve_rm`: answer the requests of `train_ppo --remote_rm_url` with the scores of a reward model.

python -m trainer.cli.serve_rm --reward_pretrain runs/rm/model --port 8000
"""

import importlib.util
from dataclasses import dataclass
from typing import Literal, Optional

from trainer.entry import quiet_libraries, run_command
from trainer.errors import UserError
from trainer.flags.generating_flags import RequestArguments
from trainer.flags.groups import of_table
from trainer.flags.parse_flags import arg, check_port, parse_group
from trainer.flags.rollout_rules import SERVER_RULES
from trainer.flags.rule import first_broken
from trainer.limits import limit, raise_limits


@dataclass
class ServeArguments(RequestArguments):
    """Reward server"""

    reward_pretrain: Optional[str] = arg(None, "reward model folder, as train_rm writes it")
    port: int = arg(8000, "port to listen on; 0 takes a free one", type="NonNegativeInt")
    batch_size: int = arg(16, "texts per forward pass, of several requests together", type="PositiveInt")
    max_queue: Optional[int] = of_table("queue", "texts that wait at a time; a request beyond them gets 503")
    max_text_kb: Optional[int] = of_table("text_kb", "longest text of a prompt or a response, in KB")
    max_len: Optional[int] = arg(
        None,
        "longer texts are cut at their beginning to this many tokens, and counted (default: 4096, or the model's positions "
        "if they are fewer)",
        type="PositiveInt",
    )
    param_dtype: Literal["auto", "bf16", "fp32"] = arg("auto", "compute dtype; auto as in training")
    device: Literal["auto", "cpu", "cuda"] = arg("auto", "auto: CUDA if there is a GPU, else the CPU")
    trust_remote_code: bool = arg(False, "run Python code that comes with the model or tokenizer")


def check_arguments(args: ServeArguments) -> None:
    """Raise UserError for a missing model or package, or an open address without a key."""
    if importlib.util.find_spec("uvicorn") is None or importlib.util.find_spec("starlette") is None:
        raise UserError("serve_rm", "uvicorn and starlette are not installed", "pip install -e '.[serve]'")
    if error := first_broken(SERVER_RULES, vars(args), vars(ServeArguments())):
        raise error
    check_port(args.port)
    raise_limits(args.limits or ())
    if args.reward_pretrain is None:
        raise UserError("--reward_pretrain", "missing", "a reward model folder")


def run(argv: list[str]) -> None:
    args = parse_group(ServeArguments, "serve_rm", argv)
    quiet_libraries()
    check_arguments(args)
    # these import torch, which --help does not need, and the extra `serve`
    from trainer.rollout.rewards.http_service import listen
    from trainer.rollout.rewards.model_scorer import ModelScorer
    from trainer.rollout.rewards.remote_rewards import read_key
    from trainer.rollout.rewards.reward_service import Limits, serve
    from trainer.runs.start_line import resolve_dtype
    from trainer.strategies.dtypes import DTYPES

    key = read_key("--api_key", args.api_key) if args.api_key else None
    limits = Limits(
        batch_size=args.batch_size,
        max_body=(args.max_body_mb or limit("body_mb")) << 20,
        max_text=(args.max_text_kb or limit("text_kb")) << 10,
        max_queue=args.max_queue or limit("queue"),
        max_connections=args.max_connections or limit("connections"),
        read_timeout=args.read_timeout or limit("request_s"),
        api_key=key,
    )
    listening = listen(args.host, args.port)
    scorer = ModelScorer(
        args.reward_pretrain,
        dtype=DTYPES[resolve_dtype(args.param_dtype, args.device)],
        device=args.device,
        batch_size=args.batch_size,
        max_len=args.max_len,
        trust_remote_code=args.trust_remote_code,
    )
    serve(scorer.score_and_cuts, limits, listening, args.host)


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
