"""300 bad inputs over all commands: each one ends with exit code 2 and one line `error: ...`, the last one, without a traceback.

    python test/bad_inputs.py [FIRST WORDS OF CASES ...] [--every N]
    python test/bad_inputs.py --ranks torchrun|folder|trainer [--sample]      each on 2 ranks, which are started for real

Without --ranks, one process imports the libraries, and forks for each case. test_bad_inputs.py runs some of the cases.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path

from launch import LAUNCHER, installed, run_process

from trainer.cli.__main__ import RANKED

SECONDS = 60  # of one case
SIZES = "--train_batch_size 4 --micro_train_batch_size 2 --max_steps 1 --param_dtype fp32"  # also for 2 ranks
ROLLOUT = (
    "ppo --pretrain demo/model --dataset demo/prompts.jsonl --label_key label --output_dir out --rollout_batch_size 2 "
    f"--n_samples_per_prompt 2 --prompt_max_len 64 --generate_max_len 4 --advantage_estimator group_norm {SIZES}"
)
MACROS = {
    "@sft": f"sft --pretrain demo/model --dataset demo/sft.jsonl --apply_chat_template --output_dir out {SIZES}",
    "@rm": f"rm --pretrain demo/model --dataset demo/pairs.jsonl --output_dir out {SIZES}",
    "@dpo": f"dpo --pretrain demo/model --dataset demo/pairs.jsonl --output_dir out {SIZES}",
    "@kd": f"kd --pretrain demo/model --teacher demo/model --dataset demo/sft.jsonl --apply_chat_template --output_dir out {SIZES}",
    "@ppo": f"{ROLLOUT} --reward_func exact_match",
    "@scores": ROLLOUT,  # without a source of scores
}
CASES = r"""
nocommand
sfft --help
sft --nproc 0
sft --nproc two
@sft --nproc 3
sft --learning_rat 1
sft --max_len
sft stray words
sft --pretrain demo/model
sft --dataset demo/sft.jsonl
sft --config none.yaml
sft --config list.yaml
sft --config empty_key.yaml
sft --config broken.yaml
sft --config binary.bin
sft --config peer.yaml
sft --config types.yaml
sft --config null.yaml
sft --config .
@sft --pretrain nowhere
@sft --pretrain ./nowhere
@sft --pretrain demo
@sft --pretrain demo/sft.jsonl
@sft --pretrain ''
@sft --pretrain no_weights
@sft --pretrain no_tokenizer
@sft --pretrain bad_config
@sft --pretrain list_config
@sft --pretrain cut_weights
@sft --pretrain empty_weights
@sft --pretrain small_vocab
@sft --pretrain odd_type
@sft --pretrain code_model
@sft --pretrain encoder
@sft --pretrain a/b/c
@sft --pretrain 'a b/c'
@sft --dataset none.jsonl
@sft --dataset ''
@sft --dataset ,
@sft --dataset demo
@sft --dataset empty.jsonl
@sft --dataset broken.jsonl
@sft --dataset binary.bin
@sft --dataset scalar.jsonl
@sft --dataset nested.jsonl
@sft --dataset no_messages.jsonl
@sft --dataset odd_role.jsonl
@sft --dataset no_answer.jsonl
@sft --dataset null_content.jsonl
@sft --dataset number_content.jsonl
@sft --dataset empty_list.jsonl
@sft --dataset latin.jsonl
@sft --dataset broken.parquet
@sft --dataset broken.csv
@sft --dataset demo/sft.jsonl#x
@sft --dataset demo/sft.jsonl#0
@sft --dataset demo/sft.jsonl#50%
@sft --dataset demo/model
@sft --dataset demo/pairs.jsonl
@sft --dataset demo/prompts.jsonl
@sft --dataset parquet.jsonl
@sft --dataset demo/sft.jsonl,none.jsonl
@sft --dataset demo/sft.jsonl,demo/sft.jsonl --dataset_probs 0.5
@sft --dataset demo/sft.jsonl,demo/sft.jsonl --dataset_probs 0.5,x
@sft --dataset demo/sft.jsonl,demo/sft.jsonl --dataset_probs 0.9,0
@sft --dataset demo/sft.jsonl,demo/sft.jsonl --dataset_probs=-1,2
@sft --dataset_split test
@sft --input_key question
@sft --input_key prompt --output_key answer --dataset keys.jsonl
sft --pretrain demo/model --dataset keys.jsonl --output_dir out --pretrain_mode --input_key nothing
@sft --pretrain_mode
@sft --input_template 'no place'
@sft --tokenizer_chat_template nowhere.jinja
@sft --tokenizer_chat_template '{% if %}'
@sft --tokenizer_chat_template '{{ messages[9].content }}'
@sft --template_args '[1]'
@sft --template_args '{'
@sft --eval_dataset none.jsonl
@sft --eval_steps 1
@sft --evals_per_epoch 2
@sft --max_len 0
@sft --max_len 1
@sft --max_len x
@sft --max_len 1e3
@sft --train_batch_size 0
@sft --train_batch_size -4
@sft --train_batch_size 2.5
@sft --train_batch_size 10 --micro_train_batch_size 4
@sft --max_tokens_per_micro_batch 0
@sft --max_steps 0
@sft --max_epochs x
@sft --seed -1
@sft --seed 99999999999999999999
@sft --learning_rate 0
@sft --learning_rate nan
@sft --learning_rate inf
@sft --learning_rate 1e-4x
@sft --lr_scheduler cosin
@sft --lr_scheduler cosine_warmup_with_min_lr --lr_warmup_ratio 0 --min_lr_ratio 0
@sft --lr_warmup_ratio 2
@sft --warmup_steps -1
@sft --lr_warmup_ratio 0.1 --warmup_steps 2
@sft --min_lr_ratio 5
@sft --optim sgd
@sft --adam_betas 0.9
@sft --adam_betas 0.9 1.5
@sft --adam_betas a b
@sft --weight_decay -1
@sft --max_norm -1
@sft --max_norm nan
@sft --backend horovod
@sft --backend deepspeed --zero_stage 4
@sft --zero_stage 1
@sft --tensor_parallel_size 2
@sft --tensor_parallel_size 0
@sft --ring_attn_size 2
@sft --expert_parallel_size 2
@sft --dp_replicate_size 3
@sft --device cuda
@sft --device tpu
@sft --param_dtype fp8
@sft --attn_implementation flash_attention_2
@sft --attn_implementation eager --packing_samples
@sft --activation_offload
@sft --gradient_checkpointing --selective_checkpointing
@sft --max_tokens_per_micro_batch 64
@sft --lora_rank 0
@sft --lora_alpha 4
@sft --lora_rank 4 --target_modules nothing
@sft --lora_rank 4 --target_modules ,
@sft --lora_rank 4 --target_modules q_proj,nothing
@sft --lora_rank 4 --target_modules '[q_proj,v_proj]'
@sft --lora_rank 4 --target_modules 'q_proj v_proj'
@sft --lora_rank 4 --lora_dropout 1
@sft --load_in_4bit
@sft --lora_rank 4 --load_in_4bit
@sft --freeze_vision false
@sft --streaming --max_steps 1 --dataset_num_proc 2
@sft --streaming_buffer 5
@sft --aux_loss_coef 0.1
@sft --expert_bias_update_rate 0.1
@sft --limits pixels
@sft --limits nothing=1
@sft --limits pixels=x
@sft --output_dir /
@sft --output_dir used
@sft --output_dir demo/sft.jsonl
@sft --output_dir demo/model
@sft --output_dir /proc/none
@sft --output_dir ''
@sft --output_dir demo/sft.jsonl/x
@sft --output_dir broken_link
@sft --output_dir long/xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
@sft --save_path /
@sft --save_path demo
@sft --save_path demo/sft.jsonl
@sft --save_path demo/model
@sft --save_path x --no_save
@sft --save_steps 0
@sft --save_interval_minutes 0
@sft --max_ckpt_mem -1
@sft --load_checkpoint none
@sft --load_checkpoint demo/model
@sft --load_checkpoint used
@sft --load_checkpoint damaged/step_1
@sft --overwrite --load_checkpoint
@sft --allow_change beta
@sft --load_checkpoint --allow_change nothing
@sft --best_metric_key eval_loss
@sft --eval_dataset demo/sft_eval.jsonl --best_metric_key accuracy
@sft --early_stopping_patience 0
@sft --early_stopping_patience 1
@sft --load_best_model_at_end
@sft --save_only_model --verify_resume 1
@sft --push_to_hub --no_save
@sft --push_to_hub --hub_model_id 'a b'
@sft --push_to_hub
@sft --hub_model_id a/b
@sft --report_to comet
@sft --report_to mlflow
@sft --use_wandb
@sft --run_name x
@sft --certify 1 --streaming
@sft --exact --param_dtype bf16
@sft --parity_trace x --load_checkpoint
@sft --beta 0.1
@sft --reward_func math
@rm --loss dpo
@rm --dataset demo/sft.jsonl
@rm --dataset null_pair.jsonl
@rm --dataset object_pair.jsonl
@rm --chosen_key nothing
@rm --margin_key nothing
@rm --value_head_prefix ''
@rm --exact --param_dtype bf16
@dpo --beta x
@dpo --beta -1
@dpo --loss nothing
@dpo --loss kto --beta 0
@dpo --loss sigmoid+
@dpo --ref_model nowhere
@dpo --dataset same_pair.jsonl
@dpo --dataset empty_pair.jsonl
@dpo --dataset demo/sft.jsonl
@dpo --label_smoothing 0.9
@dpo --loss dpo --loss_weights 1 2
@dpo --max_len 2
@dpo --online
@dpo --n_samples_per_prompt 2
@kd --teacher nowhere
@kd --teacher ''
@kd --kd_coef 2
@kd --kd_temperature 0
@kd --streaming
@kd --teacher_weights -1
@kd --teacher_weights 1e999
@kd --teacher demo/model,demo/model --teacher_weights .nan 1
kd --pretrain demo/model --dataset demo/sft.jsonl --apply_chat_template
@ppo --reward_weights .nan
@scores --reward_func nowhere.py
@scores --reward_func nothing
@scores --reward_func ''
@scores --reward_func syntax.py
@scores --reward_func empty.py
@scores --reward_func raises.py
@scores --reward_func raises_at_import.py
@scores --reward_func texts.py
@scores --reward_func short.py
@scores --reward_func math --label_key nothing
@scores --reward_pretrain demo/model
@scores --reward_pretrain nowhere
@scores --remote_rm_url nothing
@scores --remote_rm_url http://127.0.0.1:9/get --remote_rm_retries 0
@scores --env nowhere.py
@scores --env syntax.py
@ppo --advantage_estimator nothing
@ppo --advantage_estimator gae --critic_pretrain nowhere
@ppo --n_samples_per_prompt 1
@ppo --preset grpo --n_samples_per_prompt 1
@ppo --train_batch_size 12
ppo --config one_response.yaml --pretrain demo/model --dataset demo/prompts.jsonl
@ppo --evals_per_epoch 2
@ppo --saves_per_epoch 1
@ppo --eval_steps 0
@ppo --eval_steps 1
@ppo --n_samples_per_prompt 0
@ppo --rollout_batch_size 0
@ppo --rollout_batch_size x
@ppo --reward_pretrain demo/model
@ppo --generate_max_len 1000
@ppo --temperature -1
@ppo --temperature 0
@ppo --top_p 2
@ppo --top_k -5
@ppo --prompt_max_len 1
@ppo --prompt_max_len 99999
@ppo --generate_max_len 0
@ppo --input_key nothing
@ppo --dataset demo/pairs.jsonl
@ppo --rollout_engine vllm
@ppo --rollout_engine nothing
@ppo --engine_urls localhost
@ppo --preset nothing
@ppo --kl_estimator k9
@ppo --eps_clip -1
@ppo --dual_clip 0.5
@ppo --stop ''
@ppo --reward_weights 1 2
@ppo --dynamic_filtering_range 1 0
@ppo --max_staleness -1
@ppo --ema_beta 2
@ppo --rollouts_from none.jsonl
@ppo --sample_pages -1
eval
eval --pretrain demo/model
eval --pretrain nowhere --eval_dataset demo/prompts.jsonl --label_key label --reward_func exact_match
eval --pretrain demo/model --eval_dataset none.jsonl --label_key label --reward_func exact_match
eval --pretrain demo/model --eval_dataset demo/prompts.jsonl --prompt_max_len 64 --generate_max_len 4
eval --pretrain demo/model --eval_dataset demo/prompts.jsonl --label_key nothing --reward_func exact_match --prompt_max_len 64 --generate_max_len 4
eval --pretrain demo/model --eval_dataset demo/prompts.jsonl --label_key label --reward_func exact_match --output_dir used
serve_train
serve_train --pretrain nowhere
serve_train --pretrain demo/model --port 99999
check
check nowhere
check demo/sft.jsonl
check demo/model --timeout 0
plan
plan /nowhere --gpus 8
plan demo/model --gpus 0
plan demo/model --gpus x
plan demo/model --gpus 8 --gpu_memory nan
plan demo/model --gpus 8 --gpu_memory 4
plan t5 --gpus 8
plan demo/sft.jsonl --gpus 8
doctor stray
doctor --nothing
export
export nowhere out
export demo/model demo
export demo out2
export demo/model out2 --portable
export demo/model out2 --dtype fp8
export damaged/step_1 out2
make_demo stray
make_demo --output_dir demo/sft.jsonl
make_demo --output_dir /proc/none
prepare_data
prepare_data --pretrain demo/model --output_dir tokens --dataset none.jsonl
prepare_data --pretrain nowhere --output_dir tokens --dataset demo/sft.jsonl
prepare_data --pretrain demo/model --output_dir demo --dataset demo/sft.jsonl
report nowhere
report demo
report
watch nowhere
watch demo
verify_run
verify_run nowhere
verify_run demo
serve_rm --reward_pretrain nowhere
serve_rm --reward_pretrain demo/model
serve_rm --reward_pretrain demo/model --port 99999
serve_rm --reward_pretrain demo/model --port x
serve_rm
serve_engine --pretrain nowhere
serve_engine --port 99999
serve_engine
sft peer.yaml
"""
# for real ranks: found before torch is imported, in a model folder, in a loaded model, in rows, in a rollout
SAMPLE = (
    "sft --learning_rat 1",
    "@sft --pretrain cut_weights",
    "@sft --lora_rank 4 --target_modules nothing",
    "@kd --teacher nowhere",
    "@scores --reward_func raises.py",
)
REWARDS = {
    "syntax": "def score(:\n",
    "empty": "",
    "raises": "def reward_func(prompts, responses, labels):\n    raise ValueError('no')\n",
    "raises_at_import": "raise RuntimeError('no')\n",
    "texts": "def reward_func(prompts, responses, labels):\n    return ['a' for _ in responses]\n",
    "short": "def reward_func(prompts, responses, labels):\n    return []\n",
}
USER, ANSWER = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}
ROWS = {  # files of one bad row; rows of the demo follow no one
    "scalar": 3,
    "nested": [[1]],
    "no_messages": {"messages": None},
    "odd_role": {"messages": [{"role": "USR", "content": "1"}, ANSWER]},
    "no_answer": {"messages": [USER]},
    "null_content": {"messages": [USER, {"role": "assistant", "content": None}]},
    "number_content": {"messages": [USER, {"role": "assistant", "content": 7}]},
    "empty_list": {"messages": []},
    "keys": {"question": "1", "response": "2"},
    "null_pair": {"prompt": "1", "chosen": None, "rejected": "2"},
    "object_pair": {"prompt": "1", "chosen": {"a": 1}, "rejected": {"a": 2}},
    "same_pair": {"prompt": "1", "chosen": "2", "rejected": "2"},
    "empty_pair": {"prompt": "1", "chosen": "", "rejected": ""},
}
FILES = {
    "empty.jsonl": b"",
    "broken.jsonl": b'{"messages": [\n',
    "binary.bin": bytes(range(256)),
    "latin.jsonl": '{"messages": "\u00e9"}\n'.encode("latin-1"),
    "broken.parquet": b"PAR1 and no more",
    "parquet.jsonl": b"PAR1 and no more",
    "broken.csv": b'a,b\n"1,2\n',
    "list.yaml": b"- a\n- b\n",
    "empty_key.yaml": b": 1\n",
    "broken.yaml": b"a: [1\nb: }\n",
    "peer.yaml": b"model_name_or_path: m\nper_device_train_batch_size: 2\n",
    "one_response.yaml": b"label_key: label\nreward_func: exact_match\npreset: grpo\n",
    "null.yaml": b"pretrain: demo/model\ndataset: demo/sft.jsonl\nseed: null\n",
    "types.yaml": b"pretrain: [a, b]\nlearning_rate: {a: 1}\n",
}


def make_files(folder: Path) -> None:
    """The embedded demo, and broken data, models and code beside it."""
    from trainer.datasets.demos.demo import make_demo

    make_demo(str(folder / "demo"))
    for name, row in ROWS.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    for name, text in REWARDS.items():
        (folder / f"{name}.py").write_text(text)
    model = folder / "demo/model"
    config = json.loads((model / "config.json").read_text())
    changed = {
        "bad_config": "{",
        "list_config": "[]",
        "small_vocab": json.dumps(config | {"vocab_size": 7}),
        "odd_type": json.dumps(config | {"model_type": "nothing"}),
        "code_model": json.dumps(config | {"model_type": "x", "auto_map": {"AutoModelForCausalLM": "code.Model"}}),
    }
    changed["encoder"] = json.dumps({"model_type": "bert", "vocab_size": config["vocab_size"]})
    changed["t5"] = json.dumps({"model_type": "t5", "vocab_size": config["vocab_size"]})
    for name in (*changed, "no_weights", "no_tokenizer", "cut_weights", "empty_weights"):
        shutil.copytree(model, folder / name)
        if name in changed:
            (folder / name / "config.json").write_text(changed[name])
    (folder / "no_weights/model.safetensors").unlink()
    for file in (folder / "no_tokenizer").glob("*token*"):
        file.unlink()
    weights = (model / "model.safetensors").read_bytes()
    (folder / "cut_weights/model.safetensors").write_bytes(weights[:2000])
    (folder / "empty_weights/model.safetensors").write_bytes(b"")
    (folder / "broken_link").symlink_to("nowhere")
    (folder / "used").mkdir()
    (folder / "used/metrics.jsonl").write_text("{}\n")
    (folder / "damaged/step_1").mkdir(parents=True)
    (folder / "damaged/step_1/manifest.json").write_text("{")


def cases() -> list[str]:
    return [line for line in CASES.splitlines() if line.strip()]


def words_of(case: str) -> list[str]:
    first, _, rest = case.partition(" ")
    return shlex.split(f"{MACROS.get(first, first)} {rest}")


def run_case(case: str, folder: Path) -> tuple[int | None, str]:
    """(exit code, output) of a case in a process of its own; None: it was too slow."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    log = folder.with_suffix(".log")
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(folder)
        to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(to, 1)
        os.dup2(to, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        from trainer.cli.__main__ import run
        from trainer.entry import run_command

        try:
            run_command(run, words_of(case))
        except BaseException as error:  # of any type: nothing may go on in this process
            sys.stdout.flush()
            os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 9)
    limit = time.monotonic() + SECONDS
    while time.monotonic() < limit:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), log.read_text(errors="replace")
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None, log.read_text(errors="replace")


