"""The teacher of `train_kd`: its probabilities as a loss (--kd_coef), and its answers as data (--teacher_answers)."""

import os
import shutil
from functools import partial
from typing import Any

import datasets

from trainer.comma_separated import addresses_in, names_in
from trainer.datasets.conversations.tokens import digest_of
from trainer.datasets.conversations.turn_ends import stop_ids
from trainer.datasets.samples.bounds import check_ids
from trainer.datasets.samples.parts import Part
from trainer.datasets.samples.prepared import OPTIONS, write_prepared
from trainer.datasets.samples.prompts import tokenize_prompts
from trainer.datasets.samples.sft_samples import sft_features
from trainer.datasets.shapes.notes import NOTE
from trainer.distributed.collectives import broadcast_object, rank_0_first, wait_for_all
from trainer.errors import UserError
from trainer.flags.kd_flags import TeacherArguments
from trainer.flags.parse_flags import with_flags
from trainer.methods.teacher_loss import make_teacher_loss
from trainer.model_folders.model_folder import read_config
from trainer.models.losses.distances import Distance
from trainer.models.losses.token_losses import causal_lm_logits
from trainer.models.model_bounds import bounds_of
from trainer.models.model_loading import resolve_adapted_model
from trainer.rollout.engines.hf import HFEngine
from trainer.rollout.engines.sampling import Sampling
from trainer.rollout.engines.sync import sync_weights
from trainer.rollout.generation import generate_samples
from trainer.rollout.placement import write_by_rank_0
from trainer.runs.feature import Feature
from trainer.runs.features.reference import check_positions
from trainer.runs.features.served_teacher import open_server
from trainer.runs.run_data import files_in_errors, load_flag_rows, note_unknown_names, text_options, with_files
from trainer.runs.run_models import frozen_model
from trainer.runs.run_setup import Setup, check_vocabulary

PROMPTS_AT_A_TIME = 256  # on each rank; rank 0 gets the answers to so many
ANSWERS = "answers"  # a folder in the run folder
# flags of --dataset that do not apply to the teacher's answers
OF_DATASET = {"dataset_split": "train", "dataset_probs": None, "max_samples": None, "input_key": None}
OF_DATASET |= {
    "input_template": None,
    "ignore_columns": None,
    "system": None,
    "apply_chat_template": False,
    "tokenizer_chat_template": None,
}


def coefficient(flags: TeacherArguments) -> float:
    """The weight of the KL."""
    return flags.kd_coef if flags.kd_coef is not None else float(not flags.teacher_answers)


def open_teacher(run) -> None:
    """Load the teachers. With --teacher_answers, let it answer the prompts, and read its answers as the data."""
    run.open()
    loaded = [load_teacher(run, name, number) for number, name in enumerate(names_in(run.args.teacher.teacher))]
    run.teachers = [teacher for teacher, _ in loaded]
    run.teacher_folders = [folder for _, folder in loaded if folder]
    if run.args.teacher.teacher_answers:
        args, load = answered(run, *loaded[0]), run.method.load_data
        bounds = bounds_of(run.setup.folder, run.setup.trust_remote_code)

        def load_answers(names: str, split: str, flag: str, part: Part):
            samples, ledger = load(args, run.setup.tokenizer, args.data.dataset, "train", flag, part)
            check_ids(samples, "--teacher_answers", bounds.vocab_size)  # a teacher may have more logits
            return samples, ledger

        run.load_data = load_answers


def add_teacher_loss(run) -> None:
    """Replace the loss by that of the teachers' probabilities, unless their weight is 0. Then the teacher is freed."""
    flags, teachers = run.args.teacher, run.teachers
    if coef := coefficient(flags):
        weights = flags.teacher_weights or [1 / len(teachers)] * len(teachers)
        distance = Distance(flags.kd_loss, flags.kd_beta, flags.kd_top_k)
        logits = [getattr(teacher, "logits", None) or partial(causal_lm_logits, teacher) for teacher in teachers]
        run.loss_fn = make_teacher_loss(list(zip(weights, logits)), coef, flags.kd_temperature, distance)
    run.teachers = []


def check_rows(run) -> None:
    """Raise UserError for a row that is longer than the learned positions of a teacher."""
    for folder in run.teacher_folders:
        check_positions(run, folder)


TEACHER = Feature(
    "teacher",
    lambda run: run.method.command == "train_kd",
    before_data=open_teacher,
    with_data=check_rows,
    with_loss=add_teacher_loss,
)


