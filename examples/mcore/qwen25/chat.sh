#!/bin/bash
# Chat with Qwen2.5-7B (an -Instruct model answers best).
#
#   bash examples/mcore/qwen25/chat.sh [FLAG...]
#
# HF_DIR (Qwen2.5-7B)   the Hugging Face folder: tokenizer
# CKPT_DIR              the model: of ckpt_convert.sh, or SAVE_DIR of pretrain.sh or tune.sh; default: HF_DIR/mcore_tp<TP>_pp<PP>
# TP (4), PP (1)        ranks that share the model; the checkpoint may have been saved in another layout
# FLAGs go to inference.py and lie over those below.
set -eu

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
hf=${HF_DIR:-Qwen2.5-7B} tp=${TP:-4} pp=${PP:-1}

exec python "$here/inference.py" \
    --load "${CKPT_DIR:-$hf/mcore_tp${tp}_pp$pp}" \
    --tokenizer-name-or-path "$hf" \
    --tensor-model-parallel-size "$tp" \
    --pipeline-model-parallel-size "$pp" \
    --bf16 \
    --task chat \
    --prompt-type qwen \
    --history-turns 3 \
    --max-new-tokens "${MAX_NEW_TOKENS:-256}" \
    "$@"