def fault(code: int | None, output: str) -> str:
    """What is wrong with the end of a case, or ""."""
    lines = output.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if code != 2:
        return f"exit code {code}"
    if "Traceback" in output:
        return "a traceback"
    if len(errors) != 1 or lines[-1] != errors[0]:
        return f"{len(errors)} lines begin with error:, and the last line is {lines[-1][:80] if lines else ''!r}"
    if "<class" in errors[0] or "object at 0x" in errors[0]:
        return "names of Python types"
    return ""


def run_on_ranks(case: str, folder: Path, launcher: str) -> tuple[int | None, str, list[int]]:
    """(exit code, output, processes left) of a case on 2 ranks.

    The launcher is real torchrun, torchrun where the trainer is not installed ("folder"), or the command `trainer`.
    """
    shutil.rmtree(folder / "out", ignore_errors=True)
    name, *flags = words_of(case)
    start = [sys.executable, "-m", "trainer.cli", name, "--nproc", "2"]
    if launcher != "trainer":
        start = [*LAUNCHER, "2", "-m", f"trainer.cli.{RANKED[name]}"]
    mark = {"BAD_INPUT": uuid.uuid4().hex}
    try:
        env = mark | installed(ends=launcher != "folder")
        code, output = run_process([*start, *flags], timeout=2 * SECONDS, cwd=folder, **env)
    except AssertionError as error:
        code, output = None, str(error)
    time.sleep(0.5)  # a process that has closed its output ends
    return (
        code,
        output,
        [process for process in map(int, filter(str.isdigit, os.listdir("/proc"))) if has(process, mark)],
    )


