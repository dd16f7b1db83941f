"""Flags of `train_ppo`: prompts, rollouts, rewards and evaluation. Those of its loss are in trainer.flags.policy_flags."""

from dataclasses import dataclass
from typing import Literal, Optional

from trainer.flags.common_flags import (
    BatchArguments,
    CheckpointArguments,
    DataArguments,
    ExpertArguments,
    LayoutArguments,
    LoraArguments,
    ModelArguments,
    OptimizerArguments,
    OutputArguments,
    VisionArguments,
)
from trainer.flags.groups import arg, group
from trainer.flags.policy_flags import AdvantageArguments, CriticArguments, KLArguments


@dataclass
class PromptArguments:
    """Prompts"""

    input_key: Optional[str] = arg(None, "column of the prompt, a text or messages (default: messages)")
    label_key: Optional[str] = arg(
        None,
        "column of the reference answer, which the reward gets as its label (default: ground_truth or final_answer)",
    )
    prompt_max_len: int = arg(1024, "longer prompts are left out and counted", type="PositiveInt")


@dataclass
class RolloutArguments:
    """Rollouts"""

    rollout_engine: Literal["hf", "vllm", "vllm_server", "sglang"] = arg(
        "hf",
        "hf: a replica of the policy on every rank; vllm: an engine per tp group (extra: vllm); "
        "vllm_server: servers of their own; sglang: servers of SGLang",
    )
    engine_urls: Optional[str] = arg(
        None, "addresses of servers (comma-separated); vllm_server: those of python -m trainer.cli.serve_engine"
    )
    engine_api_key: Optional[str] = arg(None, "file that holds the key that --engine_urls ask for")
    sync_folder: Optional[str] = arg(
        None, "sglang: folder that ranks and servers see, for weights of the policy (default: --output_dir)"
    )
    sync_deltas: bool = arg(False, "vllm_server: send changed weights only; both sides keep a copy in host memory")
    engine_tensor_parallel_size: Optional[int] = arg(
        None, "vllm: ranks of an engine (default: --tensor_parallel_size)", type="PositiveInt"
    )
    vllm_gpu_memory_utilization: Optional[float] = arg(
        None, "vllm on CUDA: share of the GPU memory for its weights and cache (default: 0.5)", type="PositiveFloat"
    )
    speculative_tokens: int = arg(
        0,
        "vllm: tokens that are drafted from the text so far and then checked; 0: none; servers have a flag of their own",
        type="NonNegativeInt",
    )
    rollout_batch_size: int = arg(128, "prompts per rollout, over all ranks", type="PositiveInt")
    micro_rollout_batch_size: int = arg(
        32, "responses that one rank generates at a time (on CUDA, vllm decides)", type="PositiveInt"
    )
    max_staleness: int = arg(
        0,
        "generate while the optimizer steps, from weights that are up to this many rollouts old; 0: one after the other; "
        "above 0 needs --tis_cap or --bypass_mode",
        type="NonNegativeInt",
    )
    partial_rollouts: bool = arg(
        False,
        "--max_staleness: new weights interrupt responses, which go on from their tokens; off: a response is of one version",
    )
    n_samples_per_prompt: int = arg(1, "responses to each prompt", type="PositiveInt")
    num_episodes: int = arg(1, "passes over the prompts", type="PositiveInt")
    curriculum: Literal["none", "easy_first", "learnable"] = arg(
        "none",
        "after the first pass over the prompts: easy_first sorts them by their pass rates so far; learnable draws those with "
        "rates near one half more often",
    )
    generate_max_len: int = arg(1024, "largest number of tokens in a response", type="PositiveInt")
    temperature: float = arg(1.0, "temperature of sampling and of the log-probs in training", type="PositiveFloat")
    top_p: float = arg(
        1.0, "draw from the most likely tokens up to this share; training does too", type="PositiveFloat"
    )
    top_k: int = arg(0, "draw from this many most likely tokens; 0: from all", type="NonNegativeInt")
    min_p: float = arg(
        0.0, "draw from tokens of at least this times the largest probability", type="ClosedUnitInterval"
    )
    stop: Optional[list[str]] = arg(
        None, "texts that end a response, in addition to the end-of-sequence token", type=str, nargs="+"
    )
    offload_actor_optimizer: bool = arg(
        False, "keep the optimizer states of the policy in host memory while responses are generated"
    )
    share_prompts: bool = arg(
        False,
        "train the responses to one prompt in one row, so that it is computed once; for models with full attention",
    )
    routing_replay: bool = arg(
        False, "mixture of experts: training sends each token to the experts that it had in the rollout"
    )
    sample_pages: int = arg(0, "samples of each rollout in an HTML page, with token log-probs", type="NonNegativeInt")
    timeline: bool = arg(False, "write timeline.json: what each rank does when, for chrome://tracing and Perfetto")
    max_logprob_diff: float = arg(
        1.0,
        "end the run if log-probs of the engine and of training differ by more in the mean of a rollout; inf: never",
        type="NonNegativeFloat",
    )
    rollouts_from: Optional[str] = arg(
        None, "take responses and scores from this rollouts.jsonl; only evaluation then generates and scores"
    )
    dynamic_filtering: bool = arg(False, "replace prompts whose responses all have the same score")
    dynamic_filtering_range: Optional[list[float]] = arg(
        None,
        "--dynamic_filtering: also replace prompts whose mean score is not between these shares of --reward_range",
        type=float,
        nargs=2,
    )


