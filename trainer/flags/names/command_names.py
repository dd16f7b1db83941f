"""Names of commands in other trainers, and what to write after `trainer` here."""

from collections.abc import Iterable

from trainer.flags.names.suggestions import misspelled

# TRL, LLaMA-Factory, axolotl, ms-swift, torchtune and OpenRLHF have these
WORDS = {
    "train tune run finetune fine_tune sft_trainer pt pretrain train_lora lora qlora": "sft",
    "grpo train_grpo dapo gspo dr_grpo cispo rloo reinforce": "ppo --preset",
    "rl rlhf train_rl rft ppo_ray train_ppo_ray": "ppo",
    "kto orpo simpo ipo train_kto train_orpo": "dpo --loss",
    "reward reward_modeling train_reward": "rm",
    "gkd distill distillation": "kd",
    "merge merge_lora merge_lora_weights merge_sharded_fsdp_weights convert convert_ckpt export_model quantize": "export",
    "evaluate evaluation infer inference generate chat webchat": "eval",
    "preprocess tokenize process": "prepare_data",
    "env info": "doctor",
    "fetch demo": "make_demo",
    "vllm_serve serve api deploy rollout vllm": "serve_engine",
    "estimate memory": "plan",
    "plot": "report",
}
# the value of the flag that ends a translation, where it is not the word itself
VALUES = {"train_grpo": "grpo", "reinforce": "reinforce++", "train_kto": "kto", "train_orpo": "orpo"}


def command_for(word: str, known: Iterable[str]) -> str:
    """What to write in place of `word`, which is none of the `known` commands. "": this is not known."""
    name = word.lower().replace("-", "_").replace(":", "_").removesuffix(".py")
    if name in known:
        return name
    for names, ours in WORDS.items():
        if name in names.split():
            ends = f" {VALUES.get(name, name)}" if ours.endswith(("--preset", "--loss")) else ""
            return f"{ours}{ends}"
    return misspelled(name, known) if len(name) > 3 else ""  # cpo is not ppo
