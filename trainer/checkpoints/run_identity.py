"""What a resume compares: the effect of each flag, the record of the run, and whether the run has ended. It imports no torch.

Each flag of each command has one place in the table of effects. From the strictest on, they are:

- FIXED: with another value, the checkpoint does not fit the run. Refused.
- OBJECTIVE: another value trains for something else. Refused, unless --allow_change names the flag.
- CONTENT: names a model, data or code. Not its name is compared, but what is there: see `runs/run_record.py`.
- SAMPLES: makes samples of rows. Refused if the samples are others.
- COURSE: the same objective on another course, or in other dtypes. Printed and recorded.
- LAYOUT: speed, memory and place. Printed and recorded.
- OUTPUT: what is written, and when. Not printed.

The identity of a run is one record, readable and hashed, which each checkpoint holds. It has these parts:

- `flags`: every flag of the command.
- `content`: {flag: facts} of what flags name: the config, stop ids, code and frozen weights of models, the code of
  a reward, the targets of the data. Another fact is another objective.
- `versions` and `kernels`: of libraries, and what computes attention and matrix products. They change rounding only.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Optional

from trainer.checkpoints.checkpoint_store import list_checkpoints, step_of
from trainer.comma_separated import names_in
from trainer.errors import NothingLeft, UserError
from trainer.flags.parse_flags import flags_of
from trainer.limits import lines_of
from trainer.metrics import METRICS_FILE

FIXED, OBJECTIVE, CONTENT, SAMPLES = "fixed", "objective", "content", "samples"
COURSE, LAYOUT, OUTPUT = "course", "layout", "output"

EFFECTS: dict[str, str] = {
    FIXED: """
        streaming streaming_buffer curriculum optim add_tokens lora_rank target_modules lora_experts use_dora online""",
    OBJECTIVE: """
        exact train_batch_size seed no_shuffle rollout_batch_size n_samples_per_prompt
        lora_alpha lora_dropout use_rslora load_in_4bit merge_adapter multiturn train_on pretrain_mode aux_loss_coef expert_bias_update_rate freeze_vision
        teacher_answers generate_max_len temperature kd_coef kd_temperature kd_loss kd_beta kd_top_k teacher_key teacher_weights
        loss loss_weights center_rewards_coef value_head_prefix margin_key beta f_divergence f_alpha label_smoothing
        simpo_gamma nll_loss_coef desirable_weight undesirable_weight label_key
        max_staleness partial_rollouts top_p top_k min_p stop routing_replay rollouts_from dynamic_filtering
        dynamic_filtering_range reward_range judge_model judge_mode judge_range judge_args reward_weights reward_clip_range normalize_reward overlong_buffer_len
        overlong_penalty_factor env_max_turns env_last_turn_text env_answer_max_len env_long_answers env_args env_key
        advantage_estimator turn_rewards gamma lambd policy_lambd policy_lambd_alpha positive_nll_coef no_advantage_std_norm advantage_batch_std
        policy_loss sapo_temperatures cov_share cov_range kl_cov_coef loss_agg mask_truncated eps_clip eps_clip_high dual_clip bypass_mode tis_cap tis_level tis_mask
        tis_floor tis_mask_range tis_mask_level rejected_tokens off_policy_mask_threshold top_entropy_quantile rollout_kl_max rollout_kl_estimator ema_beta entropy_loss_coef entropy_target entropy_coef_delta entropy_coef_max init_kl_coef use_kl_loss kl_unbiased kl_in_score
        kl_estimator kl_target kl_horizon value_clip freezing_actor_steps""",
    CONTENT: "pretrain lora_adapter dataset teacher ref_model critic_pretrain reward_pretrain reward_func judge_rubric env",
    SAMPLES: """
        image_max_pixels image_min_pixels
        dataset_split dataset_probs dataset_flags max_samples eval_fraction input_template apply_chat_template tokenizer_chat_template max_len
        ignore_columns system template_args read_control_tokens input_key output_key prompt_max_len prompt_key chosen_key
        rejected_key completion_key""",
    COURSE: """
        max_epochs max_steps num_episodes learning_rate vision_learning_rate critic_learning_rate lr_scheduler
        lr_warmup_ratio warmup_steps min_lr_ratio adam_betas adam_eps weight_decay fp8 max_norm max_skipped_steps param_dtype compute_fp32_loss
        reduce_dtype deterministic trust_remote_code limits remote_rm_url judge_url judge_timeout judge_retries judge_cache reward_timeout remote_rm_timeout remote_rm_retries teacher_timeout teacher_retries max_failed_share max_logprob_diff
        env_timeout env_sandbox env_container env_memory_mb env_processes env_disk_mb env_cpu_seconds env_paths preset
        eval_dataset eval_dataset_flags eval_split max_eval_samples best_metric_key early_stopping_patience load_best_model_at_end eval_samples eval_temperature eval_top_p eval_source_key""",
    LAYOUT: """
        attn_implementation gradient_checkpointing selective_checkpointing activation_offload compile dataset_num_proc
        cache_pixels micro_train_batch_size max_tokens_per_micro_batch packing_samples layout backend zero_stage
        adam_offload tensor_parallel_size use_hf_tp_plan sequence_parallel expert_parallel_size ring_attn_size sp_mode
        ring_attn_kernel dp_replicate_size reduce_once device cpu_matmul ref_offload precompute_ref_logps teacher_offload
        micro_rollout_batch_size rollout_engine engine_urls engine_tensor_parallel_size vllm_gpu_memory_utilization
        offload_actor_optimizer share_prompts offload_reward offload_ref offload_critic env_concurrency env_lockstep
        remote_rm_api_key teacher_api_key judge_key_env judge_concurrency engine_api_key sync_folder sync_deltas
        speculative_tokens""",
    OUTPUT: """
        allow_no_stop print_model print_tp_plan heartbeat_timeout check_replicas_every output_dir overwrite save_path no_save
        certificate sign_key eval_steps evals_per_epoch saves_per_epoch logging_steps report_to use_wandb wandb_project run_name use_tensorboard parity_dump save_steps
        save_interval_minutes max_ckpt_num max_ckpt_mem load_checkpoint allow_change ckpt_format async_save save_hf_ckpt
        push_to_hub hub_model_id hub_private_repo hub_dry_run save_only_model verify_resume parity_trace certify sample_pages timeline""",
}

EFFECT_OF: dict[str, str] = {flag: effect for effect, flags in EFFECTS.items() for flag in flags.split()}

BITS = {"cpu_matmul", "attn_implementation"}  # with --exact, these decide the bits of a run
EVALUATIONS = {"eval_steps", "evals_per_epoch"}  # with one of BY_EVALUATIONS, they decide where a run ends or its model
BY_EVALUATIONS = ("early_stopping_patience", "load_best_model_at_end", "best_metric_key")

# what a run uses if a flag without a default is not given, from its other flags
FOLLOWS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "lora_alpha": lambda flags: flags["lora_rank"] and 2 * flags["lora_rank"],
    "kd_coef": lambda flags: float(not flags["teacher_answers"]),
    "teacher_weights": lambda flags: [1 / (count := max(1, len(names_in(flags["teacher"]))))] * count,
    "eps_clip_high": lambda flags: flags["eps_clip"],
    "dynamic_filtering_range": lambda flags: None if flags["dynamic_filtering"] else [0.0, 1.0],  # the older default
    "reward_range": lambda flags: [0.0, 1.0],
    "tis_mask_range": lambda flags: [1 / cap, cap] if flags["tis_mask"] and (cap := flags["tis_cap"]) else None,
    "tis_mask_level": lambda flags: flags["tis_level"],
    "engine_tensor_parallel_size": lambda flags: flags["tensor_parallel_size"],
}
WEIGHTS = ("loss_weights", "reward_weights")  # each is 1 if they are not given


def in_effect(flags: dict[str, Any]) -> dict[str, Any]:
    """The values that a run uses. So a flag that is given with the value that it has anyway is no change."""
    used = dict(flags)
    for name in used.keys() & FOLLOWS.keys():
        used[name] = FOLLOWS[name](flags) if flags[name] is None else flags[name]
    if used.get("exact") and used["attn_implementation"] == "auto":
        used["attn_implementation"] = "sdpa"
    used |= {name: None for name in used.keys() & set(WEIGHTS) if set(used[name] or ()) == {1}}
    if used.get("target_modules") == "all-linear":
        used["target_modules"] = None
    if names := used.get("target_modules"):
        used["target_modules"] = ",".join(sorted(set(names_in(names))))
    return used


def effect_of(flag: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    """The effect of another value of `flag` in a resume from flags `old` with flags `new`. --exact promises equal bits."""
    if flag in EVALUATIONS and any(flags.get(name) for flags in (old, new) for name in BY_EVALUATIONS):
        return COURSE
    return OBJECTIVE if flag in BITS and old.get("exact") and new.get("exact") else EFFECT_OF[flag]


def check_allowed(allowed: Iterable[str], command: type) -> list[str]:
    """The names of --allow_change, without dashes. Raises UserError for one that is no flag of the command or is fixed."""
    names = [name.lstrip("-") for name in allowed]
    known = {field.name for field, _ in flags_of(command)}
    for name in names:
        if name not in known:
            raise UserError("--allow_change", f"{name} is no flag of this command", "names of flags, such as beta")
        if EFFECT_OF[name] == FIXED:
            raise UserError("--allow_change", f"{name}: the checkpoint would not fit the run", "a new run")
    return names


# --- the record of a run

# facts that older records lack: not compared then
LATER = ("stop_ids", "image_processor", "remote_code", "rows", "modules", "whole", "written")
# of contents: a change is only printed, as the same bytes may be written again, and an evaluation trains nothing
TOLD = ("dataset written", "eval_dataset rows")
NO_VALUE = "nothing"
SHOWN = 60  # characters of a value
RECORD_HASH = "blake2b"
# facts of a loader, and their flags: a position in the data means the same samples only with the same facts
POSITION_FLAGS = {
    "train_batch_size": "train_batch_size",
    "seed": "seed",
    "shuffle": "no_shuffle",
    "data": "dataset",
    "streaming_buffer": "streaming_buffer",
    "rollout_batch_size": "rollout_batch_size",
    "n_samples_per_prompt": "n_samples_per_prompt",
}


@dataclass(frozen=True)
class Change:
    """What is not as it was when the checkpoint was saved."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} {shown(self.before)} -> {shown(self.now)}"


