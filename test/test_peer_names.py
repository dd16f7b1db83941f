"""Names of other trainers: the table names flags that exist, and every recipe of another trainer is answered key by key."""

import importlib.util
import re
from collections import Counter

import pytest
from launch import ROOT

from trainer.cli.__main__ import OTHERS, RANKED, run, split
from trainer.errors import UserError
from trainer.flags.names.command_names import WORDS, command_for
from trainer.flags.names.peer_row import PEERS
from trainer.flags.names.presets import PRESETS
from trainer.flags.names.suggestions import ROWS, misspelled
from trainer.flags.parse_flags import flags_of, parse_arguments
from trainer.flags.rules import COMMANDS
from trainer.models.losses.preference_loss import PAIR_LOSSES
from trainer.runs import start_line

FLAGS = {
    command: {name for field, _ in flags_of(kind) for name in (field.name, *field.metadata["aliases"])}
    for command, kind in COMMANDS.items()
}


def refused(command: str, *argv: str) -> str:
    with pytest.raises(UserError) as error:
        parse_arguments(COMMANDS[command], command, list(argv))
    assert "\n" not in str(error.value)
    return str(error.value)


def named(text: str) -> set[str]:
    # of `trainer`, torchrun and the parser itself
    return set(re.findall(r"--(\w+)", text)) - {"nproc", "nproc_per_node", "nnodes", "config"}


def test_every_flag_in_the_table_is_a_flag_of_its_commands():
    for row in ROWS:
        for command in row.commands:
            assert named(f"{row.ours} {row.words} {row.off}") <= FLAGS[command], (row.names, command)
        assert row.ours or row.words, row.names
        assert set(row.peers) <= PEERS.keys(), row.names


def test_no_name_is_answered_twice_and_none_is_a_flag_already():
    answers = Counter((name, command) for row in ROWS for name in row.names.split() for command in row.commands)
    assert not [key for key, count in answers.items() if count > 1]
    assert not [(name, command) for name, command in answers if name in FLAGS[command]]
    assert len({name for name, _ in answers}) >= 150


@pytest.mark.parametrize(
    ("command", "name", "parts"),
    [
        ("train_sft", "gradient_accumulation_steps", ["x accumulation x ranks: --train_batch_size 32"]),
        ("train_sft", "model_name_or_path", ["--pretrain"]),
        (
            "train_sft",
            "devices",
            ["which GPUs, and a rank for each: CUDA_VISIBLE_DEVICES=0,1 trainer COMMAND --nproc 2"],
        ),
        ("train_ppo", "gpus", ["CUDA_VISIBLE_DEVICES=0,1 trainer COMMAND --nproc 2"]),
        ("train_dpo", "CUDA_VISIBLE_DEVICES", ["CUDA_VISIBLE_DEVICES=0,1 trainer COMMAND --nproc 2"]),
        ("train_sft", "num_gpus", ["ranks on this machine, one for each GPU: trainer COMMAND --nproc N"]),
        ("train_sft", "device=cuda:1", ["auto, cpu, cuda; CUDA_VISIBLE_DEVICES=0,1 before the command chooses GPUs"]),
        ("train_sft", "use_lora", ["a rank makes it LoRA: --lora_rank 16"]),
        ("train_sft", "data", ["--dataset"]),
        ("train_ppo", "epochs", ["--num_episodes"]),
        ("train_dpo", "reference_free", ["simpo and orpo have no reference"]),
        ("train_ppo", "gae_lambda", ["--lambd"]),
        ("train_sft", "num_train_epochs", ["--max_epochs"]),
        ("train_ppo", "num_train_epochs", ["--num_episodes"]),
        ("train_ppo", "max_length", ["--prompt_max_len and --generate_max_len"]),
        ("train_sft", "neftune_noise_alpha", ["no counterpart: no noise"]),
        ("train_sft", "num_generations", ["--n_samples_per_prompt", "a flag of train_ppo"]),
        ("train_sft", "beta", ["--init_kl_coef", "(a flag of train_ppo)", "--beta is a flag of train_dpo"]),
        ("train_sft", "kd_coef", ["--kd_coef is a flag of train_kd"]),
        ("train_sft", "learning_rat", ["did you mean --learning_rate?"]),
        ("train_sft", "actor_rollout_ref.actor.optim.lr=1e-6", ["--learning_rate"]),
        ("train_ppo", "critic.optim.lr=1e-6", ["--critic_learning_rate"]),
        ("train_sft", "data.seed=1", ["did you mean --seed?"]),
        # a switch that is off, and one whose off is not our default
        ("train_sft", "load_in_8bit=false", ["leave it out"]),
        ("train_sft", "bf16=False", ["--param_dtype fp32"]),
        ("train_sft", "mask_history=false", ["--multiturn"]),
        ("train_sft", "peft_use_rslora=true", ["--use_rslora"]),
        ("train_sft", "freeze_vit=false", ["--freeze_vision false"]),
        # a family of names, and a path that is about something else than its last part
        ("train_sft", "galore_target=all", ["no counterpart"]),
        ("train_ppo", "critic.optim.weight_decay=0.1", ["no counterpart", "--critic_learning_rate"]),
        ("train_ppo", "actor_rollout_ref.rollout.val_kwargs.top_p=1", ["--eval_top_p"]),
        ("train_ppo", "actor_rollout_ref.rollout.temperature=1", ["did you mean --temperature?"]),
        ("train_ppo", "global_profiler.save_path=x", ["no counterpart"]),
        ("train_ppo", "data.val_max_samples=9", ["--max_eval_samples"]),
    ],
)
def test_the_answer_to_a_name(command, name, parts):
    found = refused(command, f"--{name}", "1")
    assert all(part in found for part in parts), found


