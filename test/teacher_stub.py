"""A stand-in for a vLLM server that knows a real tiny teacher: /v1/models, /detokenize and prompt_logprobs of /v1/completions."""

import json

import torch
from quiet_server import QuietHandler, QuietServer
from transformers import AutoModelForCausalLM, AutoTokenizer

MOST = 20  # --max-logprobs of vLLM


class TeacherStub(QuietServer):
    """`troubles` are statuses of the next answers to /v1/completions; `after` many of these, the server is gone."""

    def __init__(
        self, folder, key: str | None = None, max_len: int = 100, troubles: tuple = (), after: float = float("inf")
    ):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.key, self.max_len, self.troubles, self.after, self.asked = key, max_len, list(troubles), after, []
        super().__init__(Handler)


class Handler(QuietHandler):
    def do_GET(self) -> None:
        self.reply(200, {"object": "list", "data": [{"id": "tiny", "max_model_len": self.server.max_len}]})

    def do_POST(self) -> None:
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if server.key and self.headers["Authorization"] != f"Bearer {server.key}":
            return self.reply(401, {"error": "Unauthorized"})
        assert body["model"] == "tiny" and len(body.get("tokens", ())) < server.max_len
        if self.path == "/detokenize":
            return self.reply(200, {"prompt": server.tokenizer.decode(body["tokens"])})
        assert self.path == "/v1/completions" and body["max_tokens"] == 1
        server.asked.append(body["prompt"])
        if len(server.asked) > server.after:
            return server.server_close()
        if server.troubles:
            return self.reply(server.troubles.pop(0), {"error": {"message": "busy"}})
        if (k := body["prompt_logprobs"]) > MOST:
            return self.reply(
                400, {"error": {"message": f"prompt logprobs of {k}, which is greater than max allowed: {MOST}"}}
            )
        return self.reply(200, {"choices": [{"text": "x", "prompt_logprobs": places(server.model, body["prompt"], k)}]})


@torch.no_grad()
def places(model, prompt: list[int], k: int) -> list:
    """As vLLM: nothing for the first token; then the token that is there, and the `k` likeliest ones."""
    log_probs, found = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1), [None]
    for token, here in zip(prompt[1:], log_probs):
        shown = {token, *here.topk(k).indices.tolist()}
        ranks = {one: int((here > here[one]).sum()) + 1 for one in shown}
        found.append(
            {str(one): {"logprob": here[one].item(), "rank": ranks[one], "decoded_token": "?"} for one in shown}
        )
    return found
