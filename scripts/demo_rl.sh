#!/usr/bin/env bash
# The whole job of reinforcement learning, on 2 ranks. SFT on the embedded demo runs until about half of the answers are
# right. Then GRPO and PPO run with both backends, and their rewards are plotted.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
OUT="${OUT:-runs/demo_rl}"
rm -rf "$OUT"

torchrun --standalone --nproc_per_node 2 -m trainer.cli.train_sft \
    --backend fsdp2 \
    --param_dtype fp32 \
    --max_steps 150 \
    --logging_steps 30 \
    --output_dir "$OUT/sft"

GRPO=(--advantage_estimator group_norm --rollout_batch_size 16 --n_samples_per_prompt 8)
PPO=(--advantage_estimator gae --rollout_batch_size 128 --critic_learning_rate 1e-3 --freezing_actor_steps 5)

train() {  # NAME BACKEND FLAG...
    torchrun --standalone --nproc_per_node 2 -m trainer.cli.train_ppo \
        --backend "$2" \
        --param_dtype fp32 \
        --pretrain "$OUT/sft/model" \
        --dataset demo/prompts.jsonl \
        --eval_dataset demo/prompts_eval.jsonl \
        --reward_func exact_match \
        --label_key label \
        --micro_rollout_batch_size 64 \
        --train_batch_size 128 \
        --micro_train_batch_size 64 \
        --prompt_max_len 96 \
        --generate_max_len 32 \
        --learning_rate 2e-4 \
        --lr_scheduler constant \
        --max_steps 60 \
        --eval_steps 10 \
        --logging_steps 10 \
        --output_dir "$OUT/$1-$2" \
        "${@:3}"
}

for BACKEND in fsdp2 deepspeed; do
    train grpo "$BACKEND" "${GRPO[@]}" "$@"
    train ppo "$BACKEND" "${PPO[@]}" "$@"
done
python scripts/plot_rewards.py "$OUT/rewards.png" "$OUT"/{grpo,ppo}-{fsdp2,deepspeed}
echo "reward curves: $OUT/rewards.png"