def test_a_name_like_another_of_another_meaning_is_no_guess():
    assert "did you mean" not in refused("train_sft", "--max_stoppers", "1")
    assert "see --help" in refused("train_sft", "--frobnicate", "1")
    assert misspelled("param_offload", FLAGS["train_ppo"]) == ""  # not --adam_offload
    assert misspelled("top_n", FLAGS["train_ppo"]) == ""  # --top_p and --top_k are as near
    assert misspelled("learningrate", FLAGS["train_sft"]) == "learning_rate"
    assert misspelled("gradeint_checkpoiting", FLAGS["train_sft"]) == "gradient_checkpointing"


FIRST_TRIES = """epochs data max_seq_len grad_accum tp_size model_path pipeline_parallel_size num_gpus use_lora\
 bs steps warmup wd grad_clip precision seq_len val_data save_every log_every resume attn quantize devices dp"""
FIRST_TRIES += " max_train_samples eval_max_samples padding_side strict"
FIRST_TRIES += """ save_dir out output alpha rank r dropout use_flash_attn patience early_stopping prompt_template system_prompt
 context_length block_size shuffle num_workers wandb tensorboard mlflow swanlab log_with cache_dir hf_token checkpoint checkpoint_dir
 mixed_precision amp grad_checkpointing use_gradient_checkpointing cpu_offload ds_config zero3 adapter_path pack test_size val_split
 split scheduler gradient_clip_val betas beta1 eval_freq save_freq log_freq eval_interval save_interval log_interval mbs
 accumulate_grad_batches max_train_steps train_steps epoch random_seed num_nodes do_train do_eval max_new_tokens num_beams
 truncation_strategy per_device_eval_batch_size exp_name"""
OF_METHODS = {
    "train_dpo": "reference_model reference_free kl_coef max_target_length generate_during_eval dpo_norm_loss max_prompt_length gamma"
    " max_completion_length algo loss_type dpo_beta sft_weight prompt_column ref_path datasets dataset_text_field train_on_inputs",
    "train_rm": "max_prompt_length loss_type stage rlhf_type datasets prompt_column",
    "train_kd": "beta alpha lmbda seq_kd loss loss_type student teacher_model teacher_temperature dataset_text_field datasets stage",
}
OF_METHODS[
    "train_ppo"
] = """reward_model_path reference_model kl_coef group_size gae_lambda cliprange cliprange_value vf_coef
 num_ppo_epochs num_mini_batches total_episodes local_rollout_forward_batch_size missing_eos_penalty whiten_rewards sft_model_path
 stop_token clip_range clip_eps clip_ratio clip_high dynamic_sampling filter_groups num_rollouts num_samples n_samples algo algorithm
 adv_estimator kl kl_loss_coef target_kl entropy_coeff ent_coef lam discount actor_lr critic_lr critic_path ref_path reward
 reward_function rm_path rm_url vllm inference_backend vllm_url gpu_memory_utilization max_response_length max_gen_len prompt_length
 tools mini_batch_size ema stage rlhf_type"""
OF_METHODS["train_dpo --online"] = "algo gamma num_samples reward rm_path vllm max_gen_len dynamic_sampling ref.offload"


@pytest.mark.parametrize("command", ["train_sft", *OF_METHODS])
def test_what_people_try_first_is_answered_without_a_guess(command):
    for name in f"{FIRST_TRIES} {OF_METHODS.get(command, '')}".split():
        found = refused(command, f"--{name}", "1")
        assert "see --help" not in found and "did you mean" not in found, found


