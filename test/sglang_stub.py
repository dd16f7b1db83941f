"""A server that speaks the HTTP of SGLang 0.5.23 and runs a tiny model of transformers. SGLang itself needs a GPU.

Paths, methods, fields, answers and statuses are those of `srt/entrypoints/http_server.py`, `srt/managers/io_struct.py`,
`srt/managers/tokenizer_manager.py` and `srt/sampling/sampling_params.py`. Fields that SGLang does not know are refused here;
it ignores some of them. Only the random numbers differ: they are those of our engines, so that runs can be compared.
"""

import json
import threading
import time
import uuid
from pathlib import Path

import torch
from quiet_server import QuietHandler, QuietServer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.rollout.engines.sampling import pick_tokens, uniform_numbers

# the fields of a request that are plain data, with their types
GENERATE = {
    "rid": str,
    "text": str,
    "input_ids": list,
    "sampling_params": dict,
    "return_logprob": bool,
    "logprob_start_len": int,
}
GENERATE |= {"top_logprobs_num": int, "token_ids_logprob": list, "return_sampling_mask": bool, "stream": bool}
GENERATE |= {"return_text_in_logprobs": bool, "return_hidden_states": bool, "return_prompt_token_ids": bool}
SAMPLING = {
    "max_new_tokens": 128, "stop": None, "stop_token_ids": None, "stop_regex": None, "temperature": 1.0, "top_p": 1.0,
    "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
    "min_new_tokens": 0, "n": 1, "beam_width": None, "json_schema": None, "regex": None, "ebnf": None,
    "structural_tag": None, "ignore_eos": False, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "no_stop_trim": False, "stream_interval": None, "logit_bias": None, "sampling_seed": None, "custom_params": None,
}  # fmt: skip
UPDATE = {
    "rid": str,
    "model_path": str,
    "load_format": str,
    "abort_all_requests": bool,
    "weight_version": str,
    "is_async": bool,
}
UPDATE |= {"torch_empty_cache": bool, "keep_pause": bool, "recapture_cuda_graph": bool, "token_step": int}
UPDATE |= {"flush_cache": bool, "manifest": dict}
ABORT = {"rid": str, "abort_all": bool, "finished_reason": dict, "abort_message": str}
METHODS = {
    "/generate": ("POST", "PUT"), "/update_weights_from_disk": ("POST",), "/abort_request": ("POST",),
    "/model_info": ("GET",), "/server_info": ("GET",), "/health": ("GET",),
}  # fmt: skip


class Wrong(Exception):
    """A request that is answered by a status and a JSON."""

    def __init__(self, status: int, answer):
        super().__init__(str(answer))
        self.status, self.answer = status, answer


def checked(body, fields: dict) -> dict:
    """Raises Wrong, as pydantic does, for fields of another type. Unknown fields are wrong as well."""
    for name, value in body.items():
        kind = fields.get(name)
        if kind is None or not (value is None or isinstance(value, kind)) or (kind is int and isinstance(value, bool)):
            message = f"{name}: {value!r}"
            raise Wrong(400, {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400})
    return body


