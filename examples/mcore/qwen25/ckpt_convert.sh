#!/bin/bash
# Qwen2.5-7B from Hugging Face's folder to Megatron's checkpoint.
#
#   bash examples/mcore/qwen25/ckpt_convert.sh [FLAG...]
#
# HF_DIR (Qwen2.5-7B)   the Hugging Face folder
# CKPT_DIR              what is written; default: HF_DIR/mcore_tp<TP>_pp<PP>
# TP (4), PP (1)        tensor and pipeline parallel size of the checkpoint
# FLAGs go to convert_ckpt.py and lie over those below. Sizes are those of config.json.
set -eu

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
hf=${HF_DIR:-Qwen2.5-7B} tp=${TP:-4} pp=${PP:-1}

python "$here/convert_ckpt.py" \
    --use-mcore-models \
    --model-type GPT \
    --model-type-hf llama2 \
    --load-model-type hf \
    --save-model-type mg \
    --target-tensor-parallel-size "$tp" \
    --target-pipeline-parallel-size "$pp" \
    --add-qkv-bias \
    --params-dtype bf16 \
    --load-dir "$hf" \
    --save-dir "${CKPT_DIR:-$hf/mcore_tp${tp}_pp$pp}" \
    --tokenizer-model "$hf/tokenizer.json" \
    "$@"
