"""Rules for the flags of `train_ppo`: advantages, policy loss, KL, teacher, critic, shared prompts, images."""

import os

from trainer.comma_separated import models_in, names_in
from trainer.flags.rule import Rule
from trainer.flags.training_rules import ONE, REMOVE, TEACHERS_HAVE_WEIGHTS

NO_IMAGES = "Remove the flag, or take rows without images."
CLIPPING = ("ppo", "gspo", "gspo_token", "clip_cov")  # policy losses that --dual_clip fits


OF_GROUPS = (
    "reinforce_baseline",
    "rloo",
    "group_norm",
    "dr_grpo",
    "maxrl",
    "gdpo",
    "scalerl",
)  # they compare the responses to a prompt


OF_REFERENCE = ("grpo", "rloo", "reinforce++", "ppo")  # presets with a KL to a reference


def _has_critic(f) -> bool:
    return f.advantage_estimator == "gae"


# fmt: off
TEACHER_RULES = (
    Rule("preset", lambda f: f.teacher, "with --teacher", "this algorithm has a KL to a reference, and the teacher takes its place",
         "Give the other flags of the preset in its place.", values=OF_REFERENCE),
    Rule("preset", lambda f: not f.teacher, "without --teacher", "it sets the loss of a distillation",
         "Add --teacher MODEL.", values=("opd",)),
    Rule("teacher", lambda f: not f.teacher_key and any("=" in name and not os.path.isdir(name) for name in names_in(f.teacher)),
         "without --teacher_key", "no column chooses the teacher of a row", "Add --teacher_key COLUMN, or name models alone.",
         which="of the form NAME=MODEL"),
    Rule("teacher_key teacher_weights", lambda f: not f.teacher, "without --teacher", "there is no teacher to choose",
         "Add --teacher, or remove the flag."),
    Rule("teacher_weights", lambda f: f.teacher_key, "with --teacher_key", "the column chooses one teacher for each row", ONE),
    TEACHERS_HAVE_WEIGHTS,
    Rule("teacher_weights", lambda f: abs(sum(f.teacher_weights) - 1) > 1e-6, "with reinforcement learning",
         "they are shares of a mean", "Give weights with sum 1; --init_kl_coef weighs all teachers together.",
         which="of another sum than 1"),
    Rule("teacher_weights", lambda f: not all(weight >= 0 for weight in f.teacher_weights), "with reinforcement learning",
         "they are shares of a mean", "Give weights of 0 or more.", which="below 0"),
    Rule("teacher", lambda f: any("://" in name for name in names_in(f.teacher)), "with reinforcement learning",
         "only train_kd asks servers", "Name a model that is loaded here.", which="on a server"),
    Rule("teacher", lambda f: not f.init_kl_coef, "with --init_kl_coef 0",
         "the KL to the teacher counts in the advantage, and this is its weight", "Remove --init_kl_coef."),
    Rule("advantage_estimator", lambda f: not f.teacher, "without --teacher", "its advantage is the KL to a teacher",
         "Add --teacher MODEL.", values=("distill",)),
    Rule("ref_model", lambda f: f.teacher and f.ref_model != ",".join(models_in(f.teacher, f.teacher_key)), "with --teacher",
         "the teacher is the reference", "Remove --ref_model.", which="of another model"),
    Rule("kl_estimator", lambda f: f.teacher, "with --teacher",
         "the advantage of a token is the difference of log-probs, which is k1", REMOVE),
    Rule("use_kl_loss kl_in_score", lambda f: f.teacher, "with --teacher",
         "the KL to the teacher is in the advantage of each token", REMOVE),
    Rule("dynamic_filtering positive_nll_coef", lambda f: f.advantage_estimator == "distill", "with --advantage_estimator distill",
         "scores are only logged", "Give another --advantage_estimator, which adds scores to the teacher, or remove the flag."),
    Rule("kd_loss", lambda f: not f.teacher, "without --teacher", "there is no distribution to compare with", "Add --teacher MODEL."),
    Rule("kd_beta kd_top_k", lambda f: f.kd_loss is None, "without --kd_loss", "only sampled tokens are compared",
         "Add --kd_loss, or remove the flag."),
    Rule("kd_beta", lambda f: f.kd_loss in ("kl", "reverse_kl"), "with --kd_loss {kd_loss}", "only jsd has a mixture",
         "Take --kd_loss jsd, or remove the flag."),
    Rule("kd_loss", lambda f: f.teacher and f.advantage_estimator != "distill", "with --advantage_estimator {advantage_estimator}",
         "the distance to the teacher is the whole loss", ONE),
    Rule("kd_loss", lambda f: f.init_kl_coef not in (0, 1), "with --init_kl_coef {init_kl_coef}",
         "the distance is the whole loss, so a weight would only scale it", "Remove --init_kl_coef."),
    Rule("preset", lambda f: f.kd_loss, "with --kd_loss", "both set the loss of a distillation", ONE, values=("opd",)),
    Rule("policy_loss eps_clip eps_clip_high dual_clip off_policy_mask_threshold entropy_loss_coef entropy_target tis_cap rollout_kl_max "
         "top_entropy_quantile bypass_mode kl_target", lambda f: f.kd_loss, "with --kd_loss",
         "the loss is a distance, without a policy ratio", REMOVE),
    Rule("share_prompts routing_replay exact", lambda f: f.kd_loss, "with --kd_loss",
         "this is not compared with a plain loop yet", REMOVE),
    Rule("aux_loss_coef", lambda f: f.kd_loss, "with --kd_loss", "the distance to the teacher is the whole loss", REMOVE),
)
# fmt: on

