#!/bin/bash
# Fine-tune all weights of Qwen2.5-7B on conversations, from converted weights (ckpt_convert.sh).
#
#   bash examples/mcore/qwen25/tune.sh [FLAG...]
#
# HF_DIR (Qwen2.5-7B)   the Hugging Face folder: tokenizer
# CKPT_DIR              weights; default: HF_DIR/mcore_tp<TP>_pp<PP>, of ckpt_convert.sh
# DATA_PATH             prefix of preprocess_data.py, or files of records, to which PROMPT_TYPE (qwen) is the template
# SAVE_DIR (output/qwen25_sft)   a training that was ended goes on from here
# TP (4), PP (1), SEQ_LEN (4096), MBS (1), GBS (8), TRAIN_ITERS (5000), LR (1.25e-6)
# NPUS_PER_NODE (8), NNODES (1), NODE_RANK (0), MASTER_ADDR (localhost), MASTER_PORT (6000): as torchrun's; ranks of a CPU machine too
# NUM_LAYERS (28), HIDDEN_SIZE (3584), FFN_HIDDEN_SIZE (18944), NUM_ATTENTION_HEADS (28), NUM_QUERY_GROUPS (4), VOCAB_SIZE (152064):
#                       for a smaller model of the family
# CHECK=1               check the configuration with mindspeed_ms.config, start nothing
# FLAGs go to posttrain_gpt.py and lie over those below.
set -eu

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
hf=${HF_DIR:-Qwen2.5-7B} tp=${TP:-4} pp=${PP:-1} seq=${SEQ_LEN:-4096} save=${SAVE_DIR:-output/qwen25_sft}
data=(${DATA_PATH:-})
nnodes=${NNODES:-1} npus=${NPUS_PER_NODE:-8}

distributed=(--nproc_per_node "$npus" --nnodes "$nnodes" --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}" --master_port "${MASTER_PORT:-6000}")
arguments=(
    --stage sft
    --is-instruction-dataset
    --variable-seq-lengths
    --tensor-model-parallel-size "$tp"
    --pipeline-model-parallel-size "$pp"
    --num-layers "${NUM_LAYERS:-28}"
    --hidden-size "${HIDDEN_SIZE:-3584}"
    --ffn-hidden-size "${FFN_HIDDEN_SIZE:-18944}"
    --num-attention-heads "${NUM_ATTENTION_HEADS:-28}"
    --group-query-attention
    --num-query-groups "${NUM_QUERY_GROUPS:-4}"
    --padded-vocab-size "${VOCAB_SIZE:-152064}"
    --seq-length "$seq"
    --max-position-embeddings "$seq"
    --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --attention-softmax-in-fp32
    --use-flash-attn
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --tokenizer-type PretrainedFromHF
    --tokenizer-name-or-path "$hf"
    --split 100,0,0
    --micro-batch-size "${MBS:-1}"
    --global-batch-size "${GBS:-8}"
    --train-iters "${TRAIN_ITERS:-5000}"
    --lr "${LR:-1.25e-6}"
    --min-lr 1.25e-7
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.0
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --pretrained-checkpoint "${CKPT_DIR:-$hf/mcore_tp${tp}_pp$pp}"
    --load "$save"
    --save "$save"
    --save-interval 1000
    --log-interval 1
    --eval-iters 0
)
((${#data[@]} == 0)) || arguments+=(--data-path "${data[@]}")
[[ ! -e ${data[0]:-} ]] || arguments+=(--prompt-type "${PROMPT_TYPE:-qwen}")
((tp == 1)) || arguments+=(--sequence-parallel)

if [[ -n ${CHECK:-} ]]; then
    exec python -m mindspeed_ms.config check --world-size $((npus * nnodes)) "${arguments[@]}" "$@"
fi
((${#data[@]})) || { echo "tune.sh: error: DATA_PATH is not set: expected a prefix of preprocess_data.py, or files of records" >&2; exit 2; }
exec python -m mindspeed_ms.launch "${distributed[@]}" "$here/posttrain_gpt.py" "${arguments[@]}" "$@"
