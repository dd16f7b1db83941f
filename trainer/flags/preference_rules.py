"""Rules for the flags of `train_rm`, `train_dpo` and `train_kd`."""

from trainer.comma_separated import addresses_in, names_in
from trainer.flags.rule import Rule
from trainer.flags.training_rules import ONE, ONE_FOR_ALL_ROWS, REMOVE, TEACHERS_HAVE_WEIGHTS

# fmt: off
PAIR_RULES = (
    Rule("max_tokens_per_micro_batch", lambda f: not f.packing_samples, "without --packing_samples",
         "the padding between the two answers of a pair is not counted",
         "Add --packing_samples, or use --micro_train_batch_size."),
)
# fmt: on

# fmt: off
REWARD_RULES = (
    *PAIR_RULES,
    Rule("margin_key", lambda f: f.loss != "sigmoid", "with --loss {loss}", "this loss has no margin",
         "Take --loss sigmoid."),
    Rule("sequence_parallel", lambda f: True, "with train_rm", "the reward head scores whole sequences", REMOVE),
)
# fmt: on


def _is_kto(f) -> bool:
    return f.loss == "kto"


# fmt: off
LOSS_RULES = (
    Rule("ref_offload", lambda f: f.lora_rank and not (f.ref_model or (f.lora_adapter and not f.merge_adapter)), "with --lora_rank",
         "the reference is the model without its adapter", REMOVE),
    Rule("ref_model ref_offload precompute_ref_logps", lambda f: f.loss_has_reference is False, "with --loss {loss}",
         "this loss has no reference", REMOVE),
    Rule("label_smoothing", lambda f: f.loss_has_smoothing is False, "with --loss {loss}",
         "this loss takes every label as right", "Set it to 0, or take --loss cdpo or robust."),
    Rule("loss", lambda f: f.loss_has_smoothing and not f.label_smoothing, "without --label_smoothing",
         "it is the probability of a wrong label that this loss is made for",
         "Set --label_smoothing above 0 and below 0.5.", which="cdpo or robust"),
    Rule("f_divergence", lambda f: f.loss_has_divergence is False, "with --loss {loss}",
         "this loss is no function of the difference of two log-ratios",
         "Take --loss dpo, cdpo, robust, ipo or hinge, or remove the flag."),
    Rule("loss_weights",
         lambda f: f.loss_names and len(f.loss_weights) != (0 if _is_kto(f) else len(f.loss_names)),
         "with --loss {loss}", "the numbers of weights and of losses of pairs differ",
         "Give one number for each loss of pairs, or remove the flag.", which="of another number"),
    Rule("nll_loss_coef", _is_kto, "with --loss kto", "there are no chosen answers", REMOVE),
    Rule("simpo_gamma", lambda f: f.loss_names and "simpo" not in f.loss_names, "with --loss {loss}",
         "it is the margin of simpo", "Take --loss simpo, or remove the flag."),
    Rule("f_alpha", lambda f: f.f_divergence != "alpha", "with --f_divergence {f_divergence}",
         "it is a constant of the alpha divergence", "Take --f_divergence alpha, or remove the flag."),
)
# fmt: on

# fmt: off
ONLINE_RULES = (
    Rule("loss", lambda f: True, "with --online", "the answers to a prompt become pairs", "Take a loss of pairs.",
         values=("kto",)),
    Rule("online", lambda f: f.n_samples_per_prompt < 2, "with --n_samples_per_prompt 1", "a pair has two answers",
         "Set --n_samples_per_prompt to 2 or more."),
    Rule("online", lambda f: f.has_images, "with rows that have images",
         "pairs of the model's own answers have only text", "Take rows without images."),
    *PAIR_RULES,
    *LOSS_RULES,
    Rule("precompute_ref_logps aux_loss_coef max_staleness routing_replay share_prompts sample_pages",
         lambda f: True, "with --online", "this is not built for pairs of the model's own answers", REMOVE),
    Rule("temperature top_p top_k min_p", lambda f: f.rollout_engine == "sglang", "with --online and --rollout_engine sglang",
         "only log-probs show which weights its servers have, and the loss has those of temperature 1 and of all tokens",
         "Remove the flag, or take --rollout_engine vllm_server."),
    Rule("allow_no_stop", lambda f: True, "with --online", "the model's own answers end with the stop token that it wrote", REMOVE),
)
# fmt: on

# fmt: off
DPO_RULES = (
    *PAIR_RULES,
    *LOSS_RULES,
    Rule("ref_model ref_offload precompute_ref_logps", lambda f: f.load_in_4bit, "with --load_in_4bit",
         "the reference is the model without its adapter", REMOVE),
    Rule("lora_adapter", lambda f: f.load_in_4bit and f.loss_has_reference and not f.merge_adapter, "with --load_in_4bit",
         "the reference is the model with this adapter, in full precision", "Remove --load_in_4bit."),
    Rule("precompute_ref_logps", _is_kto, "with --loss kto", "kto pairs prompts and answers again in every epoch",
         "Remove the flag, or use --ref_offload."),
    Rule("ref_offload", lambda f: f.precompute_ref_logps, "with --precompute_ref_logps",
         "the reference is freed before training", ONE),
    Rule("train_batch_size", _is_kto, "with --loss kto",
         "its estimate of the KL pairs prompts with other answers", "Set it to 2 or more.", values=(1,)),
    Rule("completion_key label_key desirable_weight undesirable_weight", lambda f: not _is_kto(f),
         "with --loss {loss}", "only kto has single answers", "Take --loss kto, or remove the flag."),
)
# fmt: on

