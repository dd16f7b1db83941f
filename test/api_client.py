"""A plain HTTP client that speaks the recorded format of the SDK of Tinker 0.38, without that package."""

import itertools
import json
import urllib.request

import numpy as np

from trainer.runs.api.api_messages import CLASSES


class Client:
    def __init__(self, url: str, key: str = "tml-test"):
        self.url, self.key, self.seq = url, key, {}
        self.session = self.ask("create_session", tags=[], user_metadata={}, sdk_version="0.38.0")["session_id"]

    def post(self, path: str, body: bytes, **headers: str) -> bytes:
        """The body of the answer. Raises HTTPError."""
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", body, {"X-API-Key": self.key, **headers})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    def delete(self, path: str) -> None:
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", headers={"X-API-Key": self.key}, method="DELETE")
        urllib.request.urlopen(request, timeout=60).close()

    def ask(self, path: str, /, **values) -> dict:
        return json.loads(self.post(path, json.dumps(values).encode()))

    def result(self, future: dict, proto: str = ""):
        """The result of a future: JSON, or the message `proto`."""
        body = self.post("retrieve_future", json.dumps({"request_id": future["request_id"]}).encode())
        return CLASSES[proto].FromString(body) if proto and body[:1] != b"{" else json.loads(body)

    def next(self, model: str) -> dict:
        self.seq[model] = self.seq.get(model, 0) + 1
        return {"model_id": model, "seq_id": self.seq[model]}

    def create(self, base: str, number: int, rank: int, seed: int) -> str:
        own = {"session_id": self.session, "model_seq_id": number, "base_model": base}
        return self.result(self.ask("create_model", **own, lora_config={"rank": rank, "seed": seed}))["model_id"]

    def batch(self, model: str, rows: list[dict], loss_fn: str, forward_only: bool = False, **config: float) -> dict:
        """The future of forward_backward. A row has input_ids, target_tokens and arrays."""
        message = CLASSES["ForwardBackwardRequest"](loss_fn=loss_fn, forward_only=forward_only, **self.next(model))
        for name, value in config.items():
            message.loss_fn_config[name] = value
        for row in rows:
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(row["input_ids"], np.int32).tobytes()
            for name in row.keys() - {"input_ids"}:
                is_whole = name == "target_tokens" and np.array(row[name]).dtype.kind == "i"
                kind, number = (np.int64, 2) if is_whole else (np.float32, 1)
                tensor = datum.loss_fn_inputs[name]
                tensor.dense, tensor.dtype = np.array(row[name], kind).tobytes(), number
                tensor.shape.append(len(row[name]))
        return json.loads(self.post("forward_backward", message.SerializeToString()))

    def loss(self, future: dict) -> float:
        return self.result(future, "ForwardBackwardOutput").metrics["loss:sum"]

    def log_probs(self, future: dict) -> list[np.ndarray]:
        [record] = self.result(future, "ForwardBackwardOutput").loss_fn_outputs
        field = record.fields["logprobs"]
        values, ends = np.frombuffer(field.data, np.float32), np.frombuffer(field.offsets, np.int64) // 4
        return [values[start:end] for start, end in itertools.pairwise(ends)]

    def step(self, model: str, rate: float) -> dict:
        adam = {"learning_rate": rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
        return self.ask("optim_step", **self.next(model), adam_params={**adam, "grad_clip_norm": 1.0})