class SGLangStub:
    """`dies_after` answers, it is gone for `gone` seconds, and then has the weights and the version of its folder."""

    def __init__(
        self, folder: str, *, key=None, dies_after: int = 0, gone: float = 1.0, ignores_after: int = 99, **flags
    ):
        """After `ignores_after` updates, it says that it has read weights, and has not. `flags` are those of SGLang."""
        self.folder, self._key, self._dies_after, self._gone, self._ignores_after = (
            folder,
            key,
            dies_after,
            gone,
            ignores_after,
        )
        self.info = {
            "dtype": "float32", "quantization": None, "speculative_algorithm": None, "disaggregation_mode": "null",
            "preferred_sampling_params": None, "enable_deterministic_inference": True, "context_length": None,
            "sampling_mask_max_tokens": 4096, "max_total_num_tokens": 4096, "max_req_input_len": 1018, "version": "0.5.23",
        } | flags  # fmt: skip
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model, self.version = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), "default"
        self.eos = {self.tokenizer.eos_token_id}
        self.updates: list[dict] = []
        self.asked: list[dict] = []
        self.died_after = 0  # requests
        self._lock, self._num_aborts, self._back_at = threading.Lock(), 0, 0.0
        self.hurry = lambda: None  # called before each token
        outer = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                status, answer = outer.answer(self.command, self.path, self.rfile.read(size), self.headers)
                if status is None:  # as a process that is killed
                    self.connection.close()
                    return
                self.reply(status, answer)

            do_POST = do_PUT = do_GET

        self.url = QuietServer(Handler).url

    def die(self, seconds: float) -> None:
        """Be gone, and start again."""
        self._back_at, self.version, self.died_after = float("inf"), "default", len(self.asked)
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        self._back_at = time.monotonic() + seconds

    def answer(self, method: str, path: str, data: bytes, headers) -> tuple:
        """(status, JSON or None for an empty body) of an answer. A status None: it is gone."""
        if time.monotonic() < self._back_at:
            return None, None
        if self._key and path != "/health" and headers.get("Authorization") != f"Bearer {self._key}":
            return 401, {"error": "Unauthorized"}
        if method not in METHODS.get(path, ()):
            return (405, {"detail": "Method Not Allowed"}) if path in METHODS else (404, {"detail": "Not Found"})
        try:
            return getattr(self, path[1:])(*([json.loads(data)] if method != "GET" else []))
        except Wrong as wrong:
            return wrong.status, wrong.answer

    def health(self) -> tuple:
        return 200, None

    def server_info(self) -> tuple:
        return 200, self.info

    def model_info(self) -> tuple:
        return 200, {"model_path": self.folder, "is_generation": True, "weight_version": self.version}

    def abort_request(self, body: dict) -> tuple:
        if checked(body, ABORT).get("abort_all"):
            self._num_aborts += 1
        return 200, None

    def update_weights_from_disk(self, body: dict) -> tuple:
        checked(body, UPDATE)
        self.updates.append(body)
        with self._lock:  # it waits for requests that run
            problem = None if len(self.updates) > self._ignores_after else self._read(Path(body["model_path"]))
            if problem:
                return 400, {"success": False, "message": problem, "num_paused_requests": 0}
            self.version = body.get("weight_version") or self.version
        message = f"Succeeded to update model weights. Weight version updated to {self.version}."
        return 200, {"success": True, "message": message, "num_paused_requests": 0}

    def _read(self, folder: Path):
        """Read the weights, or return the problem. As in SGLang, one that is missing keeps its old value."""
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            return f"Failed to get weights iterator: Cannot find any model weights with `{folder}`."
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
        own = self.model.state_dict()
        wrong = [name for name in found if name not in own or found[name].shape != own[name].shape]
        if wrong:
            return f"Failed to update weights: {wrong[0]}.\nRolling back to original weights."
        self.model.load_state_dict(found, strict=False)
        return None

    def generate(self, body: dict) -> tuple:
        self.asked.append(checked(body, GENERATE))
        params = SAMPLING | body["sampling_params"]
        if unknown := params.keys() - SAMPLING.keys():
            raise Wrong(400, {"error": {"message": f"Unexpected keyword argument {sorted(unknown)}"}})
        if body.get("return_sampling_mask") and not 1 <= params["top_k"] <= self.info["sampling_mask_max_tokens"]:
            raise Wrong(
                400, {"error": {"message": f"return_sampling_mask requires finite top_k; got {params['top_k']}"}}
            )
        with self._lock:
            found = self._sample(body, params)
        if self._dies_after and len(self.asked) >= self._dies_after:
            self._dies_after = 0
            self.die(self._gone)
            return None, None
        return 200, found

    @torch.no_grad()
    def _sample(self, body: dict, params: dict) -> dict:
        prompt, ids, log_probs, masks, mask_log_probs = body["input_ids"], [], [], [], []
        limit = max(0, min(params["max_new_tokens"], self.info["max_req_input_len"] + 4 - len(prompt)))
        greedy, aborts, reason = params["temperature"] < 1e-6, self._num_aborts, {"type": "length", "length": limit}
        uniforms = None if greedy else uniform_numbers([params["sampling_seed"]], max(limit, 1))
        while len(ids) < limit:
            self.hurry()
            if self._num_aborts > aborts:
                reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                break
            logits = self.model(torch.tensor([[*prompt, *ids]])).logits[0, -1:]
            whole = torch.log_softmax(logits / (1 if greedy else params["temperature"]), -1)
            kept = self._kept(whole[0], params)
            cut = torch.log_softmax(whole.masked_fill(~kept, float("-inf")), -1)
            token = int(whole.argmax() if greedy else pick_tokens(cut, uniforms[:, len(ids)]))
            ids.append(token)
            log_probs.append([whole[0, token].item(), token, None])
            masks.append(kept.nonzero().flatten().tolist())
            mask_log_probs.append(cut[0, token].item())
            if (stop := self._stop(ids, params)) is not None:
                reason = {"type": "stop", "matched": stop}
                break
        info = {
            "id": uuid.uuid4().hex,
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "weight_version": self.version,
        }
        info |= {"completion_tokens": len(ids), "cached_tokens": 0, "num_retractions": 0, "reasoning_tokens": 0}
        if body.get("return_logprob"):
            info |= {
                "input_token_logprobs": [],
                "output_token_logprobs": log_probs,
                "output_token_logprobs_length": len(ids),
            }
        if body.get("return_sampling_mask"):
            info |= {"output_token_sampling_mask": masks, "output_token_sampling_logprobs": mask_log_probs}
            info |= {"output_token_sampling_mask_length": len(masks)}
        text = self.tokenizer.decode(ids, skip_special_tokens=params["skip_special_tokens"])
        return {"text": text, "output_ids": ids, "meta_info": info}

    @staticmethod
    def _kept(log_probs: torch.Tensor, params: dict) -> torch.Tensor:
        """Which tokens remain: those within top_k, and those before which less than top_p is, of the whole distribution."""
        values, order = log_probs.sort(descending=True, stable=True)
        probs = values.exp()
        stays = probs.cumsum(0) - probs <= params["top_p"]
        if params["top_k"] > 0:
            stays[params["top_k"] :] = False
        return torch.zeros_like(stays).scatter(0, order, stays)

    def _stop(self, ids: list[int], params: dict):
        """What ends the response. As in SGLang, ignore_eos also switches off stop_token_ids."""
        if not params["ignore_eos"] and ids[-1] in {*self.eos, *(params["stop_token_ids"] or ())}:
            return ids[-1]
        texts, tail = params["stop"] or [], self.tokenizer.decode(ids[-32:])
        return next((text for text in ([texts] if isinstance(texts, str) else texts) if text in tail), None)
