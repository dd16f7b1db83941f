"""The run of `serve_train`: the model on all ranks, the HTTP service on rank 0, and jobs one after the other."""

import os
import signal
import threading
import time
from queue import SimpleQueue

from transformers import AutoModelForCausalLM

from trainer.datasets.conversations.templates import notes_of_template
from trainer.datasets.conversations.turn_ends import stop_ids
from trainer.distributed.collectives import broadcast_object
from trainer.errors import UserError
from trainer.flags.common_flags import SFTArguments
from trainer.rollout.engines.hf import HFEngine
from trainer.rollout.rewards.http_service import HTTPLimits, address, listen, server_of
from trainer.runs.api.api_service import Offer, TrainingService
from trainer.runs.api.api_sessions import Job
from trainer.runs.api.client_models import ClientModels
from trainer.runs.features.adapter import add_adapter_of_flags
from trainer.runs.output_folders import make_writable
from trainer.runs.run_models import load_model
from trainer.runs.run_setup import Setup, set_up

END = "end"


def client_models(args: SFTArguments, sample_batch_size: int) -> tuple[ClientModels, Setup]:
    """The models of clients on all ranks. One rank samples at most `sample_batch_size` responses at a time."""
    setup = set_up("train_sft", args, longest=args.length.max_len, rolls_out=True)
    strategy, flags = setup.strategy, args.lora
    for line in notes_of_template(setup.tokenizer) if setup.tokenizer.chat_template else ():
        strategy.print(line)  # clients tokenize prompts alone
    model = load_model(args.model, setup, setup.folder, AutoModelForCausalLM)
    if flags.lora_rank:
        add_adapter_of_flags(flags, strategy, model, args.model.pretrain)

    def build_engine() -> HFEngine:
        options = {"dtype": strategy.param_dtype, "device": strategy.device, "batch_size": sample_batch_size}
        return HFEngine(setup.folder, setup.tokenizer, **options, trust_remote_code=setup.trust_remote_code)

    sizes = {"alpha": flags.lora_alpha, "row_limit": args.batch.micro_train_batch_size, "seed": args.batch.seed}
    return ClientModels(strategy, model, setup.tokenizer, **sizes, build_engine=build_engine), setup


def serve(args: SFTArguments, server, limits: HTTPLimits) -> None:
    """Answer clients until SIGTERM or SIGINT. `server` has the flags host, port and max_clients."""
    models, setup = client_models(args, server.sample_batch_size)
    strategy = setup.strategy
    folder = broadcast_object(args.output.output_dir or time.strftime("runs/serve_train-%Y%m%d-%H%M%S"))
    jobs: SimpleQueue[Job] = SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM):  # the other ranks end when rank 0 does
        signal.signal(number, (lambda *_: jobs.put(Job(END, {}))) if strategy.is_rank_0() else (lambda *_: None))
    if strategy.is_rank_0():
        make_writable("--output_dir", folder)
        stops = stop_ids(setup.tokenizer, setup.folder)
        offer = Offer(
            args.model.pretrain, args.length.max_len, server.max_clients, stops,
            models.model.config.get_text_config().vocab_size, os.path.abspath(folder), args.batch.seed, models.is_lora,
        )  # fmt: skip
        listening = listen(server.host, server.port)
        web = server_of(TrainingService(jobs, offer, limits).app(), limits)
        threading.Thread(target=lambda: web.run(sockets=[listening]), daemon=True).start()
        strategy.print(f"training at {address(listening, server.host)}")
    work(models, jobs, strategy.is_rank_0())


def work(models: ClientModels, jobs: SimpleQueue, is_rank_0: bool) -> None:
    """Run the jobs of rank 0's queue on all ranks, in order. A UserError is the answer of its job only."""
    while True:
        job = jobs.get() if is_rank_0 else None
        method, arguments = broadcast_object((job.method, job.arguments) if job else None)
        if method == END:
            return
        try:
            result = getattr(models, method)(**arguments)
        except UserError as error:
            result = error
        if job:
            job.answer(result)
