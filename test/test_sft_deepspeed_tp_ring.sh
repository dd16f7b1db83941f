#!/usr/bin/env bash
source "$(dirname "$0")/demo_script.sh" train_sft_deepspeed_tp_ring.sh "$@"