def has(process: int, mark: dict[str, str]) -> bool:
    """Whether a process has this variable in its environment."""
    with contextlib.suppress(OSError):  # it may end, or belong to another user
        [(name, value)] = mark.items()
        return f"{name}={value}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return False


def fault_on_ranks(code: int | None, output: str, left: list[int], launcher: str) -> str:
    """As `fault`. Where the trainer is not installed, torchrun ends with 1, its own traceback, and a table that says 2."""
    if left:
        return f"processes {left} are left"
    if launcher == "folder":
        own = re.findall(r'^ *File ".*/trainer/.*$', output, re.MULTILINE)
        if code != 1 or not re.search(r"exitcode +: 2 ", output) or own:
            return f"exit code {code}, table {re.findall('exitcode.*', output)}, own frames {own[:1]}"
        code, output = 2, output.replace("Traceback", "")
    return fault(code, output)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*", help="run only the cases that begin with one of these")
    parser.add_argument("--every", type=int, default=1, help="run every Nth of them")
    parser.add_argument("--sample", action="store_true", help="run only those of SAMPLE")
    parser.add_argument(
        "--ranks", choices=("torchrun", "folder", "trainer"), help="start each on 2 ranks, by this command"
    )
    options = parser.parse_args(argv)
    wanted = [case for case in cases() if not options.words or case.startswith(tuple(options.words))]
    if options.ranks:
        fine = ("--nproc", "--tensor_parallel_size 2")  # on 2 ranks
        wanted = [case for case in wanted if words_of(case)[0] in RANKED and not any(word in case for word in fine)]
    wanted = [case for case in wanted if case in SAMPLE or not options.sample][:: options.every]
    folder = Path(tempfile.mkdtemp())
    os.environ |= {"WANDB_MODE": "online", "WANDB_API_KEY": "", "NETRC": str(folder / "none")}  # not those of a person
    try:
        if not options.ranks:
            from trainer.compare.machines.forked_ranks import import_libraries

            import_libraries()
        make_files(folder)
        started, faults = time.monotonic(), 0
        for case in wanted:
            if options.ranks:
                code, output, left = run_on_ranks(case, folder, options.ranks)
                found = fault_on_ranks(code, output, left, options.ranks)
            else:
                code, output = run_case(case, folder)
                found = fault(code, output)
            faults += bool(found)
            last = output.strip().splitlines()[-1:] or [""]
            print(f"{'FAULT' if found else 'ok'} | {case} | {found or last[0][:300]}", flush=True)
            if found:
                print("    " + "\n    ".join(output.strip().splitlines()[-6:]), flush=True)
        print(f"{len(wanted)} cases, {faults} faults, {time.monotonic() - started:.0f} s")
    finally:  # not by an exit function, which a case that succeeds would run
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
