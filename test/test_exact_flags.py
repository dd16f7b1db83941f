"""Every flag with --exact: it has equal bits on several layouts, or changes no number of a layout, or is refused by name."""

import inspect
import json
import re
import sys

import pytest
import test_exact
from exact_flags import LAYOUTS, OF_ROLLOUTS, OF_ROWS, combined_rl_line, layouts_of, numbers_of, rl_line, row_line
from launch import ROOT, run_process, train_many

from trainer.checkpoints.run_identity import EFFECT_OF, OUTPUT, SAMPLES
from trainer.compare.runs.exact_bits import bits_of, first_difference
from trainer.flags.parse_flags import flags_of, flat
from trainer.flags.rule import UNKNOWN, defaults_of, first_broken
from trainer.flags.rules import COMMANDS, RULES

EXACT = ("train_sft", "train_rm", "train_dpo", "train_kd", "train_ppo")


def test_flags_of_rows_have_equal_bits(shared_data, tmp_path):
    test_exact.save_steep_models(tmp_path, f"{shared_data}/models/stories260K-hf", [1.5])
    pairs = map(json.loads, (shared_data / "gsm8k/pairs.jsonl").read_text().splitlines()[:9])
    rows = [json.dumps(pair | {"margin": number / 7}) for number, pair in enumerate(pairs)]
    (tmp_path / "margins.jsonl").write_text("\n".join(rows))
    said = train_many(1, [row_line(kind, "f", tmp_path, shared_data) for kind in OF_ROWS], tmp_path, 500)
    assert [f"exact: --cpu_matmul is {name}; auto becomes mkl\n" in said for name in ("mkl", "onednn")] == [True, True]
    layouts = [(kind, layout) for kind in OF_ROWS for layout in layouts_of(kind)]
    train_many(2, [row_line(*pair, tmp_path, shared_data) for pair in layouts], tmp_path, 900)
    for kind, layout in layouts:
        alone, pair = tmp_path / f"{kind}-f", tmp_path / f"{kind}-{layout}"
        assert bits_of(alone).steps == 2 and len(bits_of(pair).tensors) == 2, kind
        assert first_difference(bits_of(alone), bits_of(pair)) is None, (kind, layout)
        assert numbers_of(alone) == numbers_of(pair), (kind, layout)


def test_the_error_of_exact_is_not_larger_than_that_of_the_plain_loop(shared_data, tmp_path):
    """Against the plain loop in fp64, over three steps."""
    flags = ["--pretrain", f"{shared_data}/models/stories260K-hf", "--dataset", f"{shared_data}/gsm8k/train.jsonl"]
    flags += [
        "--input_key",
        "question",
        "--output_key",
        "answer",
        "--max_len",
        "256",
        "--max_samples",
        "24",
        "--no_shuffle",
    ]
    flags += ["--train_batch_size", "8", "--learning_rate", "1e-3", "--weight_decay", "0.1", "--max_steps", "3"]
    code, output = run_process([sys.executable, str(ROOT / "test/exact_error.py"), str(tmp_path), *flags])
    assert code == 0, output[-3000:]
    found = {
        kind: json.loads(re.search(f"^{kind} ({{.*}})", output, re.M)[1].replace("'", '"'))
        for kind in ("exact", "plain fp32")
    }
    for name in ("gradients", "losses", "weights"):
        error, plain = (float(found[kind][name]) for kind in ("exact", "plain fp32"))
        assert 0 < error <= 1.1 * plain < 1e-4, (name, error, plain)


def _in_line(line: list[str]) -> set[str]:
    return {word.removeprefix("--") for word in line if word.startswith("--")}


def _in_source(function) -> set[str]:
    return set(re.findall(r'"--(\w+)"', inspect.getsource(function)))


