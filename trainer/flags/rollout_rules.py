"""Rules for runs with rollouts, `train_ppo` and `train_dpo --online`: engines, servers, staleness, replay, rewards."""

import ipaddress
import itertools
import math

from trainer.comma_separated import names_in
from trainer.flags.data_rules import ADD_EVALUATION, has_evaluation
from trainer.flags.rl_flags import BUILT_IN_REWARDS
from trainer.flags.rule import Rule
from trainer.flags.training_rules import ONE, REMOVE

SERVERS = ("vllm_server", "sglang")  # engines with addresses
SOURCES = ("reward_func", "reward_pretrain", "remote_rm_url", "env")  # of scores


def _judges(f) -> bool:
    return "judge" in names_in(f.reward_func)


# fmt: off
MODEL_RULES = (
    Rule("layout", lambda f: True, "with rollouts", "the plan knows one model, and no generation",
         "Set the flags of the layout.", values=("auto",)),
    Rule("load_in_4bit", lambda f: True, "with rollouts", "the engine needs weights that are not quantized", REMOVE),
    Rule("lora_experts", lambda f: True, "with rollouts", "the engine would need merged experts", REMOVE),
    Rule("lora_dropout", lambda f: True, "with rollouts",
         "rollouts have no dropout, so training would see other probabilities", "Set it to 0."),
    Rule("param_dtype", lambda f: True, "with rollouts",
         "its loss scale may skip an update, and the phases of a rollout count on every update", "Take bf16 or fp32.",
         values=("fp16",)),
    Rule("sequence_parallel", lambda f: f.reward_pretrain, "with --reward_pretrain",
         "the head of a reward model scores whole sequences", REMOVE),
)
# fmt: on

# fmt: off
ENGINE_RULES = (
    Rule("engine_tensor_parallel_size", lambda f: f.rollout_engine != "vllm",
         "with --rollout_engine {rollout_engine}", "only vllm runs an engine on several ranks of the run",
         "Take --rollout_engine vllm. Servers have a flag of their own, such as --tensor_parallel_size of serve_engine."),
    Rule("vllm_gpu_memory_utilization", lambda f: f.rollout_engine != "vllm",
         "with --rollout_engine {rollout_engine}", "only vllm reserves a share of the GPU's memory",
         "Take --rollout_engine vllm, or remove the flag."),
    Rule("vllm_gpu_memory_utilization", lambda f: f.on_cpu, "on the CPU",
         "the cache there has room for --micro_rollout_batch_size responses", REMOVE),
    Rule("engine_urls", lambda f: f.rollout_engine not in SERVERS,
         "with --rollout_engine {rollout_engine}", "this engine runs in the training processes and has no address",
         "Take --rollout_engine vllm_server or sglang, or remove the flag."),
    Rule("engine_api_key", lambda f: not f.engine_urls, "without --engine_urls", "no server is asked", REMOVE),
    Rule("sync_deltas", lambda f: not f.engine_urls, "without --engine_urls", "no server gets weights", REMOVE),
    Rule("sync_deltas", lambda f: f.rollout_engine == "sglang", "with --rollout_engine sglang",
         "its servers read whole files of weights", REMOVE),
    Rule("sync_folder", lambda f: f.rollout_engine != "sglang", "with --rollout_engine {rollout_engine}",
         "only SGLang's servers read weights from a folder", REMOVE),
    Rule("speculative_tokens", lambda f: f.rollout_engine != "vllm", "with --rollout_engine {rollout_engine}",
         "only vllm drafts inside of training", "Take --rollout_engine vllm. serve_engine has a flag of this name."),
    Rule("speculative_tokens", lambda f: (f.engine_tensor_parallel_size or f.tensor_parallel_size) > 1,
         "for an engine on several ranks", "drafts are not compared there yet", "Set --engine_tensor_parallel_size to 1."),
    Rule("speculative_tokens", lambda f: f.min_p, "with --min_p", "vLLM does not check drafts by it",
         "Take --top_p and --top_k."),
    Rule("rollout_engine", lambda f: not f.engine_urls, "without --engine_urls", "servers run outside of training",
         "Add --engine_urls with the addresses of the servers.", values=SERVERS),
    Rule("min_p", lambda f: f.rollout_engine == "sglang", "with --rollout_engine sglang",
         "its servers with seeds stop at such a request", "Take --top_p and --top_k."),
    Rule("max_logprob_diff", lambda f: f.rollout_engine == "sglang" and f.max_logprob_diff == math.inf,
         "with --rollout_engine sglang", "no server of SGLang proves which weights it holds, so only log-probs show it",
         "Take a number, such as 0.1.", which="inf"),
    Rule("top_p min_p", lambda f: f.rollout_engine != "hf" and not f.top_k,
         "with --rollout_engine {rollout_engine} and without --top_k",
         "the engine sends the sets of tokens that it samples from, and they need a limit", "Add --top_k, such as 1000."),
    Rule("temperature", lambda f: f.rollout_engine != "hf" and f.temperature < 0.01,
         "with --rollout_engine {rollout_engine}",
         "vLLM silently raises such a temperature, and SGLang's smallest ones are greedy", "Set it to 0.01 or more.",
         which="below 0.01"),
    Rule("engine_tensor_parallel_size", lambda f: f.num_ranks % f.engine_tensor_parallel_size,
         "for {num_ranks} ranks", "every engine has the same number of ranks",
         "Take a divisor of the number of ranks.", which="that does not divide them"),
    Rule("offload_actor_optimizer offload_critic", lambda f: f.adam_offload, "with --adam_offload",
         "optimizer states are always in host memory", ONE),
    Rule("offload_actor_optimizer offload_critic", lambda f: f.rollouts_from and not has_evaluation(f),
         "with --rollouts_from", "nothing is generated", REMOVE),
)
# fmt: on

