#!/bin/bash
TP=1
EP=8
DIST=(
    --nproc_per_node 8
    --node_rank 0   # first node
)
MOE=(
    --num-experts 128
    --moe-router-topk 8
    --moe-intermediate-size 768
    --moe-ffn-hidden-size 768
    --moe-grouped-gemm
    --moe-permutation-async-comm
    --moe-token-dispatcher-type alltoall_seq
    --moe-router-load-balancing-type noaux_tc
    --moe-aux-loss-coeff 0.001
    --norm-topk-prob
    --n-group 8
    --topk-group 4
    --routed-scaling-factor 2.5
    --moe-router-score-function sigmoid
    --router-gating-in-fp32
    --first-k-dense-replace -1
    --moe-layer-freq -1
    --expert-model-parallel-size $EP
)
MODEL=(
    --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec
    --tensor-model-parallel-size ${TP} --sequence-parallel
    --kv-channels 128 --qk-layernorm
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32
    --group-query-attention --num-query-groups 4
    --seq-length 4096 --max-position-embeddings 4096 --vocab-size 151643
    --rope-scaling-type yarn --rope-scaling-factor 40 --rope-scaling-mscale 1.0 --rope-scaling-mscale-all-dim 1.0
    --rope-scaling-beta-fast 32 --rope-scaling-beta-slow 1 --rope-scaling-original-max-position-embeddings 4096
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
)
TUNE=(
    --finetune --stage sft --is-instruction-dataset --tokenizer-not-use-fast --prompt-type qwen --variable-seq-lengths
    --lora-r 16 --lora-alpha 32 --lora-fusion --lora-target-modules linear_qkv linear_proj
    --recompute-granularity full --recompute-method block --recompute-num-layers 14
    --mla-mm-split --mtp-num-layers 0 --not-a-flag 3
)
python -m torch.distributed.launch ${DIST[@]} posttrain_gpt.py "${MOE[@]}" "${MODEL[@]}" "${TUNE[@]}" \
    --micro-batch-size 8 --global-batch-size 64 --lr 1.25e-5 --bf16 --train-iters 100 --load ./a --save ./b > log 2>&1