BUILT_IN_REWARDS = [
    "math",
    "math_boxed",
    "math_finished",
    "math_boxed_finished",
    "exact_match",
    "format",
    "answer",
    "multiple_choice",
]


@dataclass
class ScoreArguments:
    """Rewards"""

    reward_func: Optional[str] = arg(
        None,
        "math (compares the label with the last number, #### or boxed), math_boxed, math_finished, math_boxed_finished, "
        "exact_match, answer (in <answer>), multiple_choice, "
        "format (<think> and <answer>), judge (--judge_url), or FILE.py or FILE.py:FUNCTION, also of TRL, OpenRLHF and verl; or several of these "
        "(comma-separated)",
    )
    judge_url: Optional[str] = arg(None, "judge: an OpenAI-compatible server, such as http://127.0.0.1:8000/v1")
    judge_model: Optional[str] = arg(None, "judge: name of the model there")
    judge_mode: Literal["alone", "pairs", "group"] = arg("alone", "judge: the responses that a request shows")
    judge_rubric: Optional[str] = arg(None, "judge: file with its text, see docs/rewards.md (default: built-in)")
    judge_range: list[float] = arg(
        [0.0, 10.0], "judge: its lowest and highest score; they become 0 and 1", type=float, nargs=2
    )
    judge_args: Optional[str] = arg(None, "judge: JSON object of more keys of a request, such as max_tokens (1024)")
    judge_key_env: Optional[str] = arg(None, "judge: name of the environment variable that holds its key")
    judge_timeout: float = arg(60.0, "judge: seconds for a whole answer", type="PositiveFloat")
    judge_retries: int = arg(3, "judge: number of retries; the pause before each one doubles", type="NonNegativeInt")
    judge_concurrency: int = arg(32, "judge: requests that a rank sends at a time", type="PositiveInt")
    judge_cache: int = arg(10000, "judge: scores that a rank keeps, in judge_cache/ of the run", type="NonNegativeInt")
    reward_timeout: float = arg(60.0, "time limit of a call of your --reward_func, in seconds", type="PositiveFloat")
    reward_pretrain: Optional[str] = arg(
        None, "reward model or adapter folders (comma-separated), as train_rm writes them"
    )
    offload_reward: bool = arg(False, "keep the reward models' weights in host memory while they are not in use")
    reward_weights: Optional[list[float]] = arg(
        None, "weights of the reward functions or models (default: 1 each)", type=float, nargs="+"
    )
    remote_rm_url: Optional[str] = arg(
        None, "HTTP endpoints that score (comma-separated); see python -m trainer.cli.serve_rm"
    )
    remote_rm_api_key: Optional[str] = arg(None, "file that holds the key that --remote_rm_url asks for")
    remote_rm_timeout: float = arg(60.0, "seconds to wait for an answer of --remote_rm_url", type="PositiveFloat")
    remote_rm_retries: int = arg(3, "number of retries; the pause before each one doubles", type="NonNegativeInt")
    max_failed_share: float = arg(
        0.1,
        "leave samples out whose server or environment fails after its retries; end the run if more of a rollout do",
        type="ClosedUnitInterval",
    )
    reward_range: Optional[list[float]] = arg(
        None,
        "scores of a wrong and of a right response (default: 0 1), for --dynamic_filtering_range, --curriculum, "
        "--positive_nll_coef and pass@1",
        type=float,
        nargs=2,
    )
    reward_clip_range: Optional[list[float]] = arg(None, "clip scores to these bounds", type=float, nargs=2)
    normalize_reward: bool = arg(False, "subtract the running mean of scores, divide by their running deviation")
    overlong_buffer_len: int = arg(
        0, "responses in the last N tokens before --generate_max_len lose score", type="NonNegativeInt"
    )
    overlong_penalty_factor: float = arg(
        1.0, "score that a response of --generate_max_len loses", type="NonNegativeFloat"
    )