def load_teacher(run, name: str, number: int = 0) -> tuple[Any, str]:
    """Return (teacher, its folder). The teacher is frozen, and sharded like the model. On a server, it has no folder."""
    if addresses_in(name):
        return open_server(run, name, number), ""
    flags, setup, remote_code = run.args.teacher, run.setup, run.args.model.trust_remote_code
    folder, adapter = rank_0_first(lambda: resolve_adapted_model(name, "--teacher"))
    check_vocabulary(setup, name, folder, "--teacher", "a model with the same one")
    configs = [read_config(name, remote_code).get_text_config() for name in (folder, setup.folder)]
    if coefficient(flags) and len({config.vocab_size for config in configs}) > 1:
        found = f"{name} has {configs[0].vocab_size} logits, and --pretrain {configs[1].vocab_size}"
        raise UserError("--teacher", found, "equal numbers, or --teacher_answers with --kd_coef 0")
    teacher = run.load(folder, "--teacher", trained=False, adapter=adapter)
    return frozen_model(setup, teacher, flags.teacher_offload), folder


def answered(run, teacher, folder: str):
    """The flags that read the teacher's answers. They are sampled now, unless a resumed run has them."""
    target = os.path.abspath(os.path.join(run.output_dir, ANSWERS))
    if not broadcast_object(bool(run.args.checkpoint.load_checkpoint) and os.path.isdir(target)):
        write_answers(run.args, run.setup, teacher, folder, target)
    return with_flags(run.args, dataset=target, **OF_DATASET)


def write_answers(args, setup: Setup, teacher, teacher_folder: str, target: str) -> None:
    """Write --teacher_answers answers to each prompt of --dataset to the folder `target` (collective).

    The hf engine samples them on all ranks, from the weights of the prepared `teacher`. An answer depends only on the
    seed, the prompt and its own number. Its tokens are kept as they were sampled.
    """
    strategy = setup.strategy
    prompts, ledger = rank_0_first(lambda: _prompts(args, setup.tokenizer))
    data, _, *named = _named(args)
    strategy.print(with_files(ledger.report("prompts for the teacher"), *_named(args)))
    note_unknown_names(strategy.print, data, [(ledger, *named)])
    options = {
        "dtype": strategy.param_dtype,
        "device": strategy.device,
        "batch_size": args.teacher.micro_rollout_batch_size,
    }
    options |= {"trust_remote_code": args.model.trust_remote_code, "compiled": args.model.compile}
    engine = HFEngine(teacher_folder, setup.tokenizer, **options)
    sync_weights(strategy, teacher, engine)
    ends, each = stop_ids(setup.tokenizer, teacher_folder), args.teacher.teacher_answers
    sampling = Sampling(args.teacher.temperature, args.teacher.generate_max_len, ends)
    samples: list[dict[str, Any]] = []
    at_a_time = PROMPTS_AT_A_TIME * strategy.sizes.world_size

    def keep(part: list) -> None:
        first = len(samples)
        samples.extend(as_row(sample, first + place, ends) for place, sample in enumerate(part))

    for start in range(0, len(prompts), at_a_time):
        some = [prompts[place] for place in range(start, min(start + at_a_time, len(prompts)))]
        found = generate_samples(engine, some, each, sampling, seed=args.batch.seed, rollout=0, first=start * each)
        write_by_rank_0(found, keep)
    if strategy.is_rank_0():
        _write(args.length.max_len, setup.tokenizer, samples, target)
    wait_for_all()


def _named(args) -> tuple:
    return args.data, args.batch.seed, args.data.dataset, args.data.dataset_split, "--dataset"


def _prompts(args, tokenizer):
    data, named = args.data, _named(args)
    with files_in_errors(*named):
        own = {"flag": "--dataset", "input_key": args.sft.input_key, "label_key": None, "drop_answer": True}
        longest = args.length.max_len - args.teacher.generate_max_len
        return tokenize_prompts(load_flag_rows(*named), tokenizer, max_len=longest, **own, **text_options(data))


def as_row(sample, number: int, ends: tuple[int, ...]) -> dict[str, Any]:
    """A sample of a rollout as a row of `sft_samples`, with loss on the answer."""
    ids, answer = sample.prompt_ids + sample.response_ids, len(sample.response_ids)
    return {
        "input_ids": ids,
        "loss_mask": [0] * len(sample.prompt_ids) + [1] * answer,
        "num_tokens": len(ids),
        "num_loss_tokens": answer,
        "digest": digest_of(ids),
        "row": number,
        "truncated": not sample.finished,
        "empty": False,
        "stop_trained": ids[-1] in ends,
        "control_tokens": False,
        NOTE: "",
    }


def _write(max_len: int, tokenizer, samples: list[dict[str, Any]], target: str) -> None:
    unset = dict.fromkeys(OPTIONS) | {"train_on": "last", "apply_chat_template": False, "pretrain_mode": False}
    shutil.rmtree(target, ignore_errors=True)
    rows = datasets.Dataset.from_list(samples, features=sft_features())
    write_prepared(rows, tokenizer, unset | {"max_len": max_len}, {}, target)
