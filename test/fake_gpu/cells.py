"""The configurations that run on the fake GPU. A cell is compared with the same training on the CPU: one rank, fsdp2, no layout."""

import hashlib
from dataclasses import dataclass

# Of losses, and of norms of gradients. The largest that were measured are 2e-7 and 1e-6 in fp32, and 6e-4 and 7e-3 in bf16.
# A loss that is 1 % too large changes the norms of PPO and KD in bf16 by 1e-2.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 2e-3}
NORM_TOLERANCE = {"fp32": 1e-4, "bf16": 8.5e-3, "fp16": 8.5e-3}
INPUTS = 2  # raised when the models or the data of the cells change
# Updates are large: the loss of the second step tells whether those of the first one are right. With a larger epsilon, Adam's
# update of a gradient that is only rounding is no sign.
COMMON = "--learning_rate 1e-3 --adam_eps 1e-5 --overwrite"
TWO_STEPS = f"{COMMON} --max_steps 2 --train_batch_size 16 --micro_train_batch_size 4"
ROWS = f"{TWO_STEPS} --max_len 128"
PROMPTS = "--dataset prompts.jsonl --label_key label --prompt_max_len 64 --generate_max_len 16 --rollout_batch_size 8"
GROUPS = "--n_samples_per_prompt 2 --advantage_estimator group_norm"
COMMANDS = {
    "train_sft": f"{ROWS} --dataset sft.jsonl",
    "train_dpo": f"{ROWS} --dataset pairs.jsonl",
    "train_rm": f"{ROWS} --dataset pairs.jsonl",
    "train_kd": f"{ROWS} --dataset sft.jsonl --teacher teacher",
    # three updates of one rollout: in the first one alone, the loss is the mean advantage, whatever the model is
    "train_ppo": f"{COMMON} --max_steps 3 --max_epochs 2 --train_batch_size 8 --micro_train_batch_size 2 {PROMPTS} {GROUPS}"
    " --rollouts_from ROLLOUTS",
}
# the run that makes ROLLOUTS: on the CPU, sampled, with rewards that differ
GENERATE = f"{TWO_STEPS} {PROMPTS} {GROUPS} --reward_func REWARD --param_dtype fp32"


@dataclass(frozen=True)
class Cell:
    """`maths`: flags that the run on the CPU has, too. `layout`: flags that may not change a loss."""

    command: str
    backend: str
    layout: str = ""
    maths: str = ""
    ranks: int = 1
    dtype: str = "fp32"
    model: str = "model"
    save: bool = False
    resume: bool = False  # a second process goes on from the checkpoint of the first step

    @property
    def name(self):
        parts = [
            self.command.removeprefix("train_"),
            f"{self.ranks} x {self.backend}",
            self.layout,
            self.maths,
            self.dtype,
        ]
        parts += [self.model] if self.model != "model" else []
        parts += ["resumed"] if self.resume else []
        return " ".join(part for part in parts if part)

    @property
    def digest(self):
        """Another one means that the cell trains something else."""
        told = (INPUTS, COMMANDS[self.command], GENERATE if "ROLLOUTS" in COMMANDS[self.command] else "", repr(self))
        return hashlib.sha256(repr(told).encode()).hexdigest()[:12]


# the most waits of a step: its end has 3, and each of 2 layers with shared experts has one in each of 2 micro-batches
MOST_WAITS = {"sft 2 x fsdp2 --expert_parallel_size 2 bf16 experts": 3 + 2 * 2}
MOST_WAITS |= {f"sft {ranks} x fsdp2 --adam_offload fp32": 1 for ranks in (1, 2)}
# DeepSpeed reads the norm and the overflow of each group of parameters; ZeRO 3 waits for buckets and copies, too
MOST_WAITS |= {f"sft {ranks} x deepspeed --zero_stage 2 --adam_offload fp32": 6 for ranks in (1, 2)}
MOST_WAITS |= {"sft 1 x deepspeed --zero_stage 2 --adam_offload bf16": 9}
MOST_WAITS |= {f"sft 1 x deepspeed --zero_stage 3 --adam_offload {dtype}": 18 for dtype in ("fp32", "bf16")}
# packed documents: no layer reads their bounds from the GPU
MOST_WAITS |= {f"sft {ranks} x fsdp2 --packing_samples {dtype}": 3 for ranks in (1, 2) for dtype in ("fp32", "bf16")}
STAGES = [("fsdp2", ""), *(("deepspeed", f"--zero_stage {stage}") for stage in range(4))]
LARGE = [("fsdp2", ""), ("deepspeed", "--zero_stage 2"), ("deepspeed", "--zero_stage 3")]


def joined(*parts):
    return " ".join(part for part in parts if part)


