#!/usr/bin/env bash
source "$(dirname "$0")/demo_script.sh" train_sft_fsdp2_tp.sh "$@"