# fmt: off
STALENESS_RULES = (
    Rule("max_staleness", lambda f: f.rollout_engine == "vllm", "with --rollout_engine vllm",
         "its ranks communicate and it uses the random numbers of training, so it cannot run in a thread",
         "Take --rollout_engine hf, vllm_server or sglang."),
    Rule("max_staleness", lambda f: f.rollouts_from, "with --rollouts_from",
         "the file gives the rollouts, so nothing is generated ahead", REMOVE),
    *(
        Rule("max_staleness", lambda f, flag=flag: getattr(f, flag), f"with --{flag}",
             "generation and optimizer steps run at the same time, so the states are always in use", ONE)
        for flag in ("offload_actor_optimizer", "offload_critic")
    ),
    Rule("max_staleness", lambda f: f.verify_resume, "with --verify_resume",
         "the repeated steps would have samples of other versions of the weights", ONE),
    Rule("max_staleness", lambda f: f.tis_cap is None and not f.bypass_mode, "without --tis_cap",
         "older weights sample other tokens, which training must weight", "Add --tis_cap, such as 2, or --bypass_mode."),
    Rule("partial_rollouts", lambda f: not f.max_staleness, "without --max_staleness",
         "new weights come only between rollouts", "Add --max_staleness above 0, or remove the flag."),
    Rule("partial_rollouts", lambda f: f.stop, "with --stop", "a stop text may begin before an interruption", ONE),
    Rule("partial_rollouts", lambda f: f.routing_replay, "with --routing_replay",
         "the experts of a prefix would come from newer weights", ONE),
)
# fmt: on

# fmt: off
PROMPT_RULES = (
    Rule("curriculum", lambda f: f.num_episodes == 1 and not f.max_steps, "with one pass over the prompts",
         "it sorts prompts by the scores of an earlier pass", "Set --num_episodes to 2 or more, or add --max_steps."),
    Rule("max_logprob_diff", lambda f: f.rollouts_from, "with --rollouts_from",
         "the responses may be those of another model", REMOVE),
    Rule("curriculum", lambda f: f.rollouts_from, "with --rollouts_from", "the file gives the order of the prompts",
         REMOVE),
    Rule("dynamic_filtering", lambda f: f.rollouts_from, "with --rollouts_from",
         "the file gives all samples, so none can be replaced", ONE),
    Rule("dynamic_filtering", lambda f: f.n_samples_per_prompt < 2, "with --n_samples_per_prompt 1",
         "it keeps prompts whose responses have different scores", "Set --n_samples_per_prompt to 2 or more."),
    Rule("dynamic_filtering_range", lambda f: not f.dynamic_filtering, "without --dynamic_filtering",
         "it bounds the scores of prompts that this filter keeps", "Add --dynamic_filtering, or remove the flag."),
)
# fmt: on

