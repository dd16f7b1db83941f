"""The HTTP service of `serve_train`: models, samplers and futures, as the SDK of Tinker 0.38 asks for them.

It checks requests, and gives jobs to the ranks one after the other. A request that was sent twice is one job: its id is that
of its model and its place in the order of requests.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Optional

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trainer.datasets.rows import HALF
from trainer.errors import UserError
from trainer.limits import limit
from trainer.metrics import counted
from trainer.models.losses.client_loss import CLIENT_LOSSES
from trainer.rollout.engines.sampling import Sampling, sample_seed
from trainer.rollout.peers import BadAnswer, check_values
from trainer.rollout.rewards.http_service import Door, HTTPLimits, Refused, as_json
from trainer.runs.api.api_messages import LARGEST, adam_of, batch_output, number_of, read_batch, sample_output, whole_of
from trainer.runs.api.api_sessions import Job, Session, Sessions
from trainer.runs.api.client_models import FACTS

PREFIX = "/api/v1/"
POLL_SECONDS = 20  # a poll of a future is answered after so long; the client then asks again
MOST_SAMPLES = 4096  # of one prompt
LEAST_TEMPERATURE = 1e-5  # below, logits overflow
MOST_STOPS, STOP_LENGTH = 64, 1000  # texts that end a response; each token is compared with all
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
# what a request to sample may name, and the only value that is offered
NOT_OFFERED = {"topk_prompt_logprobs": 0, "topk_sample_logprobs": 0, "target_prompt_logprobs": None}
NOT_OFFERED |= {"prompt_alt_tokens_k": 0, "record_stability_info": False}
WARNING = "this server trains no adapter on the unembedding, so train_unembed has no effect; saved weights have no ttl"
SAVED = "training_runs/{model}/checkpoints/{kind}/{name}"


@dataclass(frozen=True)
class Offer:
    """What the server offers: one base model, its longest text, the tokens that end a response, and a folder for weights."""

    base_model: str
    max_len: int
    max_clients: int
    stop_ids: tuple[int, ...]
    vocab_size: int
    folder: str
    seed: int
    is_lora: bool


class TrainingService:
    def __init__(self, jobs: SimpleQueue, offer: Offer, limits: HTTPLimits):
        self._sessions, self._offer, self._door = Sessions(jobs, offer.max_clients), offer, Door(limits)
        self._owner, self._sampled = self._sessions.owner, 0

    def app(self) -> Starlette:
        answers = {
            "client/config": lambda ask: {"parallel_fwdbwd_chunks": False, "use_pyqwest_transport": False},
            "client/dynamic_config": lambda ask: {},
            "telemetry": lambda ask: {"status": "accepted"},
            "cancel_future": lambda ask: {},
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "get_info": lambda ask: self._owner(ask["model_id"]).models[ask["model_id"]],
            "optim_step": self._optim_step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
        }
        routes = [Route(PREFIX + name, self._of_json(answer), methods=["POST"]) for name, answer in answers.items()]
        routes += [
            Route(PREFIX + "forward_backward", self._door.guarded(self._forward_backward), methods=["POST"]),
            Route(PREFIX + "retrieve_future", self._door.guarded(self._retrieve), methods=["POST"]),
            Route(PREFIX + "get_server_capabilities", self._of_json(self._capabilities), methods=["GET"]),
            Route(PREFIX + "sessions/{session}/finish", self._door.guarded(self._finish), methods=["POST"]),
            Route(PREFIX + SAVED, self._door.guarded(self._delete), methods=["DELETE"]),
            Route(PREFIX + "samplers/{sampler}", self._door.guarded(self._sampler), methods=["GET"]),
            Route(PREFIX + "healthz", self._of_json(lambda ask: {"status": "ok"}), methods=["GET"]),
            Route("/{path:path}", self._door.guarded(_not_offered), methods=["GET", "POST", "PUT", "DELETE"]),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app):
        ends = asyncio.create_task(self._sessions.end_idle())
        yield
        ends.cancel()

    # --- requests as JSON, and futures

    def _of_json(self, answer: Callable[[dict], dict]) -> Callable:
        async def endpoint(request: Request) -> Response:
            async with self._door.body(request) as body:
                try:
                    return as_json(answer(_read(body or b"{}")))
                except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError, AttributeError) as error:
                    raise Refused(422, f"{type(error).__name__}: {error}") from None
                except UserError as error:
                    raise Refused(422, str(error)) from None

        return self._door.guarded(endpoint)

    async def _retrieve(self, request: Request) -> Response:
        async with self._door.body(request) as body:
            key = str(_read(body).get("request_id"))
        if not (found := await self._sessions.answer(key, POLL_SECONDS)):
            return as_json({"type": "try_again", "request_id": key, "queue_state": "active"}, 408)
        return Response(found[0], media_type=found[1], headers={"Connection": "close"})

    # --- sessions and models

    def _create_session(self, ask: dict) -> dict:
        return {"type": "create_session", "session_id": self._sessions.open(), "warning_message": WARNING}

    def _heartbeat(self, ask: dict) -> dict:
        self._sessions.session(ask["session_id"])
        return {"type": "session_heartbeat"}

    async def _finish(self, request: Request) -> Response:
        async with self._door.body(request):
            self._sessions.end(request.path_params["session"])
        return as_json({})

    def _capabilities(self, ask: dict) -> dict:
        facts = {"max_context_length": self._offer.max_len, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": self._offer.base_model, **facts}]}

    def _make_model(self, ask: dict, rank: Optional[int], method: str, own: dict) -> dict:
        """The future of a new model, which `method` makes."""
        session = self._sessions.session(ask["session_id"])
        model_id = f"{ask['session_id']}:train:{ask['model_seq_id']:d}"
        if (key := f"{model_id}:create") not in session.futures:
            facts = {
                "type": "get_info", "model_id": model_id, "model_name": self._offer.base_model,
                "model_data": {"model_name": self._offer.base_model},
                "is_lora": self._offer.is_lora, "lora_rank": rank,
            }  # fmt: skip
            self._sessions.add_model(session, model_id, facts)
        return self._sessions.submit(session, key, Job(method, {"model_id": model_id, **own}), makes=model_id)

    def _check_base(self, name: Optional[str]) -> None:
        if name not in (None, self._offer.base_model):
            raise UserError("base_model", name, self._offer.base_model)

    def _create_model(self, ask: dict) -> dict:
        self._check_base(ask["base_model"])
        _check_adam(ask.get("optimizer_config"))
        lora = ask.get("lora_config") or {"rank": 0}
        rank, seed = whole_of("lora_config.rank", lora["rank"], 0, 2**31), lora.get("seed")
        own = {"rank": rank, "seed": None if seed is None else whole_of("lora_config.seed", seed, 0, 2**63 - 1)}
        own |= {"attention": lora.get("train_attn", True), "mlp": lora.get("train_mlp", True)}
        return self._make_model(ask, rank or None, "create", own)

    async def _forward_backward(self, request: Request) -> Response:
        async with self._door.body(request) as body:
            try:
                ask = read_batch(body)
                self._check_batch(ask)
            except UserError as error:
                raise Refused(422, str(error)) from None
        names = ("model_id", "rows", "loss_fn", "loss_fn_config", "forward_only")
        job = Job("forward_backward", {name: ask[name] for name in names}, num_bytes=len(body))
        key = f"{ask['model_id']}:{ask['seq_id']}"
        session = self._owner(ask["model_id"])
        return as_json(self._sessions.submit(session, key, job, lambda found: batch_output(*found)))

    def _check_batch(self, ask: dict) -> None:
        if ask["loss_fn"] not in CLIENT_LOSSES:
            raise UserError("loss_fn", ask["loss_fn"], ", ".join(CLIENT_LOSSES))
        inputs, constants, _ = CLIENT_LOSSES[ask["loss_fn"]]
        needed = {"target_tokens", *inputs}
        if odd := ask["loss_fn_config"].keys() - set(constants):
            raise UserError(
                f"loss_fn_config of {ask['loss_fn']}", ", ".join(sorted(odd)), ", ".join(constants) or "none"
            )
        for name, value in ask["loss_fn_config"].items():
            number_of(f"loss_fn_config.{name}", value, 0, LARGEST)
        if not ask["rows"]:
            raise UserError("data", "no row")
        for number, row in enumerate(ask["rows"]):
            self._check_tokens(f"data[{number}].model_input", row["input_ids"])
            if row.keys() - {"input_ids"} != needed:
                found = ", ".join(sorted(row.keys() - {"input_ids"})) or "none"
                raise UserError(f"data[{number}].loss_fn_inputs of {ask['loss_fn']}", found, ", ".join(sorted(needed)))
            if odd := [name for name in needed if len(row[name]) != len(row["input_ids"])]:
                raise UserError(
                    f"data[{number}].{odd[0]}",
                    f"{counted(len(row[odd[0]]), 'value')} for {counted(len(row['input_ids']), 'token')}",
                )
            self._check_tokens(f"data[{number}].target_tokens", row["target_tokens"])
            row["input_ids"] = row["input_ids"].tolist()

    def _check_tokens(self, where: str, tokens) -> None:
        if not 0 < len(tokens) <= self._offer.max_len:
            raise UserError(where, counted(len(tokens), "token"), f"1 to {self._offer.max_len} (--max_len)")
        found = np.asarray(tokens)
        if not np.all((found >= 0) & (found < self._offer.vocab_size) & (found == np.floor(found))):
            raise UserError(where, "a token outside of the vocabulary", f"0 to {self._offer.vocab_size - 1}")

    def _optim_step(self, ask: dict) -> dict:
        if "adam_params" not in ask:
            raise UserError("optim_params", str(ask.get("optimizer_params", {}).get("type")), "AdamParams")
        return self._of_model(ask, Job("optim_step", {"model_id": ask["model_id"], **adam_of(ask["adam_params"])}))

    def _of_model(self, ask: dict, job: Job) -> dict:
        key = f"{ask['model_id']}:{int(ask['seq_id'])}"
        return self._sessions.submit(self._owner(ask["model_id"]), key, job)

    # --- weights

    def _folder(self, path: str) -> str:
        """The folder of tinker://MODEL/weights/NAME. Raises UserError for any other form."""
        model_id, kind, name = (*path.removeprefix("tinker://").split("/"), "", "")[:3]
        is_form = path == f"tinker://{model_id}/{kind}/{name}" and NAME.fullmatch(model_id) and NAME.fullmatch(name)
        if not is_form or name.endswith(FACTS) or kind not in ("weights", "sampler_weights"):
            raise UserError("path", path, "tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME")
        return f"{self._offer.folder}/{model_id.replace(':', '_')}/{kind}/{name}"

    def _save(self, ask: dict, kind: str = "weights") -> dict:
        path = f"tinker://{ask['model_id']}/{kind}/{ask.get('path') or int(ask['seq_id'])}"
        own = {"folder": self._folder(path), "path": path, "for_sampler": kind == "sampler_weights"}
        own["overwrite"] = bool(ask.get("overwrite"))
        own["kind"] = "save_weights" if kind == "weights" else "save_weights_for_sampler"
        return self._of_model(ask, Job("save", {"model_id": ask["model_id"], **own}))

    def _save_for_sampler(self, ask: dict) -> dict:
        if ask.get("path"):
            return self._save(ask, "sampler_weights")
        session, answer = self._owner(ask["model_id"]), {"type": "save_weights_for_sampler"}
        answer["sampling_session_id"] = sampler = f"{ask['model_id']}:sampler:{int(ask['sampling_session_seq_id'])}"
        own = {"sampler": sampler, "model_id": ask["model_id"], "folder": None, "answer": answer}
        return self._make_sampler(session, f"{ask['model_id']}:{int(ask['seq_id'])}", own)

    def _make_sampler(self, session: Session, key: str, own: dict) -> dict:
        if key not in session.futures:
            self._sessions.add_sampler(session, own["sampler"])
        return self._sessions.submit(session, key, Job("keep_sampler", own), makes=own["sampler"])

    async def _delete(self, request: Request) -> Response:
        """Delete saved weights, after the jobs before it."""
        async with self._door.body(request):
            path = "tinker://{model}/{kind}/{name}".format(**request.path_params)
        try:
            folder = self._folder(path)
        except UserError as error:
            raise Refused(422, str(error)) from None
        self._sessions.put(Job("delete", {"folder": folder}))
        return as_json({})

    def _load(self, ask: dict) -> dict:
        folder, own = self._folder(ask["path"]), {"path": ask["path"], "optimizer": bool(ask["optimizer"])}
        self._check_base(ask.get("base_model"))
        _check_adam(ask.get("optimizer_config"))
        if ask.get("model_id"):
            return self._of_model(ask, Job("load", {"model_id": ask["model_id"], "folder": folder, **own}))
        return self._make_model(ask, None, "load", {"folder": folder, **own})

    # --- sampling

    def _create_sampler(self, ask: dict) -> dict:
        self._check_base(ask.get("base_model"))
        session = self._sessions.session(ask["session_id"])
        sampler, path = f"{ask['session_id']}:sample:{int(ask['sampling_session_seq_id'])}", ask.get("model_path")
        own = {"sampler": sampler, "model_id": None, "folder": self._folder(path) if path else None}
        self._make_sampler(session, key := f"{sampler}:create", {**own, "answer": {"path": path}})
        self._sessions.was_read(session, key)  # this request has its answer now, and no future
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    async def _sampler(self, request: Request) -> Response:
        sampler = request.path_params["sampler"]
        self._owner(sampler)
        return as_json({"sampler_id": sampler, "base_model": self._offer.base_model})

    def _sample(self, ask: dict) -> dict:
        sampler, tokens = ask["sampling_session_id"], []
        session = self._owner(sampler)
        for name, offered in NOT_OFFERED.items():
            if ask.get(name, offered) not in (offered, None):
                raise UserError(name, str(ask[name])[:40], instead="Leave it out: it is not offered here.")
        for chunk in ask["prompt"]["chunks"]:
            if chunk.get("type") != "encoded_text":
                raise UserError("prompt", f"a chunk of type {chunk.get('type')}", "encoded_text")
            tokens += map(int, chunk["tokens"])
        self._check_tokens("prompt", tokens)
        params, count = ask["sampling_params"], whole_of("num_samples", ask.get("num_samples", 1), 1, MOST_SAMPLES)
        sampling, key = self._sampling(params, len(tokens)), f"{sampler}:{int(ask['seq_id'])}"
        seed, number = params.get("seed"), self._sampled
        self._sampled += key not in session.futures
        seeds = [
            sample_seed(self._offer.seed if seed is None else seed, number * (seed is None), n) for n in range(count)
        ]
        scored, last = bool(ask.get("prompt_logprobs")), ask.get("prompt_logprobs_last_n") or len(tokens)
        unscored = len(tokens) - min(len(tokens), whole_of("prompt_logprobs_last_n", last, 1, 2**31))
        own = {"prompts": [(tokens, count)], "sampling": sampling, "seeds": seeds, "prompt_log_probs": [scored]}

        def encoded(found: list) -> bytes:
            [(sequences, of_prompt)] = found
            if scored:
                of_prompt[:unscored] = float("nan")
            return sample_output(sequences, of_prompt)

        job = Job("sample", {"sampler": sampler, **own}, num_bytes=8 * (len(tokens) + count))
        answer = self._sessions.submit(session, key, job, encoded)
        return {**answer, "sample_sequence_ids": [f"{key}:{n}" for n in range(count)]}

    def _sampling(self, params: dict, num_tokens: int) -> Sampling:
        room = self._offer.max_len - num_tokens
        most, stop = params.get("max_tokens"), params.get("stop")
        if most is not None and not 0 < whole_of("max_tokens", most, -LARGEST, LARGEST) <= room:
            raise UserError("max_tokens", f"{most} after {counted(num_tokens, 'token')}", f"1 to {room} (--max_len)")
        most = room if most is None else int(most)
        stops = [stop] if isinstance(stop, str) else stop or []
        texts = tuple(one for one in stops if isinstance(one, str))
        if len(stops) > MOST_STOPS or not all(0 < len(one) <= STOP_LENGTH and not HALF.search(one) for one in texts):
            raise UserError("stop", f"{len(stops)} of them", f"up to {MOST_STOPS}, of 1 to {STOP_LENGTH} characters")
        ids = [whole_of("stop", one, 0, self._offer.vocab_size - 1) for one in stops if not isinstance(one, str)]
        top_k = max(whole_of("top_k", params.get("top_k", -1), -1, 2**31), 0)
        cut = {"top_p": number_of("top_p", params.get("top_p", 1), 1e-6, 1), "top_k": top_k, "keeps_sets": False}
        temperature = number_of("temperature", params.get("temperature", 1), 0, LARGEST)
        if 0 < temperature < LEAST_TEMPERATURE:
            raise UserError("temperature", repr(temperature), f"0, or {LEAST_TEMPERATURE} and more")
        return Sampling(temperature, most, self._offer.stop_ids if stop is None else tuple(ids), texts, **cut)


def _check_adam(config: Optional[dict]) -> None:
    if config and config.get("type", "adamw") != "adamw":
        raise UserError("optimizer_config", str(config["type"]), "adamw")


def _read(body: bytes) -> dict:
    try:
        check_values(body, limit("request_values"))  # all other clients wait while it is read
        asked = json.loads(body)
    except BadAnswer as error:
        raise Refused(413, f"{str(error).partition(';')[0]}; --limits request_values=N raises the limit") from None
    except (ValueError, RecursionError) as error:
        raise Refused(422, f"{type(error).__name__}: {error}") from None
    if not isinstance(asked, dict):
        raise Refused(422, "no JSON object")
    return asked


async def _not_offered(request: Request) -> Response:
    raise Refused(404, f"{request.method} {request.url.path} is not offered here")