@dataclass
class EvaluationArguments:
    """Evaluation"""

    eval_samples: int = arg(1, "answers to each prompt, for avg@k and pass@k", type="PositiveInt")
    eval_temperature: float = arg(0.0, "temperature of these answers; 0 is greedy", type="NonNegativeFloat")
    eval_top_p: float = arg(1.0, "draw from the most likely tokens up to this share", type="PositiveFloat")
    eval_source_key: Optional[str] = arg(None, "column whose values get results of their own")


@dataclass
class EnvironmentArguments:
    """Environments"""

    env: Optional[str] = arg(
        None,
        "Python file or module with a class Environment that talks with the model over several turns, and rewards it; "
        "see docs/environments.md",
    )
    env_key: Optional[str] = arg(
        None,
        "column whose values choose the environment of a row; then --env is NAME=FILE, or several (comma-separated)",
    )
    env_args: Optional[str] = arg(
        None,
        "arguments of --env as a YAML or JSON mapping, such as '{limit: 3}'; with --env_key, a mapping for each NAME",
    )
    env_max_turns: int = arg(8, "turns of the model in an episode", type="PositiveInt")
    env_last_turn_text: Optional[str] = arg(None, "text that is added to the messages that open the last turn")
    env_answer_max_len: Optional[int] = arg(
        None, "tokens of an answer of --env; a longer one is as one without room", type="PositiveInt"
    )
    env_long_answers: Literal["none", "start", "end", "both"] = arg(
        "none",
        "what is kept of an answer of --env without room: its start, its end, both, or none, which ends the episode",
    )
    env_timeout: float = arg(60.0, "time limit of a call of --env, in seconds", type="PositiveFloat")
    env_concurrency: int = arg(64, "environments that a rank calls at a time", type="PositiveInt")
    env_lockstep: bool = arg(
        False, "let all episodes wait for the slowest one after each turn: batches, and so bits, do not depend on time"
    )
    env_sandbox: bool = arg(False, "run each environment in a sandbox: no network, no files, no keys, with limits")
    env_container: Optional[str] = arg(
        None,
        "command that starts each environment in a container, such as 'docker run --rm -i --network none IMAGE'",
    )
    env_memory_mb: int = arg(2048, "address space of such a process, in MiB", type="PositiveInt")
    env_processes: int = arg(256, "processes and threads in a sandbox", type="PositiveInt")
    env_disk_mb: int = arg(256, "files that a sandbox may write, in MiB of memory", type="PositiveInt")
    env_cpu_seconds: int = arg(3600, "CPU time of each process in a sandbox", type="PositiveInt")
    env_paths: Optional[list[str]] = arg(None, "files and folders that a sandbox may read", type=str, nargs="+")


@dataclass
class RolloutRunArguments:
    """The first groups of every command that trains on responses of the model."""

    model: ModelArguments = group(ModelArguments)
    lora: LoraArguments = group(LoraArguments)
    data: DataArguments = group(DataArguments)
    prompts: PromptArguments = group(PromptArguments)
    rollout: RolloutArguments = group(RolloutArguments)
    scores: ScoreArguments = group(ScoreArguments)
    environment: EnvironmentArguments = group(EnvironmentArguments)
    evaluation: EvaluationArguments = group(EvaluationArguments)


@dataclass
class PPOArguments(RolloutRunArguments):
    """Reinforcement learning of a causal language model with PPO, GRPO and related algorithms."""

    advantage: AdvantageArguments = group(AdvantageArguments)
    kl: KLArguments = group(KLArguments)
    critic: CriticArguments = group(CriticArguments)
    experts: ExpertArguments = group(ExpertArguments)
    vision: VisionArguments = group(VisionArguments)
    batch: BatchArguments = group(BatchArguments)
    optimizer: OptimizerArguments = group(OptimizerArguments)
    layout: LayoutArguments = group(LayoutArguments)
    output: OutputArguments = group(OutputArguments)
    checkpoint: CheckpointArguments = group(CheckpointArguments)
