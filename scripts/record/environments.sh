#!/usr/bin/env bash
# Makes the environments of the record, one for each trainer, with pinned versions: `bash scripts/record/environments.sh [FOLDER [NAME...]]`.
# TRL and the HF Trainer run in the environment of this project's tests. Needs about 15 GB and, with uv, ten minutes.
set -euo pipefail
FOLDER="${1:-runs/record/environments}"
NAMES="${*:2}"
mkdir -p "$FOLDER"

make() { # NAME PACKAGES...
    [[ -e "$FOLDER/$1/done" || -n "$NAMES" && " $NAMES " != *" $1 "* ]] && return
    python3 -m venv --clear "$FOLDER/$1"
    "$FOLDER/$1/bin/pip" install --quiet uv
    "$FOLDER/$1/bin/uv" pip install --quiet --python "$FOLDER/$1/bin/python" "${@:2}"
    touch "$FOLDER/$1/done"
}

make trl trl==1.16.0 transformers==5.19.0 peft==0.21.2 accelerate==1.15.0 datasets==5.2.0 deepspeed==0.19.8 torch==2.13.0
make llamafactory llamafactory==0.9.5 transformers==5.6.0 peft==0.18.1 accelerate==1.11.0 datasets==4.0.0 deepspeed==0.19.8 torch==2.13.0
make swift ms-swift==4.6.0 transformers==5.19.0 peft==0.20.0 accelerate==1.15.0 datasets==4.8.4 deepspeed==0.19.8 torch==2.13.0
make axolotl axolotl==0.19.0 transformers==5.16.1 peft==0.20.0 accelerate==1.13.0 datasets==4.8.4 torch==2.13.0
make oumi oumi==0.9 trl==1.6.0 transformers==5.16.1 peft==0.19.1 accelerate==1.15.0 datasets==4.8.5 torch==2.10.0
