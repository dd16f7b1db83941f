#!/usr/bin/env bash
# SFT on several nodes with Slurm:
#   sbatch scripts/slurm_train_sft.sh --pretrain MODEL --dataset DATA --output_dir DIR ...
# Five minutes before the time limit, or at a preemption, the run finishes its step, saves a checkpoint and ends.
# After a preemption, Slurm starts the same script again. After the time limit, submit it again. --load_checkpoint
# resumes from the latest complete checkpoint.
#SBATCH --job-name=train_sft
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@300
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
source scripts/setup_env.sh
# without this, a node that comes back never gets the address of the new rendezvous round (torch 2.13)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
HEAD_NODE="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
# torchrun passes these signals on. It kills processes that still run after --shutdown-timeout (default: 30 s)
srun torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc_per_node "${NPROC:-8}" \
    --max-restarts 3 \
    --signals-to-handle SIGTERM,SIGINT,SIGUSR1 \
    --shutdown-timeout 270 \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD_NODE:29500" \
    -m trainer.cli.train_sft \
    --save_steps 500 \
    --save_interval_minutes 30 \
    --max_ckpt_num 3 \
    --load_checkpoint \
    "$@"
