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

make trl trl==1.16.0 transformers==5.19.0 peft datasets deepspeed==0.19.8 torch==2.13.0
make llamafactory llamafactory==0.9.5 transformers==5.6.0 deepspeed==0.19.8 torch==2.13.0
make swift ms-swift==4.6.0 transformers==5.19.0 deepspeed==0.19.8 torch==2.13.0
make axolotl axolotl==0.19.0 transformers==5.16.1 torch==2.13.0
make oumi oumi==0.9 trl==1.6.0 transformers==5.16.1 torch==2.10.0