def shown(value: Any) -> str:
    """A value of a flag or config, short."""
    if isinstance(value, (list, tuple)) and not any(isinstance(own, (list, dict)) for own in value):
        text = " ".join(map(str, value))
    else:
        text = NO_VALUE if value is None else str(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """The record as JSON values, with its hash."""
    record = json.loads(json.dumps(record))
    return {**record, RECORD_HASH: _hash(record)}


def _hash(record: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(record, sort_keys=True).encode(), digest_size=16).hexdigest()


def changes(folder: str, before: dict, now: dict, defaults: dict, allowed: Iterable[str]) -> list[Change]:
    """What changed since the checkpoint `folder`, whose record is `before`. The record of this run is `now`.

    `defaults` are the values of flags that an older record lacks. `allowed` are the flags of --allow_change.
    Raises UserError for a change of the objective that is not allowed.
    """
    if before[RECORD_HASH] == now[RECORD_HASH]:
        return []
    if before["command"] != now["command"]:
        found = f"{folder} is of {before['command']}, not of {now['command']}"
        raise UserError("--load_checkpoint", found, "a checkpoint of this command; --pretrain takes the model of any")
    given = {name: before["flags"].get(name, defaults[name]) for name in now["flags"]}
    old, new = in_effect(given), in_effect(now["flags"])
    flags = [
        Change(name, old[name], new[name])
        for name, value in now["flags"].items()
        if effect_of(name, old, new) != OUTPUT and not _same(given[name], value) and not _same(old[name], new[name])
    ]
    for change in flags:
        if EFFECT_OF[change.name] == FIXED:
            raise fixed(folder, change)
    contents = [change for flag in now["content"] for change in _of_content(flag, before, now)]
    strict = {OBJECTIVE, SAMPLES} if now["flags"].get("streaming") else {OBJECTIVE}  # no hash of all streamed samples
    refused = [c for c in flags if effect_of(c.name, old, new) in strict and c.name not in allowed]
    refused += [c for c in contents if c.name.split()[0] not in allowed and c.name not in TOLD]
    if refused:
        raise _refusal(folder, refused)
    others = [
        Change(name, before[part].get(name), value)
        for part in ("versions", "kernels")
        for name, value in {**dict.fromkeys(before[part]), **now[part]}.items()
        if before[part].get(name) != value
    ]
    return [*flags, *contents, *others]


def fixed(folder: str, change: Change) -> UserError:
    """The error for a flag with which the checkpoint does not fit the run."""
    if change.before is None:
        return UserError(
            f"--{change.name}", f"{folder} was saved without --{change.name}", f"no --{change.name}, or a new run"
        )
    found = f"{shown(change.now)}, but {folder} was trained with {shown(change.before)}"
    return UserError(f"--{change.name}", found, f"{shown(change.before)}, or a new run")


def _refusal(folder: str, refused: list[Change]) -> UserError:
    names = dict.fromkeys(change.name.split()[0] for change in refused)
    first, *more = refused
    found = f"{shown(first.now)} now, but {folder} was trained with {shown(first.before)}"
    found += "".join(f"; {c.name}: {shown(c.now)} now, {shown(c.before)} then" for c in more[:5])
    found += f"; and {len(more) - 5} more" * (len(more) > 5)
    return UserError(f"--{first.name}", found, f"what it was, or --allow_change {' '.join(names)}: another objective")


def _of_content(flag: str, before: dict, now: dict) -> list[Change]:
    """The facts of what `flag` names that are others, by name: "pretrain config rms_norm_eps"."""
    held = before["content"].get(flag) or {}
    facts = {name: value for name, value in now["content"][flag].items() if name not in LATER or name in held}
    old, new = dict(_leaves(flag, held)), dict(_leaves(flag, facts))
    return [Change(name, old.get(name), value) for name, value in {**dict.fromkeys(old), **new}.items()
            if not _same(old.get(name), value)]  # fmt: skip


def _leaves(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, own in value.items():
            yield from _leaves(f"{name} {key}", own)
    else:
        yield name, value


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON: 1 and True differ, 1 and 1.0 do not, tuples and lists do not."""
    one, other = (
        json.dumps(json.loads(json.dumps(value), parse_float=_number), sort_keys=True) for value in (one, other)
    )
    return one == other


def _number(text: str) -> float:
    return int(float(text)) if float(text).is_integer() else float(text)


@dataclass(frozen=True)
class Identity:
    """The record of this run, sealed, the default values of its flags, and the flags of --allow_change."""

    record: dict[str, Any]
    defaults: dict[str, Any] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()

    def compare(self, folder: str, state: dict, position_facts: dict) -> list[Change]:
        """What changed since the checkpoint `folder` with this state, which may be older than records are.

        `position_facts` are those of this run's loader. Raises UserError for a change that is not allowed.
        """
        before, now = state.get("arguments", {}), self.record["flags"]
        self._check_position(folder, state, before, position_facts)
        if "identity" in state:
            return changes(folder, state["identity"], self.record, self.defaults, self.allowed)
        old = [
            Change(name, before[name], now[name]) for name in ("lora_rank", "optim") if name in before and name in now
        ]
        for change in old:
            if not _same(change.before, change.now):
                raise fixed(folder, change)
        return []

    def _check_position(self, folder: str, state: dict, before: dict, facts: dict) -> None:
        """A position in the data means the same samples only if these facts are the same."""
        now = self.record["flags"]
        for key in facts.keys() & POSITION_FLAGS.keys():
            flag, old = POSITION_FLAGS[key], state["data"].get(key)
            if old == facts[key] or (flag in self.allowed and (key != "data" or not now.get("streaming"))):
                continue
            if key != "data":
                raise _refusal(folder, [Change(flag, before.get(flag, old), now.get(flag, facts[key]))])
            made = [n for n, value in now.items() if _makes_samples(n) and n in before and not _same(before[n], value)]
            if made and not now.get("streaming") and not set(made) - set(self.allowed):
                continue
            cause = "; ".join(f"--{name} was {shown(before[name])}, and is {shown(now[name])}" for name in made)
            cause = cause or "its rows, the tokenizer or the chat template are not as they were"
            allowed = f"what it was, or --allow_change {' '.join(made) or flag}: the position in the data stays"
            allowed = "what it was, or a new run" if now.get("streaming") else allowed
            raise UserError(f"--{flag}", f"other samples than {folder} was trained with: {cause}", allowed)


def _makes_samples(flag: str) -> bool:
    return EFFECT_OF[flag] == SAMPLES or flag in ("dataset", "max_eval_samples")


# --- a run that has ended, and whose last step is in no checkpoint: a resume would train steps again

LENGTH = ("max_steps", "max_epochs", "num_episodes", "early_stopping_patience")
MERGED = ("pretrain", "lora_adapter", "merge_adapter")  # a run with --merge_adapter writes others than it was given
BEGINNINGS = (b'{"event": "start"', b'{"event": "resume"')


def check_ended(folder: str, flags: dict[str, Any], saved: list[str]) -> None:
    """Raise NothingLeft if the run in `folder` has ended, its models are there, and its last step is in no checkpoint.

    `flags` are those of the command, flat. `saved` are the folders of its models. Raises UserError for flags that ask for
    another run, or for more steps.
    """
    ended = _end_of(folder)
    if ended is None or not saved or not all(map(os.path.isdir, saved)):
        return
    steps, before = ended
    checkpoints = list_checkpoints(os.path.join(folder, "checkpoints"))
    newest = max(map(step_of, checkpoints), default=0)
    if newest >= steps:  # the resume from there says how it ends
        return
    if others := _others(before, json.loads(json.dumps(flags)), steps):
        kept = f"whose last checkpoint is of step {newest}" if checkpoints else "without a checkpoint"
        found = f"{folder} holds a run that ended at step {steps}, {kept}. With other {', '.join(others)}"
        found += f", it would train steps again and replace {saved[0]}"
        instead = f"Train on with --pretrain {saved[0]} and another --output_dir."
        raise UserError("--load_checkpoint", found, instead=instead)
    raise NothingLeft(f"nothing left to do: the run ended at step {steps}, and {saved[0]} is its model")


def _others(before: dict[str, Any], now: dict[str, Any], steps: int) -> list[str]:
    """Flags with which this is not the run that has ended after `steps`."""
    if unknown := before.keys() - now.keys():
        return [f"flags (it had --{min(unknown)})"]
    old, new = in_effect({**now, **before}), in_effect(now)
    compared = {name for name in new if EFFECT_OF[name] in {FIXED, OBJECTIVE, CONTENT, SAMPLES}}
    compared -= set(MERGED) if now.get("merge_adapter") else set()
    if not 0 < (now["max_steps"] or 0) <= steps:
        compared |= now.keys() & set(LENGTH)
    differs = (name for name in new if name in compared and old[name] != new[name])
    return [f"--{name}" for name in differs if EFFECT_OF[name] != CONTENT or _places(old[name]) != _places(new[name])]


def _places(names: Any) -> list[str]:
    """The files and folders of comma-separated names, as absolute paths; other names as they are."""
    parts = [name.partition("#") for name in names_in(names)] if isinstance(names, str) else [(str(names), "", "")]
    return [(os.path.realpath(name) if os.path.exists(name) else name) + mark + own for name, mark, own in parts]


def _end_of(folder: str) -> Optional[tuple[int, dict[str, Any]]]:
    """(the last step, the flags) of a run whose last row says that it ended; None for every other folder."""
    path, begin, line = os.path.join(folder, METRICS_FILE), b"", b""
    if not os.path.isfile(path):
        return None
    for line in lines_of(path, "--output_dir"):
        begin = line if line.startswith(BEGINNINGS) and b'"config": ' in line else begin
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # a row that was cut is no end
        end, flags = json.loads(line), json.loads(begin)["config"]
        if end["event"] == "end" and isinstance(end["steps"], int) and isinstance(flags, dict):
            return end["steps"], flags
    return None
