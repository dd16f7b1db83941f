"""Flags of servers, and of the other commands that generate, with the names of `train_ppo`: `train_dpo --online`, `evaluate`."""

from dataclasses import dataclass
from typing import Optional

from trainer.flags.common_flags import (
    BatchArguments,
    CheckpointArguments,
    DataArguments,
    ExpertArguments,
    LayoutArguments,
    LengthArguments,
    LoraArguments,
    ModelArguments,
    OptimizerArguments,
    OutputArguments,
    VisionArguments,
)
from trainer.flags.groups import arg, group, limits_flag, of_table, set_names, some_flags
from trainer.flags.preference_flags import PreferenceArguments
from trainer.flags.rl_flags import (
    EnvironmentArguments,
    EvaluationArguments,
    PromptArguments,
    RolloutArguments,
    RolloutRunArguments,
    ScoreArguments,
)


@dataclass
class OnlineDPOArguments(RolloutRunArguments):
    """Preference optimization of a causal language model on pairs of its own answers."""

    preference: PreferenceArguments = group(PreferenceArguments)
    experts: ExpertArguments = group(ExpertArguments)
    batch: BatchArguments = group(BatchArguments)
    optimizer: OptimizerArguments = group(OptimizerArguments)
    layout: LayoutArguments = group(LayoutArguments)
    output: OutputArguments = group(OutputArguments)
    checkpoint: CheckpointArguments = group(CheckpointArguments)


# --- evaluate: a model, prompts, a reward and an engine


@dataclass
class SetArguments:
    """Model and prompts"""

    pretrain: Optional[str] = arg(None, "model folder or hub name")
    eval_dataset: Optional[str] = arg(
        None, "prompts: comma-separated files, folders or hub names; #500 after one takes 500 rows", "dataset",
        type=set_names,
    )  # fmt: skip
    eval_dataset_flags: Optional[str] = arg(
        None, "JSON list: flags of their own for the sets; a list under eval_dataset: in a file of --config gives it"
    )
    eval_split: str = arg("train", "split of --eval_dataset", "dataset_split")


ModelFlags = some_flags(ModelArguments, "param_dtype attn_implementation compile trust_remote_code")
DataFlags = some_flags(
    DataArguments,
    "max_samples limits dataset_num_proc ignore_columns system input_template apply_chat_template "
    "tokenizer_chat_template template_args read_control_tokens",
)
EngineFlags = some_flags(
    RolloutArguments,
    "rollout_engine engine_urls engine_api_key engine_tensor_parallel_size vllm_gpu_memory_utilization "
    "micro_rollout_batch_size generate_max_len stop",
)
RewardFlags = some_flags(
    ScoreArguments,
    "reward_func judge_url judge_model judge_mode judge_rubric judge_range judge_args judge_key_env judge_timeout judge_retries "
    "judge_concurrency judge_cache reward_timeout reward_pretrain reward_weights remote_rm_url remote_rm_api_key remote_rm_timeout "
    "remote_rm_retries max_failed_share reward_range",
)
ImageFlags = some_flags(VisionArguments, "image_max_pixels image_min_pixels")
PlaceFlags = some_flags(LayoutArguments, "device cpu_matmul")
OutputFlags = some_flags(OutputArguments, "output_dir overwrite")


@dataclass
class EvaluateArguments:
    """Answers prompts with a model, scores the answers, and gives the results with confidence intervals."""

    sets: SetArguments = group(SetArguments)
    model: ModelFlags = group(ModelFlags)
    data: DataFlags = group(DataFlags)
    prompts: PromptArguments = group(PromptArguments)
    answers: EvaluationArguments = group(EvaluationArguments)
    engine: EngineFlags = group(EngineFlags)
    scores: RewardFlags = group(RewardFlags)
    environment: EnvironmentArguments = group(EnvironmentArguments)
    images: ImageFlags = group(ImageFlags)
    place: PlaceFlags = group(PlaceFlags)
    output: OutputFlags = group(OutputFlags)


# --- servers


@dataclass
class ListenArguments:
    """Server: address and key"""

    host: str = arg("127.0.0.1", "address to listen on")
    api_key: Optional[str] = arg(None, "file with the key that requests must send; needed if others can reach --host")
    limits: Optional[list[str]] = limits_flag()


@dataclass
class RequestArguments(ListenArguments):
    """Server: address, key and limits"""

    max_body_mb: Optional[int] = of_table("body_mb", "largest request, in MB; all requests together hold 16 times this")
    max_connections: Optional[int] = of_table("connections", "connections at a time; one beyond them gets 503")
    read_timeout: Optional[float] = of_table("request_s", "seconds for a whole request to arrive", "PositiveFloat")


# --- serve_train: a model, its ranks and a server

TrainedFlags = some_flags(
    ModelArguments, "pretrain param_dtype attn_implementation gradient_checkpointing trust_remote_code"
)
AdapterFlags = some_flags(LoraArguments, "lora_rank lora_alpha target_modules")
BatchFlags = some_flags(BatchArguments, "micro_train_batch_size seed")
RanksFlags = some_flags(LayoutArguments, "backend zero_stage tensor_parallel_size device cpu_matmul")
FolderFlags = some_flags(OutputArguments, "output_dir")


@dataclass
class ServerArguments(RequestArguments):
    """Server"""

    port: int = arg(8002, "port to listen on; 0 takes a free one", type="NonNegativeInt")
    max_clients: int = arg(16, "models of clients at a time", type="PositiveInt")
    sample_batch_size: int = arg(64, "responses at a time on one rank", type="PositiveInt")


@dataclass
class ServeTrainArguments:
    """Trains and samples for clients over HTTP, in the shape of Tinker's API."""

    server: ServerArguments = group(ServerArguments)
    model: TrainedFlags = group(TrainedFlags)
    lora: AdapterFlags = group(AdapterFlags)
    length: LengthArguments = group(LengthArguments)
    batch: BatchFlags = group(BatchFlags)
    place: RanksFlags = group(RanksFlags)
    output: FolderFlags = group(FolderFlags)
