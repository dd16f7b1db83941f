"""`serve_rm`: answer the requests of `train_ppo --remote_rm_url` with the scores of a reward model.

python -m trainer.cli.serve_rm --reward_pretrain runs/rm/model --port 8000
"""

import http.server
import json
from dataclasses import dataclass
from typing import Literal, Optional

from trainer.arguments import arg, parse_arguments
from trainer.cli.entry import quiet_libraries, run_command
from trainer.errors import UserError


@dataclass
class ServeArguments:
    """Reward server"""

    reward_pretrain: Optional[str] = arg(None, "reward model folder, as train_rm writes it")
    host: str = arg("127.0.0.1", "address to listen on")
    port: int = arg(8000, "port to listen on; 0 takes a free one", type="NonNegativeInt")
    batch_size: int = arg(16, "texts per forward pass", type="PositiveInt")
    max_len: int = arg(4096, "longer texts are cut at their beginning to this many tokens", type="PositiveInt")
    param_dtype: Literal["bf16", "fp32"] = arg("bf16", "compute dtype")
    device: Literal["auto", "cpu", "cuda"] = arg("auto", "auto: CUDA if there is a GPU, else the CPU")
    trust_remote_code: bool = arg(False, "run Python code that comes with the model or tokenizer")


class RewardServer:
    """Scores responses to prompts, batch by batch."""

    def __init__(self, args: ServeArguments):
        from transformers import AutoModelForSequenceClassification

        from trainer.datasets.prompts import chat_ends
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
        from trainer.datasets.prompts import as_conversation

        prompt_ids = list(self.tokenizer(prompt, add_special_tokens=False)["input_ids"])
        eos = self.tokenizer.eos_token_id
        response_ids = [*self.tokenizer(response, add_special_tokens=False)["input_ids"], *[eos] * finished]
        whole = prompt_ids + as_conversation(prompt_ids, response_ids, self.ends, eos)
        return whole[-self.args.max_len :]

    def score(self, prompts: list[str], responses: list[str], finished: Optional[list[bool]] = None) -> list[float]:
        import torch

        from trainer.datasets.answers import scored_position

        finished = [True] * len(responses) if finished is None else finished
        ids = [self.input_ids(*texts) for texts in zip(prompts, responses, finished, strict=True)]
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

    def handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        """Return a handler class for http.server.

        A POST has prompts, responses and, if known, finished (true or false for each). The answer has rewards. A bad
        request gets 400 with the reason.
        """
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                try:
                    request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                    scores = server.score(request["prompts"], request["responses"], request.get("finished"))
                    status, answer = 200, {"rewards": scores}
                except (ValueError, KeyError, TypeError) as error:
                    status, answer = 400, {"error": f"{type(error).__name__}: {error}"}
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_) -> None:
                pass

        return Handler


def run(argv: list[str]) -> None:
    args = parse_arguments(ServeArguments, "serve_rm", argv)
    quiet_libraries()
    server = RewardServer(args)
    try:
        listening = http.server.HTTPServer((args.host, args.port), server.handler())  # one request at a time
    except OSError as error:
        raise UserError("--port", f"{args.host}:{args.port}: {error.strerror}") from None
    print(f"scoring at http://{args.host}:{listening.server_port}", flush=True)
    listening.serve_forever()


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