# fmt: off
ADVANTAGE_RULES = (
    Rule("advantage_estimator", lambda f: f.n_samples_per_prompt < 2, "with --n_samples_per_prompt 1",
         "it compares the responses to one prompt", "Set --n_samples_per_prompt to 2 or more.", values=OF_GROUPS),
    Rule("lambd policy_lambd policy_lambd_alpha critic_pretrain offload_critic value_clip freezing_actor_steps", lambda f: not _has_critic(f),
         "with --advantage_estimator {advantage_estimator}", "only gae trains a critic",
         "Take --advantage_estimator gae, or remove the flag."),
    Rule(
        "critic_learning_rate",
        lambda f: not _has_critic(f) and not f.is_demo,  # the demo sets it for runs with gae
        "with --advantage_estimator {advantage_estimator}",
        "only gae trains a critic",
        "Take --advantage_estimator gae, or remove the flag.",
    ),
    Rule("policy_lambd_alpha", lambda f: f.policy_lambd is not None, "with --policy_lambd {policy_lambd}",
         "both set the lambda of the policy", ONE),
    Rule("sequence_parallel", _has_critic, "with --advantage_estimator gae",
         "the head of a critic needs whole sequences", "Remove the flag, or take an estimator without a critic."),
    Rule("no_advantage_std_norm", lambda f: f.advantage_estimator in ("rloo", "dr_grpo", "maxrl", "distill"),
         "with --advantage_estimator {advantage_estimator}", "this estimator never divides by a standard deviation",
         REMOVE),
    Rule("advantage_batch_std", lambda f: f.advantage_estimator != "group_norm",
         "with --advantage_estimator {advantage_estimator}", "only group_norm divides by the deviation of scores",
         "Take --advantage_estimator group_norm, or remove the flag."),
    Rule("advantage_batch_std", lambda f: f.no_advantage_std_norm, "with --no_advantage_std_norm",
         "nothing is divided by a deviation", ONE),
    Rule("no_advantage_std_norm kl_in_score overlong_buffer_len reward_clip_range mask_truncated",
         lambda f: f.advantage_estimator == "scalerl", "with --advantage_estimator scalerl",
         "scores alone say which prompts count, and in which unit", "Take group_norm, or remove the flag."),
    Rule("normalize_reward kl_in_score overlong_buffer_len", lambda f: f.advantage_estimator == "maxrl",
         "with --advantage_estimator maxrl", "it divides by the mean score, and this makes scores below 0", ONE),
    Rule("advantage_estimator", lambda f: "," not in (f.reward_func or ""), "without several functions of --reward_func",
         "it normalises the scores of each function by itself", "Give several, comma-separated, or take group_norm.",
         values=("gdpo",)),
    Rule("normalize_reward reward_clip_range kl_in_score overlong_buffer_len no_advantage_std_norm dynamic_filtering",
         lambda f: f.advantage_estimator == "gdpo", "with --advantage_estimator gdpo",
         "it normalises the scores of each function, and does not use their sum", ONE),
    Rule("turn_rewards", lambda f: not f.env, "without --env", "only episodes have several turns", "Add --env, or remove the flag."),
    Rule("turn_rewards", lambda f: f.advantage_estimator not in ("gae", "reinforce"),
         "with --advantage_estimator {advantage_estimator}", "it compares the scores of whole episodes",
         "Take gae or reinforce, or remove the flag."),
    Rule("normalize_reward reward_clip_range kl_in_score overlong_buffer_len", lambda f: f.turn_rewards,
         "with --turn_rewards", "it changes the score of an episode, and each turn has its own reward", ONE),
    Rule("gamma", lambda f: f.advantage_estimator == "distill", "with --advantage_estimator distill",
         "later tokens do not count", REMOVE),
)
# fmt: on