_SERVED = "with a server in --teacher"
OF_DISTANCE = "kd_temperature kd_loss kd_beta kd_top_k teacher_weights"

# fmt: off
KD_RULES = (
    Rule("dataset", lambda f: f.has_images, "with rows that have images",
         "distillation is not built for models of images", "Take rows without images."),
    Rule("load_in_4bit", lambda f: True, "with train_kd",
         "the student and the teacher share the code of full weights", REMOVE),
    Rule("layout", lambda f: True, "with train_kd", "the plan knows one model", "Set the flags of the layout.",
         values=("auto",)),
    ONE_FOR_ALL_ROWS,
    Rule("teacher_offload", lambda f: f.teacher_answers, "with --teacher_answers",
         "the teacher is freed before training", REMOVE),
    Rule("teacher_answers", lambda f: len(names_in(f.teacher)) > 1, "with several models of --teacher", "one model answers",
         "Take one teacher."),
    Rule("teacher", lambda f: addresses_in(f.teacher) and not f.kd_top_k, "without --kd_top_k",
         "a server sends the log-probs of its likeliest tokens only", "Add --kd_top_k, up to --max-logprobs of the server.",
         which="on a server"),
    Rule("teacher_answers", lambda f: addresses_in(f.teacher), _SERVED, "the hf engine answers with weights that are here",
         "Let the server answer first, and train on its answers."),
    Rule("kd_temperature", lambda f: addresses_in(f.teacher), _SERVED, "its log-probs are those of temperature 1", REMOVE),
    Rule("kd_loss", lambda f: addresses_in(f.teacher), _SERVED,
         "it does not send how unlikely all other tokens are", "Take kl or jsd.", values=("reverse_kl",)),
    Rule("kd_beta", lambda f: addresses_in(f.teacher), _SERVED,
         "it does not send how unlikely all other tokens are", "Take a number below 1.", values=(1.0,)),
    Rule("tensor_parallel_size", lambda f: addresses_in(f.teacher), _SERVED,
         "each rank asks by itself, and answers to the same tokens may differ in their last bits", "Set it to 1."),
    Rule("teacher_offload", lambda f: len(addresses_in(f.teacher)) == len(names_in(f.teacher)), "with servers in --teacher alone",
         "no teacher is here", REMOVE),
    Rule("teacher_api_key teacher_timeout teacher_retries", lambda f: not addresses_in(f.teacher),
         "without a server in --teacher", "nothing is asked", REMOVE),
    TEACHERS_HAVE_WEIGHTS,
    Rule("teacher_weights", lambda f: not (all(weight >= 0 for weight in f.teacher_weights) and any(f.teacher_weights)), "with train_kd",
         "the student would learn to differ from a teacher, or nothing", "Give weights of 0 or more, not all 0.", which="below 0 or all 0"),
    Rule("kd_beta", lambda f: f.kd_loss != "jsd", "with --kd_loss {kd_loss}", "it is the share of a mixture",
         "Take --kd_loss jsd, or remove the flag."),
    Rule(f"teacher_offload {OF_DISTANCE}", lambda f: f.kd_coef == 0, "with --kd_coef 0",
         "training does not use the teacher's probabilities", "Take --kd_coef above 0, or remove the flag."),
    Rule(OF_DISTANCE, lambda f: f.teacher_answers and f.kd_coef is None,
         "with --teacher_answers and without --kd_coef", "training does not use the teacher's probabilities",
         "Add --kd_coef above 0, or remove the flag."),
    Rule("kd_coef", lambda f: not f.teacher_answers, "without --teacher_answers", "nothing comes from the teacher",
         "Take a number above 0, or train_sft.", values=(0,)),
    Rule("generate_max_len temperature micro_rollout_batch_size", lambda f: not f.teacher_answers,
         "without --teacher_answers", "the teacher answers nothing", "Add --teacher_answers, or remove the flag."),
    Rule("dataset_flags", lambda f: f.teacher_answers, "with --teacher_answers",
         "the teacher answers the prompts of all sets in the same way", "Take sets with the same columns."),
    Rule("output_key multiturn train_on pretrain_mode", lambda f: f.teacher_answers, "with --teacher_answers",
         "the answers in --dataset are not read", REMOVE),
    Rule("eval_dataset", lambda f: f.teacher_answers, "with --teacher_answers", "the teacher answers only --dataset",
         REMOVE),
    Rule("eval_fraction", lambda f: f.teacher_answers, "with --teacher_answers",
         "several answers to one prompt would stand in both parts", REMOVE),
    Rule("teacher_answers", lambda f: f.generate_max_len >= f.max_len,
         "with --generate_max_len {generate_max_len} and --max_len {max_len}", "nothing is left for prompts",
         "Take a smaller --generate_max_len."),
)
# fmt: on