def compared(command: str) -> set[str]:
    """The flags of runs whose bits a test compares. The loop, the optimizer and the layout of train_sft are those of all."""
    found = _in_source(test_exact.line) | _in_line(test_exact.LORA)
    for function in (
        test_exact.test_layouts_have_equal_bits_and_so_has_a_resume_on_another,
        test_exact.test_other_commands_have_equal_bits_too,
        test_exact.test_one_ulp_in_the_gradient_of_one_rank_is_located,
    ):
        found |= _in_source(function)
    found |= _in_line([word for layout in LAYOUTS.values() for word in layout])
    for kind, (of, _) in OF_ROWS.items():
        found |= _in_line(row_line(kind, "f-tp2", ".", ".")) if of in (command, "train_sft") else set()
    if command == "train_ppo":
        found = set().union(*(_in_line(combined_rl_line(kind, "f-tp2", ".")) for kind in OF_ROLLOUTS))
        found |= _in_line(rl_line("f", "f", ".") + [word for layout in LAYOUTS.values() for word in layout])
        found |= {"rollouts_from"}  # test_exact_rollouts.py
    return found


# flags that decide what is read or asked for before there is a layout, or only how fast and where something is done
NO_NUMBERS = """pretrain dataset eval_dataset eval_dataset_flags eval_split eval_source_key limits trust_remote_code dataset_num_proc
    layout preset device deterministic allow_change max_skipped_steps train_on multiturn label_key max_failed_share
    max_logprob_diff reward_timeout lora_adapter best_metric_key early_stopping_patience load_best_model_at_end
    micro_rollout_batch_size value_head_prefix seed no_shuffle lr_scheduler warmup_steps lr_warmup_ratio min_lr_ratio adam_betas
    adam_eps weight_decay max_norm"""
# the last ones are numbers of the step of train_ppo, which is that of train_sft