# fmt: off
ANSWER_RULES = (
    Rule("eval_samples", lambda f: not f.eval_temperature, "without --eval_temperature",
         "greedy answers to a prompt are all the same", "Add --eval_temperature, such as 0.7."),
    Rule("eval_top_p", lambda f: not f.eval_temperature, "without --eval_temperature",
         "a greedy answer takes the most likely token", "Add --eval_temperature, or remove the flag."),
    Rule("eval_temperature", lambda f: f.rollout_engine != "hf" and f.eval_temperature < 0.01,
         "with --rollout_engine {rollout_engine}", "such a temperature is silently changed there", "Set it to 0, or to 0.01 or more.",
         which="below 0.01"),
)
EVAL_RULES = (
    Rule("eval_samples eval_temperature eval_top_p eval_source_key", lambda f: not has_evaluation(f), "without --eval_dataset",
         "nothing is evaluated", ADD_EVALUATION),
    Rule("eval_fraction", lambda f: f.rollouts_from, "with --rollouts_from",
         "the file gives the prompts of training", "Take --eval_dataset."),
    *ANSWER_RULES,
)
# fmt: on

# fmt: off
REPLAY_RULES = (
    Rule("routing_replay", lambda f: f.rollout_engine != "hf", "with --rollout_engine {rollout_engine}",
         "only the hf engine records experts", "Take --rollout_engine hf, or remove the flag."),
    Rule("routing_replay", lambda f: f.aux_loss_coef, "with --aux_loss_coef",
         "this loss counts the experts that the router prefers, not the replayed ones", ONE),
    Rule("routing_replay", lambda f: f.sequence_parallel, "with --sequence_parallel",
         "a router would see only its rank's tokens, and the recorded experts are those of all tokens", ONE),
    Rule("routing_replay", lambda f: f.compile, "with --compile",
         "a compiled layer hides the call of torch.topk that is replayed", ONE),
)
# fmt: on

