"""The command `evaluate`: answers of a model, their scores, and the results as a table and as files."""

import dataclasses
import functools
import json
import os
import time
from collections.abc import Sequence
from typing import Optional

from transformers import AutoModelForCausalLM

from trainer.datasets.conversations.turn_ends import stop_ids
from trainer.distributed.collectives import broadcast_object, rank_0_first
from trainer.errors import without_secrets
from trainer.flags.generating_flags import EvaluateArguments
from trainer.flags.groups import flags_of, flat
from trainer.flags.rl_flags import PPOArguments
from trainer.flags.rules import refuse
from trainer.methods.ppo_state import Roles
from trainer.methods.rollout_facts import PASSES, failed_note, misread_as_passes, range_note, sample_facts, scores_of
from trainer.methods.rollout_phase import answers_to, sync
from trainer.rollout.evaluation import Evaluation, known, write_answers
from trainer.rollout.rewards.reward_functions import load_reward_functions
from trainer.rollout.samples import Sample
from trainer.rollout.shares import CONFIDENCE, mean_and_interval
from trainer.runs.feature import apply
from trainer.runs.output_folders import make_writable
from trainer.runs.outputs import versions
from trainer.runs.rl.evaluation_checks import ANSWERS, COMMAND, RESULTS
from trainer.runs.rl.rl_engines import build_engine
from trainer.runs.rl.rl_features import RL_FEATURES
from trainer.runs.rl.rl_options import evaluation_of, sampling_of
from trainer.runs.rl.rl_parts import RLMethod, RLRun
from trainer.runs.rl.rl_rewards import build_reward
from trainer.runs.rl.rl_roles import check_length, make_batches_of
from trainer.runs.rl.rl_run import load_data, note_math
from trainer.runs.run_data import files_in_errors, report
from trainer.runs.run_models import frozen_model
from trainer.runs.run_setup import set_up

ALL = "all"  # the name of the row of all prompts


def evaluate(args: PPOArguments) -> None:
    """Answer, score, print and write. The flags are those of `evaluation_checks.checked`."""
    run = RLRun(method=RLMethod(COMMAND, make_batches_of), args=args, auto_class=AutoModelForCausalLM)
    kind = {"rolls_out": True, "vllm": args.rollout.rollout_engine == "vllm"}
    run.setup = set_up("train_ppo", args, longest=args.prompts.prompt_max_len + args.rollout.generate_max_len, **kind)
    strategy, tokenizer = run.setup.strategy, run.setup.tokenizer
    run.functions = load_reward_functions(args.scores.reward_func)
    note_math(strategy, args.scores.reward_func)
    sets = args.data.eval_dataset, args.data.eval_split, "--eval_dataset"
    with files_in_errors(args.data, args.batch.seed, *sets):
        load = functools.partial(load_data, args, tokenizer, *sets, functions=run.functions)
        prompts, ledger = rank_0_first(load, in_caches=True)
        report(run.setup, prompts, ledger, "prompts", args.data, args.batch.seed, *sets)
    run.samples = run.eval_samples = prompts
    refuse("train_ppo", args, has_images=run.has_images, no_images=not run.has_images)
    run.output_dir = broadcast_object(args.output.output_dir or time.strftime(f"runs/{COMMAND}-%Y%m%d-%H%M%S"))
    if strategy.is_rank_0():
        make_writable("--output_dir", run.output_dir)
    apply(RL_FEATURES, run, "with_data")
    run.roles = roles_of(run)
    apply(RL_FEATURES, run, "with_roles")
    sampling = sampling_of(args, (*stop_ids(tokenizer, run.setup.folder), *run.more_stops))
    evaluation, started = evaluation_of(args, prompts, sampling), time.perf_counter()
    samples, facts = answers_to(strategy, run.roles, evaluation, step=0)
    write_answers(os.path.join(run.output_dir, ANSWERS), evaluation, samples, tokenizer)
    found = results(evaluation, samples)
    for note in notes_of(samples, args.scores.reward_range):
        strategy.print(note)
    if strategy.is_rank_0():
        flags = {field.name: flat(args)[field.name] for field, _ in flags_of(EvaluateArguments)}
        own = {"flags": without_secrets(flags), "data": ledger.counts, "versions": versions()}
        own |= {"seconds": time.perf_counter() - started, "weights_checksum": facts["weights_checksum"]}
        own |= {"confidence": CONFIDENCE, "answers": sample_facts(samples), "results": found}
        with open(os.path.join(run.output_dir, RESULTS), "w", encoding="utf-8") as file:
            json.dump(own, file, indent=1)
    strategy.print(f"{table(found)}\nwritten: {run.output_dir}/{RESULTS} and {ANSWERS}")


def roles_of(run: RLRun) -> Roles:
    """The engine with the weights of the model, and the reward. The model itself is then given up."""
    run.model = run.load(run.setup.folder, trained=False, adapter=run.merged_adapter)
    apply(RL_FEATURES, run, "with_model")
    check_length(run.args, run.model.config)
    engine = build_engine(run)
    score, share = build_reward(run, make_batches_of(run)), run.args.scores.max_failed_share
    roles = Roles((frozen_model(run.setup, run.model), None, None), score, share, engine)
    sync(run.setup.strategy, roles, 0)
    run.model, roles.actor = None, (None, None, None)
    return roles


def notes_of(samples: list[Sample], reward_range: Optional[Sequence[float]]) -> list[str]:
    """Lines about answers that got no score, and about scores that are not read as meant."""
    scores = scores_of(samples)
    users = [PASSES[1]] if misread_as_passes(scores) else []
    return [*(failed_note(samples) | range_note(scores, users, reward_range)).values()]


def results(evaluation: Evaluation, samples: list[Sample]) -> dict[str, dict]:
    """By group: the number of prompts, and by metric the mean over prompts with its interval."""
    values, groups = evaluation.values_of(samples), {ALL: range(len(evaluation.prompts)), **evaluation.groups}
    return {
        group: {"prompts": len(places)}
        | {name: dataclasses.asdict(mean_and_interval(known(own, places))) for name, own in values.items()}
        for group, places in groups.items()
    }


def table(found: dict[str, dict]) -> str:
    """The results as text: a row for each group, and in each cell a mean with the ends of its interval."""
    names = [name for name in found[ALL] if name != "prompts"]
    rows = [["", "prompts", *names]]
    for group, values in found.items():
        cells = [values[name] for name in names]
        rows.append(
            [group, str(values["prompts"]), *(f"{c['mean']:.4f} [{c['low']:.4f}, {c['high']:.4f}]" for c in cells)]
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