ENV, JUDGE, IMAGES = {"env": "e.py"}, {"reward_func": "judge"}, {"has_images": True}
SERVER, CRITIC = {"rollout_engine": "vllm_server", "engine_urls": "a"}, {"advantage_estimator": "gae"}
SERVED = {"teacher": "http://a", "kd_top_k": 5}
TIS, REMOTE, STALE = {"tis_cap": 2.0}, {"remote_rm_url": "http://a"}, {"max_staleness": 1}
VLLM, KTO, SAPO = {"rollout_engine": "vllm"}, {"loss": "kto"}, {"policy_loss": "sapo"}
ANSWERS, REWARDS, LORA = {"teacher_answers": 1}, {"reward_pretrain": "r"}, {"lora_rank": 2}
KL_MAX, ENTROPY = {"rollout_kl_max": 1.0}, {"entropy_target": 1.0}
TEACHER = {"teacher": "t", "kd_loss": "jsd", "advantage_estimator": "distill", "init_kl_coef": 1.0}
# refused: the values with which a flag is refused, by the flag or by what it needs
REFUSED: dict[str, dict] = {
    "add_tokens": {"add_tokens": "<a>"},
    "cpu_matmul": {"cpu_matmul": "onednn"},
    "param_dtype": {"param_dtype": "bf16"},
    "activation_offload": {"activation_offload": True, "on_cpu": True, "gradient_checkpointing": True},
    "use_hf_tp_plan": {"use_hf_tp_plan": True, "tensor_parallel_size": 2},
    "sequence_parallel": {"sequence_parallel": True, "tensor_parallel_size": 2},
    "expert_parallel_size": {"expert_parallel_size": 2},
    "ring_attn_kernel": {"ring_attn_kernel": "ring_flash_attn", "ring_attn_size": 2},
    "reduce_dtype": {"reduce_dtype": "bf16"},
    "lora_dropout": {"lora_dropout": 0.1},
    "fp8": {"fp8": "tensorwise"},
    "optim": {"optim": "muon"},
    "aux_loss_coef": {"aux_loss_coef": 0.1},
    "expert_bias_update_rate": {"expert_bias_update_rate": 0.1},
    "streaming_buffer": {"streaming": True, "streaming_buffer": 3},
    **dict.fromkeys(("freeze_vision", "vision_learning_rate", "cache_pixels"), IMAGES),
    **dict.fromkeys(("desirable_weight", "undesirable_weight"), KTO),
    "teacher_answers": ANSWERS,
    **dict.fromkeys(("generate_max_len", "temperature"), ANSWERS),
    "policy_loss": {"policy_loss": "gspo"},
    **dict.fromkeys(("sapo_temperatures", "cov_share", "cov_range", "kl_cov_coef"), SAPO),
    **dict.fromkeys(("engine_urls", "engine_api_key", "sync_folder", "sync_deltas", "rollout_engine"), SERVER),
    **dict.fromkeys(("engine_tensor_parallel_size", "vllm_gpu_memory_utilization", "speculative_tokens"), VLLM),
    **dict.fromkeys(("max_staleness", "partial_rollouts"), STALE),
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.1},
    **{flag: JUDGE for flag in EFFECT_OF if flag.startswith("judge_")},
    **{flag: REMOTE for flag in EFFECT_OF if flag.startswith("remote_rm_")},
    **dict.fromkeys(("teacher_api_key", "teacher_timeout", "teacher_retries"), SERVED),
    **dict.fromkeys((*(flag for flag in EFFECT_OF if flag.startswith("env")), "turn_rewards"), ENV),
    **dict.fromkeys(("reward_pretrain", "offload_reward"), REWARDS),
    **dict.fromkeys(
        (
            "lambd",
            "policy_lambd",
            "policy_lambd_alpha",
            "critic_pretrain",
            "critic_learning_rate",
            "offload_critic",
            "value_clip",
            "freezing_actor_steps",
        ),
        CRITIC,
    ),
    **{flag: TIS for flag in EFFECT_OF if flag.startswith("tis_")},
    **dict.fromkeys(("rollout_kl_max", "rollout_kl_estimator", "rejected_tokens"), KL_MAX),
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.1},
    "top_entropy_quantile": {"top_entropy_quantile": 0.2},
    "ema_beta": {"ema_beta": 0.9},
    "positive_nll_coef": {"positive_nll_coef": 0.1},
    "entropy_loss_coef": {"entropy_loss_coef": 0.1},
    **dict.fromkeys(("entropy_target", "entropy_coef_delta", "entropy_coef_max"), ENTROPY),
    **dict.fromkeys(("lora_rank", "lora_alpha", "use_rslora", "target_modules", "lora_adapter"), LORA),
}
OF_TEACHERS = dict.fromkeys(("kd_loss", "kd_beta", "kd_top_k"), TEACHER)


def rules_of(command: str, flag: str) -> tuple:
    return RULES[f"{command} --online" if flag == "online" else command]


@pytest.mark.parametrize("command", EXACT)
def test_each_flag_is_compared_or_changes_no_number_or_is_refused(command):
    defaults = {**defaults_of(COMMANDS.values()), **UNKNOWN, **flat(COMMANDS[command]())}
    base = {**defaults, "exact": True, "param_dtype": "fp32"}
    if command == "train_ppo":
        base |= {"advantage_estimator": "group_norm", "reward_func": "math", "n_samples_per_prompt": 2}
    assert first_broken(RULES[command], base, defaults) is None
    no_numbers = {*NO_NUMBERS.split()} | {flag for flag, effect in EFFECT_OF.items() if effect in (OUTPUT, SAMPLES)}
    unknown, is_compared = [], compared(command)
    for flag in sorted({field.name for field, _ in flags_of(COMMANDS[command])} - {"exact"}):
        values = (OF_TEACHERS if command == "train_ppo" else {}).get(flag) or REFUSED.get(flag)
        values = {flag: True} if values is None and defaults[flag] is False else values
        refusal = str(first_broken(rules_of(command, flag), base | values, defaults)) if values else ""
        is_refused = refusal.startswith(("--exact ", *(f"--{name} " for name in (flag, *(values or ())))))
        if not (flag in is_compared or flag in no_numbers or is_refused):
            unknown.append(f"{flag}: {refusal}")
    assert not unknown, unknown
