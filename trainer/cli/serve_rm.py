"""`serve_rm`: answer the requests of `train_ppo --remote_rm_url` with the scores of a reward model.

python -m trainer.cli.serve_rm --reward_pretrain runs/rm/model --port 8000
"""

import importlib.util
import ipaddress
import signal
import socket
from dataclasses import dataclass
from typing import Literal, Optional

from trainer.entry import quiet_libraries, run_command
from trainer.errors import UserError
from trainer.flags.common_flags import arg, parse_arguments


@dataclass
class ServeArguments:
    """Reward server"""

    reward_pretrain: Optional[str] = arg(None, "reward model folder, as train_rm writes it")
    host: str = arg("127.0.0.1", "address to listen on")
    port: int = arg(8000, "port to listen on; 0 takes a free one", type="NonNegativeInt")
    api_key: Optional[str] = arg(
        None, "file that holds the key that requests must send; needed if --host is not this machine alone"
    )
    batch_size: int = arg(16, "texts per forward pass, of several requests together", type="PositiveInt")
    max_body_mb: int = arg(64, "largest request, in MB; all requests together hold 16 times this", type="PositiveInt")
    max_queue: int = arg(16384, "texts that wait at a time; a request beyond them gets 503", type="PositiveInt")
    max_connections: int = arg(1024, "connections at a time; one beyond them gets 503", type="PositiveInt")
    read_timeout: float = arg(30.0, "seconds for a whole request to arrive", type="PositiveFloat")
    max_len: int = arg(4096, "longer texts are cut at their beginning to this many tokens", type="PositiveInt")
    param_dtype: Literal["bf16", "fp32"] = arg("bf16", "compute dtype")
    device: Literal["auto", "cpu", "cuda"] = arg("auto", "auto: CUDA if there is a GPU, else the CPU")
    trust_remote_code: bool = arg(False, "run Python code that comes with the model or tokenizer")


class RewardServer:
    """Scores responses to prompts, batch by batch."""

    def __init__(self, args: ServeArguments):
        from transformers import AutoModelForSequenceClassification

        from trainer.datasets.samples.prompts import chat_ends
        from trainer.distributed.mesh import resolve_device
        from trainer.models.cpu_matmul import choose_cpu_matmul
        from trainer.models.model_loading import load_tokenizer, resolve_model_folder
        from trainer.models.reward import scoring_pad
        from trainer.strategies.options import DTYPES

        if args.reward_pretrain is None:
            raise UserError("--reward_pretrain", "missing", "a reward model folder")
        folder = resolve_model_folder(args.reward_pretrain, "--reward_pretrain")
        self.args, self.tokenizer = args, load_tokenizer(folder, args.trust_remote_code)
        options = {"dtype": DTYPES[args.param_dtype], "trust_remote_code": args.trust_remote_code}
        model = AutoModelForSequenceClassification.from_pretrained(folder, **options)
        if model.config.num_labels != 1:
            raise UserError("--reward_pretrain", f"{folder} has {model.config.num_labels} labels", "1")
        self.model = model.to(resolve_device(args.device)).eval()
        if self.model.device.type == "cpu":
            choose_cpu_matmul("auto")
        self.ends, self.pad_token_id = chat_ends(self.tokenizer), scoring_pad(model, self.tokenizer)

    def input_ids(self, prompt: str, response: str, finished: bool = True) -> list[int]:
        """Return the tokens of a prompt and a response in the form of the training data.

        A finished response gets the end token and, in a chat, what the template adds after it. An unfinished response
        gets neither.
        """
        return self._rows([prompt], [response], [finished])[0]

    def _rows(self, prompts: list[str], responses: list[str], finished: list[bool]) -> list[list[int]]:
        """The `input_ids` of several texts. The tokenizer reads all of them in one call, which is faster."""
        from trainer.datasets.samples.prompts import as_conversation

        eos = self.tokenizer.eos_token_id
        ids = iter(self.tokenizer([*prompts, *responses], add_special_tokens=False)["input_ids"])
        prompt_ids, rows = [next(ids) for _ in prompts], []
        for before, response_ids, ended in zip(prompt_ids, ids, finished):
            rows.append(before + as_conversation(before, response_ids + [eos] * ended, self.ends, eos))
        return [row[-self.args.max_len :] for row in rows]

    def score(self, prompts: list[str], responses: list[str], finished: Optional[list[bool]] = None) -> list[float]:
        import torch

        from trainer.datasets.samples.answers import scored_position

        finished = [True] * len(responses) if finished is None else finished
        if not len(prompts) == len(responses) == len(finished):
            raise ValueError(f"{len(prompts)} prompts, {len(responses)} responses, {len(finished)} finished")
        ids = self._rows(prompts, responses, finished) if prompts else []
        scores = []
        for start in range(0, len(ids), self.args.batch_size):
            part = {"input_ids": ids[start : start + self.args.batch_size]}
            batch = self.tokenizer.pad(part, padding_side="right", return_tensors="pt").to(self.model.device)
            last = [scored_position(sequence, self.pad_token_id) for sequence in part["input_ids"]]
            with torch.no_grad():
                hidden = getattr(self.model, self.model.base_model_prefix)(**batch).last_hidden_state
                token_scores = self.model.score(hidden[torch.arange(len(last)), last])
            scores += token_scores[:, 0].float().tolist()
        return scores


def limits_of(args: ServeArguments):
    """The limits of the service. Raises UserError for an open address without a key."""
    from trainer.rollout.rewards.remote_rewards import read_key
    from trainer.rollout.rewards.reward_service import Limits

    if args.api_key is None and not is_loopback(args.host):
        raise UserError("--api_key", f"missing with --host {args.host}, which others can reach", "a file with a key")
    key = read_key("--api_key", args.api_key) if args.api_key else None
    max_body = args.max_body_mb << 20
    return Limits(args.batch_size, max_body, args.max_queue, args.max_connections, args.read_timeout, key)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def run(argv: list[str]) -> None:
    args = parse_arguments(ServeArguments, "serve_rm", argv)
    quiet_libraries()
    if importlib.util.find_spec("uvicorn") is None or importlib.util.find_spec("starlette") is None:
        raise UserError("serve_rm", "uvicorn and starlette are not installed", "pip install -e '.[serve]'")
    from trainer.rollout.rewards.reward_service import make_server

    limits = limits_of(args)
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    try:
        listening = socket.create_server((args.host, args.port), family=family, backlog=1024)
    except OSError as error:
        raise UserError("--port", f"{args.host}:{args.port}: {error.strerror}") from None
    server = make_server(RewardServer(args).score, limits)
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises the signal again when it has shut down
        signal.signal(number, lambda *_: None)
    host = f"[{args.host}]" if ":" in args.host else args.host
    print(f"scoring at http://{host}:{listening.getsockname()[1]}", flush=True)
    server.run(sockets=[listening])


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