def test_a_batch_is_answered_once():
    found = refused("train_sft", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4")
    assert found.count("--train_batch_size 32") == 1 and "--micro_train_batch_size 8" in found, found


def test_a_section_of_a_file_is_no_name(tmp_path):
    (tmp_path / "run.yaml").write_text("data: {train_files: a.parquet}\n")
    found = refused("train_sft", "--config", str(tmp_path / "run.yaml"))
    assert "data.train_files" in found and "--dataset" in found, found


def test_several_unknown_flags_are_told_at_once():
    found = refused("train_sft", "--model_name_or_path", "m", "--num_train_epochs=2", "--bf16")
    assert {"--pretrain", "--max_epochs", "--param_dtype bf16"} <= set(re.split(r" -> | \| ", found)), found


def test_the_page_is_fresh():
    path = ROOT / "scripts" / "docs" / "coming_from_page.py"
    spec = importlib.util.spec_from_file_location("coming_from_page", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = (ROOT / "docs" / "coming_from.md").read_text()
    assert written == script.page(), "docs/coming_from.md is stale: python scripts/docs/coming_from_page.py"
    for name in {name for row in ROWS for name in row.names.split()}:
        assert f"`{name}`" in written, name


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("train", "Write: trainer sft"), ("SFT", "Write: trainer sft"), ("sftt", "Write: trainer sft"),
        ("grpo", "Write: trainer ppo --preset grpo"), ("orpo", "Write: trainer dpo --loss orpo"),
        ("train_kto", "Write: trainer dpo --loss kto"), ("merge-lora", "Write: trainer export"),
        ("cpo", "(allowed: sft, rm, dpo,"), ("nonsense", "(allowed: sft, rm, dpo,"),
    ],
)  # fmt: skip
def test_a_command_of_another_trainer_is_answered_with_ours(word, line):
    with pytest.raises(UserError) as error:
        run([word, "--max_steps", "1"])
    assert f"{word}: no such command" in str(error.value) and line in str(error.value)


def test_every_command_in_the_table_parses():
    """Each translation is a command of ours, and its last value is one that the flag takes."""
    doors = (*RANKED, *OTHERS)
    for word in " ".join(WORDS).split():
        command, *flags = command_for(word, doors).split()
        assert command in doors and word not in doors, word
        if flags:
            taken = PRESETS if command == "ppo" else {*PAIR_LOSSES, "kto"}
            assert flags[0] == ("--preset" if command == "ppo" else "--loss") and flags[1] in taken, word


@pytest.mark.parametrize(
    ("value", "machine", "visible", "ranks"),
    [
        ("3", 0, None, 3),
        ("gpu", 4, None, 4),
        ("gpu", 4, "1,3", 2),
        ("gpu", 2, "0,1,5", 2),
        ("gpu", 4, "2,-1,3", 1),
        ("auto", 4, None, 4),
        ("auto", 0, None, 1),
        ("gpu", 0, None, "gpu, but NVML tells of none (allowed: a number, auto)"),
        ("gpus", 4, None, "'gpus' (allowed: the number of ranks on this machine, gpu, auto)"),
        ("0", 4, None, "'0' (allowed: "),
    ],
)
def test_nproc_may_be_the_gpus_of_this_machine(value, machine, visible, ranks, monkeypatch):
    monkeypatch.setattr(start_line, "gpus", lambda: (start_line.GPU(9, 80),) * machine)
    monkeypatch.setattr(start_line, "lacks_gpu", lambda: "")
    monkeypatch.setattr("trainer.cli.__main__.lacks_gpu", lambda: "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if isinstance(ranks, int):
        assert split(["--nproc", value, "--max_steps", "1"]) == (ranks, {}, ["--max_steps", "1"])
    else:
        with pytest.raises(UserError, match="--nproc: " + re.escape(ranks)):
            split([f"--nproc={value}"])


def test_hyphens_are_no_other_name_and_home_is_found_without_a_shell(monkeypatch, tmp_path):
    for words, found in (
        ("--learning-rate 1", "did you mean --learning_rate?"),
        ("--train-file x", "no such flag; --dataset"),
        (
            "actor_rollout_ref.actor.optim.lr=1 pretrain=x",
            "lr -> --learning_rate | pretrain -> did you mean --pretrain?",
        ),
        ("--per-device-train-batch-size 2", "--train_batch_size"),
    ):
        with pytest.raises(UserError) as error:
            parse_arguments(COMMANDS["train_sft"], "train_sft", words.split())
        assert found in str(error.value)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("output_dir: ~/run\ninput_template: ~/{}\n")
    words = ["--config", str(tmp_path / "run.yaml"), "--pretrain=~/model", "--load_checkpoint", "a~/b"]
    args = parse_arguments(COMMANDS["train_sft"], "train_sft", words)
    assert (args.model.pretrain, args.output.output_dir) == (f"{tmp_path}/model", f"{tmp_path}/run")
    assert (args.data.input_template, args.checkpoint.load_checkpoint) == ("~/{}", "a~/b")
    words = ["--pretrain=x", "--teacher=a=~/a,b=~/b", "--teacher_key=k", "--sync_folder=~/weights"]
    args = parse_arguments(COMMANDS["train_ppo"], "train_ppo", words)
    assert args.kl.teacher == f"a={tmp_path}/a,b={tmp_path}/b"
    assert args.rollout.sync_folder == f"{tmp_path}/weights"