# fmt: off
POLICY_RULES = (
    Rule("eps_clip eps_clip_high", lambda f: f.policy_loss in ("reinforce", "sapo", "kl_cov"),
         "with --policy_loss {policy_loss}", "this loss does not clip the policy ratio",
         "Take another --policy_loss, such as ppo, or remove the flag."),
    Rule("dual_clip", lambda f: f.policy_loss not in CLIPPING, "with --policy_loss {policy_loss}",
         "it bounds the loss of a clipped ratio",
         f"Take --policy_loss {', '.join(CLIPPING[:-1])} or {CLIPPING[-1]}, or remove the flag."),
    Rule("sapo_temperatures", lambda f: f.policy_loss != "sapo", "with --policy_loss {policy_loss}",
         "only sapo has a gate", "Take --policy_loss sapo, or remove the flag."),
    *(
        Rule(flag, lambda f, losses=losses: f.policy_loss not in losses, "with --policy_loss {policy_loss}",
             f"only {' and '.join(losses)} {verb} tokens by their covariance",
             f"Take --policy_loss {' or '.join(losses)}, or remove the flag.")
        for flag, losses, verb in (("cov_share", ("clip_cov", "kl_cov"), "choose"), ("cov_range", ("clip_cov",), "clips"),
                             ("kl_cov_coef", ("kl_cov",), "weights"))
    ),
    Rule("entropy_coef_delta entropy_coef_max", lambda f: f.entropy_target is None, "without --entropy_target",
         "the weight of the entropy is constant", "Add --entropy_target, or remove the flag."),
    Rule("entropy_target", lambda f: f.entropy_loss_coef > f.entropy_coef_max, "with --entropy_loss_coef {entropy_loss_coef}",
         "the start is above --entropy_coef_max", "Set --entropy_loss_coef to at most --entropy_coef_max."),
    Rule("tis_cap rollout_kl_max", lambda f: f.bypass_mode, "with --bypass_mode",
         "the old policy is the rollout engine, so their ratio is 1", ONE),
    Rule("top_entropy_quantile", lambda f: f.bypass_mode, "with --bypass_mode",
         "entropies need the pass of the old policy, which is left out", ONE),
    Rule("bypass_mode", lambda f: f.policy_loss == "reinforce", "with --policy_loss reinforce",
         "this loss has no ratio, which would correct for the engine", "Take another --policy_loss, such as ppo or cispo, or --tis_cap."),
    Rule("tis_level tis_mask tis_floor", lambda f: f.tis_cap is None, "without --tis_cap",
         "tokens have no importance weights", "Add --tis_cap, or remove the flag."),
    Rule("tis_cap", lambda f: f.tis_mask and not f.tis_mask_range and f.tis_cap <= 1, "with --tis_mask",
         "it would keep no weight", "Set it above 1.", which="of at most 1"),
    Rule("tis_floor", lambda f: f.tis_cap is not None and f.tis_floor > f.tis_cap, "with --tis_cap {tis_cap}",
         "the least weight is above the largest", "Set it to at most --tis_cap.", which="above --tis_cap"),
    Rule("tis_mask_range tis_mask_level", lambda f: not f.tis_mask, "without --tis_mask", "no token is rejected by a ratio",
         "Add --tis_mask, or remove the flag."),
    Rule("rejected_tokens", lambda f: not f.tis_mask and f.rollout_kl_max is None and f.top_entropy_quantile is None,
         "without --tis_mask, --rollout_kl_max and --top_entropy_quantile", "no token is rejected",
         "Add one of them, or remove the flag."),
    Rule("rejected_tokens", lambda f: f.loss_agg == "prompt", "with --loss_agg prompt",
         "this mean counts all tokens of a prompt's responses", "Take another --loss_agg, or remove the flag.",
         values=("leave",)),
    Rule("rollout_kl_estimator", lambda f: f.rollout_kl_max is None, "without --rollout_kl_max",
         "the KL of rollouts has no bound", "Add --rollout_kl_max, or remove the flag."),
)
# fmt: on

