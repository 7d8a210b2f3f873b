#!/bin/bash
# A launch script in the style of MindSpeed-LLM: variables, groups of flags in quoted strings, torchrun.
export CUDA_DEVICE_MAX_CONNECTIONS=1

NPUS=8
NODES=4
WORLD_SIZE=$(($NPUS*$NODES))
LOAD="model ckpt"
TP=8
PP=4
MBS=2
GBS=128

DISTRIBUTED="
    --nproc_per_node $NPUS \
    --nnodes $NODES \
    --master_port 6000
"

MODEL="
    --use-mcore-models \
    --num-layers 80 \
    --hidden-size 8192 \
    --ffn-hidden-size 29568 \
    --num-attention-heads 64 \
    --group-query-attention \
    --num-query-groups 8 \
    --max-position-embeddings 4096 \
    --seq-length 4096 \
    --padded-vocab-size 152064 \
    --make-vocab-size-divisible-by 1 \
    --rotary-base 1000000 \
    --position-embedding-type rope \
    --use-rotary-position-embeddings \
    --normalization RMSNorm \
    --norm-epsilon 1e-5 \
    --swiglu \
    --disable-bias-linear \
    --add-qkv-bias \
    --untie-embeddings-and-output-weights \
    --attention-dropout 0.0 \
    --hidden-dropout 0.0 \
    --init-method-std 0.01
"

SPEED="
    --use-flash-attn \
    --use-fused-rotary-pos-emb \
    --use-fused-swiglu \
    --use-fused-rmsnorm \
    --no-masked-softmax-fusion \
    --no-gradient-accumulation-fusion \
    --attention-softmax-in-fp32 \
    --use-ascend-coc \
    --coc-fused-kernel \
    --no-shared-storage
"

RUN="
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --num-layers-per-virtual-pipeline-stage 4 \
    --sequence-parallel \
    --use-distributed-optimizer \
    --overlap-grad-reduce \
    --overlap-param-gather \
    --reuse-fp32-param \
    --micro-batch-size ${MBS} \
    --global-batch-size ${GBS} \
    --train-iters 2000 \
    --lr 1.25e-6 \
    --min-lr 1.25e-7 \
    --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 \
    --weight-decay 1e-1 \
    --clip-grad 1.0 \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --initial-loss-scale 4096 \
    --bf16 \
    --seed 42
"

DATA="
    --tokenizer-type PretrainedFromHF \
    --tokenizer-name-or-path ${TOKENIZER:-./tokenizer} \
    --data-path ./data/text_document \
    --split 100,0,0
"

OUTPUT="
    --log-interval 1 \
    --save-interval 2000 \
    --eval-interval 2000 \
    --eval-iters 0 \
    --no-load-optim \
    --no-load-rng \
    --exit-on-missing-checkpoint \
    --ckpt-format torch
"

torchrun $DISTRIBUTED pretrain_gpt.py \
    $MODEL \
    $SPEED \
    $RUN \
    $DATA \
    $OUTPUT \
    --load "${LOAD}" \
    --save ./ckpt \
    --distributed-backend nccl \
    --log-throughput \
    --transformer-impl local \
    | tee logs/dense_72b.log