# fmt: off
REWARD_RULES = (
    *(
        Rule(second, lambda f, first=first: getattr(f, first), f"with --{first}", "a run has one source of scores", ONE)
        for first, second in itertools.combinations(SOURCES, 2)
        if (first, second) != ("reward_func", "env")  # their scores are added
    ),
    Rule("reward_func", lambda f: f.env and f.max_staleness, "with --env {env} and --max_staleness {max_staleness}",
         "episodes that are generated ahead have no score but their environment's", "Score in the environment, or in lock step."),
    Rule("reward_func", lambda f: f.needs_labels and not f.label_key, "without --label_key",
         "it compares responses with the labels of prompts, and their rows have no ground_truth or final_answer",
         "Add --label_key with the column of the answers.",
         which="that compares with labels"),
    Rule("judge_range", lambda f: f.judge_mode == "pairs", "with --judge_mode pairs", "a pair has a winner and no score", REMOVE),
    Rule("judge_mode", lambda f: f.dataset and f.n_samples_per_prompt < 2, "with --n_samples_per_prompt 1",
         "a judge compares the responses to a prompt", "Set --n_samples_per_prompt to 2 or more.", values=("pairs", "group")),
    Rule("judge_mode", lambda f: has_evaluation(f) and f.eval_samples < 2, "with --eval_samples 1",
         "a judge compares the answers to a prompt", "Set --eval_samples to 2 or more, and --eval_temperature.",
         values=("pairs", "group")),
    Rule("judge_url judge_model judge_mode judge_rubric judge_range judge_args judge_key_env judge_timeout judge_retries "
         "judge_concurrency judge_cache", lambda f: not _judges(f), "without judge in --reward_func", "nothing asks a judge",
         "Add judge to --reward_func, or remove the flag."),
    Rule("reward_func", lambda f: _judges(f) and not (f.judge_url and f.judge_model), "without --judge_url and --judge_model",
         "a judge is a model on a server", "Add both flags.", which="with judge"),
    Rule("reward_weights", lambda f: f.remote_rm_url, "with --remote_rm_url {remote_rm_url}",
         "a server gives one score", REMOVE),
    Rule("reward_weights", lambda f: f.env and not f.reward_func, "with --env {env}", "an environment gives one score", REMOVE),
    *(
        Rule("reward_weights",
             lambda f, flag=flag: getattr(f, flag) and len(f.reward_weights) != len(names_in(getattr(f, flag))),
             f"with --{flag} {{{flag}}}", f"the numbers of weights and of {noun}s differ",
             f"Give one weight for each {noun}.", which="of another number")
        for flag, noun in (("reward_pretrain", "model"), ("reward_func", "function"))
    ),
    Rule("reward_weights", lambda f: not any(getattr(f, flag) for flag in SOURCES) and len(f.reward_weights) != 1,
         "without --reward_func or --reward_pretrain", "there are no scores to weight", REMOVE, which="of several numbers"),
    Rule("offload_reward", lambda f: not f.reward_pretrain, "without --reward_pretrain", "there is no reward model",
         REMOVE),
    Rule("reward_timeout", lambda f: (f.reward_func or "").strip() == "judge", "with --reward_func judge",
         "a judge has a limit of its own", "Take --judge_timeout."),
    Rule("reward_timeout", lambda f: f.reward_func and {*names_in(f.reward_func)} <= {*BUILT_IN_REWARDS},
         "with --reward_func {reward_func}", "the built-in functions have limits of their own", REMOVE),
    Rule("reward_timeout", lambda f: not f.reward_func, "without --reward_func",
         "it limits a call of a reward function", REMOVE),
    Rule("remote_rm_timeout remote_rm_retries remote_rm_api_key", lambda f: not f.remote_rm_url,
         "without --remote_rm_url", "no server scores", "Add --remote_rm_url, or remove the flag."),
    Rule("env_key env_args env_last_turn_text env_answer_max_len env_long_answers env_max_turns env_timeout env_concurrency env_lockstep env_sandbox env_container env_memory_mb "
         "env_processes env_disk_mb env_cpu_seconds env_paths", lambda f: not f.env, "without --env",
         "there is no environment", "Add --env, or remove the flag."),
    Rule("env_sandbox", lambda f: f.env_container, "with --env_container {env_container}",
         "the container is the sandbox", ONE),
    Rule("env_memory_mb env_processes env_disk_mb env_cpu_seconds env_paths", lambda f: not f.env_sandbox, "without --env_sandbox",
         "it limits the processes of the sandbox", "Add --env_sandbox, or remove the flag."),
    Rule("overlong_buffer_len", lambda f: f.overlong_buffer_len >= f.generate_max_len,
         "with --generate_max_len {generate_max_len}", "even a response of one token would lose score",
         "Take less than --generate_max_len.", which="that is not smaller"),
    Rule("overlong_penalty_factor", lambda f: not f.overlong_buffer_len, "without --overlong_buffer_len",
         "no response is too long", "Add --overlong_buffer_len, or remove the flag."),
)

ROLLOUT_RULES = (
    *MODEL_RULES, *ENGINE_RULES, *STALENESS_RULES, *PROMPT_RULES, *EVAL_RULES, *REPLAY_RULES, *REWARD_RULES,
)

# of serve_rm, and with others of serve_engine and serve_train
SERVER_RULES = (
    Rule("host", lambda f: not f.api_key and not is_loopback(f.host), "without --api_key",
         "others can reach this address", "Add --api_key FILE, or take 127.0.0.1."),
)
SERVE_ENGINE_RULES = (
    *SERVER_RULES,
    Rule("speculative_tokens", lambda f: f.tensor_parallel_size > 1, "with --tensor_parallel_size {tensor_parallel_size}",
         "drafts are not compared there yet", "Set --tensor_parallel_size to 1, or remove the flag."),
)
SERVE_TRAIN_RULES = (
    *SERVER_RULES,
    Rule("backend", lambda f: True, "with serve_train", "clients take turns on the parameters, which DeepSpeed keeps in one buffer",
         "Leave the flag out."),
)
# fmt: on


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a --host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