# fmt: off
KL_RULES = (
    Rule("use_kl_loss kl_target ref_model offload_ref kl_in_score kl_estimator", lambda f: not f.init_kl_coef,
         "with --init_kl_coef 0", "there is no reference", "Set --init_kl_coef above 0, or remove the flag."),
    Rule("kl_in_score", lambda f: f.use_kl_loss, "with --use_kl_loss",
         "the KL counts once, in the score or in the loss", ONE),
    Rule("use_kl_loss", lambda f: f.kl_estimator == "k1", "with --kl_estimator k1",
         "the gradient of k1 is zero on average", "Set --kl_estimator to k2 or k3."),
    Rule("kl_unbiased", lambda f: not (f.use_kl_loss and f.kl_estimator == "k3"),
         "without --use_kl_loss and --kl_estimator k3", "it corrects the gradient of this term of the loss",
         "Add both flags, or remove the flag."),
    Rule("kl_horizon", lambda f: f.kl_target is None, "without --kl_target", "the weight of the KL is constant",
         "Add --kl_target, or remove the flag."),
    Rule("offload_ref", lambda f: f.lora_rank and not (f.ref_model or (f.lora_adapter and not f.merge_adapter)), "with --lora_rank",
         "the reference is the policy without its adapter", REMOVE),
)
# fmt: on

# fmt: off
SHARING_RULES = (
    Rule("share_prompts", lambda f: f.n_samples_per_prompt == 1, "with --n_samples_per_prompt 1",
         "no prompt has two responses", "Set --n_samples_per_prompt to 2 or more."),
    Rule("share_prompts", lambda f: f.packing_samples, "with --packing_samples",
         "the samples of a packed row see no common prompt", ONE),
    Rule("share_prompts", lambda f: f.max_tokens_per_micro_batch, "with --max_tokens_per_micro_batch",
         "a prompt would count once for each response", ONE),
    Rule("share_prompts", lambda f: f.ring_attn_size > 1, "with --ring_attn_size {ring_attn_size}",
         "attention over several ranks does not merge shared prompts", ONE),
    Rule("share_prompts", lambda f: f.sequence_parallel, "with --sequence_parallel",
         "this is not compared with separate rows yet", ONE),
    Rule("share_prompts", lambda f: f.attn_implementation not in ("auto", "sdpa"),
         "with --attn_implementation {attn_implementation}", "it has kernels of its own, in place of sdpa",
         "Take --attn_implementation sdpa."),
    Rule("share_prompts", _has_critic, "with --advantage_estimator gae", "a critic reads rows of one response",
         "Take an estimator without a critic, such as group_norm."),
    Rule("share_prompts", lambda f: f.reward_pretrain, "with --reward_pretrain",
         "reward models read rows of one response", ONE),
    Rule("share_prompts", lambda f: f.routing_replay, "with --routing_replay",
         "each response brings its own experts for the tokens of the prompt", ONE),
    Rule("share_prompts", lambda f: f.aux_loss_coef, "with --aux_loss_coef",
         "this loss counts the tokens of a prompt once for each response", ONE),
)
# fmt: on

# fmt: off
IMAGE_RULES = (
    *(
        Rule(flags, lambda f, when=when: f.has_images and when(f), "with rows that have images", why, instead, values)
        for flags, values, when, why, instead in (
            (
                "rollout_engine",
                ("vllm_server", "sglang"),
                lambda f: True,
                "a server gets only tokens",
                "Take --rollout_engine hf or vllm.",
            ),
            (
                "rollout_engine",
                ("vllm",),
                lambda f: (f.engine_tensor_parallel_size or f.tensor_parallel_size) > 1,
                "an engine on several ranks is not compared with images yet",
                "Set --engine_tensor_parallel_size to 1.",
            ),
            (
                "reward_pretrain",
                (),
                lambda f: True,
                "reward models of train_ppo read only text",
                "Use --reward_func or --remote_rm_url.",
            ),
            ("ref_model", (), lambda f: True, "the reference is --pretrain", REMOVE),
            ("env", (), lambda f: True, "environments take only text", NO_IMAGES),
            ("max_staleness", (), lambda f: True, "the thread that generates ahead passes no images on", NO_IMAGES),
            ("routing_replay", (), lambda f: True, "the engine does not record experts for images", NO_IMAGES),
            ("speculative_tokens", (), lambda f: True, "drafts are not compared with images yet", REMOVE),
            ("share_prompts", (), lambda f: True, "rows that share a prompt have no places for images", NO_IMAGES),
        )
    ),
    Rule("dataset", lambda f: f.has_images and _has_critic(f), "with --advantage_estimator gae",
         "rows have images, and a critic reads only text", "Take an estimator without a critic, such as group_norm."),
)
# fmt: on

PPO_RULES = (*TEACHER_RULES, *ADVANTAGE_RULES, *POLICY_RULES, *KL_RULES, *SHARING_RULES, *IMAGE_RULES)