def all_cells():
    cells = []
    for backend, stage in STAGES:
        for dtype in ("fp32", "bf16"):
            for ranks in (1, 2):
                for layout in ("", "--packing_samples"):
                    cells.append(Cell("train_sft", backend, joined(stage, layout), ranks=ranks, dtype=dtype))
    for layout in (
        "--gradient_checkpointing",
        "--selective_checkpointing",
        "--gradient_checkpointing --activation_offload --packing_samples",
        "--adam_offload",
        "--max_tokens_per_micro_batch 256",
    ):
        cells += [
            Cell("train_sft", backend, joined(stage, layout), ranks=ranks)
            for backend, stage in LARGE
            for ranks in (1, 2)
        ]
    cells += [Cell("train_sft", backend, joined(stage, "--adam_offload"), dtype="bf16") for backend, stage in LARGE]
    for maths in ("--lora_rank 4", "--weight_decay 0.1"):
        cells += [Cell("train_sft", backend, stage, maths) for backend, stage in LARGE]
    for maths in ("--optim muon", "--optim adafactor"):
        cells += [Cell("train_sft", "fsdp2", "", maths, ranks) for ranks in (1, 2)]
        cells.append(Cell("train_sft", "deepspeed", "--zero_stage 0", maths))
    cells += [Cell("train_sft", backend, stage, "", dtype="fp16") for backend, stage in LARGE]
    for layout in ("--save_steps 1", "--save_steps 1 --async_save", "--save_steps 1 --verify_resume 1"):
        cells += [Cell("train_sft", backend, joined(stage, layout), save=True) for backend, stage in LARGE]
    for layout in (
        "--tensor_parallel_size 2",
        "--ring_attn_size 2 --packing_samples",
        "--ring_attn_size 2 --sp_mode ulysses --packing_samples",
    ):
        cells += [Cell("train_sft", backend, layout, ranks=2) for backend in ("fsdp2", "deepspeed")]
        cells += [Cell("train_sft", backend, layout, ranks=2, dtype="bf16") for backend in ("fsdp2", "deepspeed")]
    cells.append(Cell("train_sft", "fsdp2", "--dp_replicate_size 2", ranks=4))
    for model in ("experts", "hybrid"):
        cells += [
            Cell("train_sft", backend, stage, ranks=ranks, model=model) for backend, stage in LARGE for ranks in (1, 2)
        ]
    for dtype in ("fp32", "bf16"):
        cells.append(Cell("train_sft", "fsdp2", "--expert_parallel_size 2", ranks=2, dtype=dtype, model="experts"))
    sequence_parallel = "--tensor_parallel_size 2 --sequence_parallel"
    cells += [Cell("train_sft", "fsdp2", sequence_parallel, ranks=2, dtype=dtype) for dtype in ("fp32", "bf16")]
    for command in ("train_dpo", "train_rm", "train_kd", "train_ppo"):
        cells += [Cell(command, backend, stage, ranks=ranks) for backend, stage in LARGE for ranks in (1, 2)]
        cells += [Cell(command, backend, stage, dtype="bf16") for backend, stage in LARGE]
    cells += [Cell("train_dpo", backend, joined(stage, "--ref_offload")) for backend, stage in LARGE]
    cells += [
        Cell("train_ppo", backend, stage, "--use_kl_loss --init_kl_coef 0.1 --kl_estimator k3")
        for backend, stage in LARGE
    ]
    cells += [
        Cell("train_ppo", backend, joined(stage, "--offload_ref"), "--use_kl_loss --init_kl_coef 0.1 --kl_estimator k3")
        for backend, stage in LARGE
    ]
    cells += [Cell("train_ppo", backend, joined(stage, "--share_prompts"), dtype="bf16") for backend, stage in LARGE]
    # what a first card tries
    for model in ("experts", "hybrid"):
        cells += [Cell("train_sft", backend, stage, dtype="bf16", model=model) for backend, stage in LARGE]
    # not rowwise: the host code of its kernel, from CUTLASS, ends the process without a card
    cells += [Cell("train_sft", "fsdp2", "", "--fp8 tensorwise", ranks, "bf16") for ranks in (1, 2)]
    four_bits = "--lora_rank 4 --load_in_4bit"
    cells += [
        Cell("train_sft", backend, stage, four_bits, dtype=d) for backend, stage in LARGE[:2] for d in ("fp32", "bf16")
    ]
    cells += [Cell("train_sft", "fsdp2", "", "--optim adamw_8bit", ranks) for ranks in (1, 2)]
    cells.append(Cell("train_sft", "deepspeed", "--zero_stage 0", "--optim adamw_8bit"))
    cells += [
        Cell("train_sft", backend, stage, ranks=ranks, resume=True) for backend, stage in LARGE for ranks in (1, 2)
    ]
    return cells
