"""Launch scripts in the shapes in which people write them: every flag has a fate, none is unknown."""

import pytest

from mindspeed_ms.config import init_configs_from_yaml
from mindspeed_ms.config.convert import convert_script

# flags that launch scripts for llama 2/3, qwen 1.5/2/2.5/3, mixtral and deepseek give, pretraining and tuning
FLAGS = """
--num-experts 8 --expert-model-parallel-size 1 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss
--moe-aux-loss-coeff 0.02 --moe-permutation-async-comm --moe-token-dispatcher-type alltoall_seq --moe-grouped-gemm
--moe-layer-freq -1 --first-k-dense-replace -1 --use-cp-send-recv-overlap --use-mcore-models --disable-bias-linear
--seq-length 32768 --max-position-embeddings 32768 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
--num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm
--position-embedding-type rope --swiglu --untie-embeddings-and-output-weights --group-query-attention
--num-query-groups 8 --vocab-size 32000 --rotary-base 1000000 --no-masked-softmax-fusion --use-fused-rotary-pos-emb
--use-flash-attn --use-fused-swiglu --use-fused-rmsnorm --no-check-for-nan-in-loss-and-grad --overlap-grad-reduce
--overlap-param-gather --make-vocab-size-divisible-by 1 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1
--sequence-parallel --use-distributed-optimizer --context-parallel-size 4 --context-parallel-algo megatron_cp_algo
--tokenizer-type Llama2Tokenizer --tokenizer-model x --load a --save b --micro-batch-size 1 --global-batch-size 32
--lr 1e-5 --train-iters 2000 --lr-decay-iters 1280 --lr-decay-style cosine --min-lr 1.0e-6 --weight-decay 0.1
--lr-warmup-iters 2 --clip-grad 1.0 --bf16 --no-load-optim --no-load-rng --no-shared-storage --data-path d
--split 99990,8,2 --log-interval 1 --save-interval 2000 --eval-interval 5001 --eval-iters 100
--distributed-backend nccl --moe-intermediate-size 768 --moe-ffn-hidden-size 768 --use-rotary-position-embeddings
--gemm-gradient-accumulation-fusion --recompute-method uniform --recompute-granularity full --recompute-num-layers 1
--lr-warmup-fraction 0.01 --adam-beta1 0.9 --adam-beta2 0.95 --initial-loss-scale 4096 --seed 42
--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec --kv-channels 128 --qk-layernorm --norm-topk-prob
--tokenizer-name-or-path t --padded-vocab-size 151936 --attention-softmax-in-fp32 --no-gradient-accumulation-fusion
--multi-head-latent-attention --qk-rope-head-dim 64 --qk-nope-head-dim 128 --q-lora-rank 1536 --kv-lora-rank 512
--v-head-dim 128 --mla-mm-split --mla-fa-without-pad --n-shared-experts 1 --n-group 8 --topk-group 4
--routed-scaling-factor 2.5 --seq-aux --moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-tp-extend-ep --router-gating-in-fp32 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3 --moe-fb-overlap
--schedules-method dualpipev --mtp-mem-efficient-logits --swap-optimizer --rope-scaling-beta-fast 32
--rope-scaling-beta-slow 1 --rope-scaling-factor 40 --rope-scaling-mscale 1.0 --rope-scaling-mscale-all-dim 1.0
--rope-scaling-original-max-position-embeddings 4096 --rope-scaling-type yarn --reset-position-ids
--noop-layers 61,62,63 --manual-gc --manual-gc-interval 50 --norm-epsilon 1e-6 --distributed-timeout-minutes 120
--no-save-optim --no-save-rng --moe-alltoall-overlap-comm --shape-order BNSD --reuse-fp32-param --finetune
--num-workers 8 --add-qkv-bias --ckpt-format torch --handler-name GeneralPretrainHandler --enable-hf2mg-convert
--model-type-hf llama2 --transformer-impl local --reset-attention-mask --stage sft --is-instruction-dataset
--tokenizer-not-use-fast --prompt-type qwen --padded-samples --variable-seq-lengths --lora-r 8 --lora-alpha 16
--lora-fusion --lora-target-modules linear_qkv linear_proj --swap-attention --use-ascend-mc2 --no-shuffle
--log-throughput --num-layers-per-virtual-pipeline-stage 2 --attention-mask-type general --npu-deterministic
--dpo-loss-type sigmoid --is-pairwise-dataset --recompute-mtp-norm --recompute-mtp-layer --adam-eps 1e-5
--use-fused-ring-attention-update --moe-zero-memory level1 --moe-zero-memory-num-layers 2
--enable-recompute-layers-per-pp-rank --o2-gradient --o2-optimizer --cp-window-size 2 --cp-attention-mask-type general
--recompute-activation-function --recompute-activation-function-num-layers 1 --recompute-norm
--recompute-norm-num-layers 8 --moe-expert-capacity-factor 0.5 --moe-pad-expert-input-to-capacity
--moe-token-drop-policy probs --num-layer-list 1,2,2,1 --no-position-embedding --shared-expert-gate --use-ascend-coc
--workers 4 --enable-thinking true --pack --neat-pack --qlora --coc-fused-kernel --exit-on-missing-checkpoint
--ai-framework mindspore --ulysses-degree-in-cp 2 --use-fused-moe-token-permute-and-unpermute --trust-remote-code
--adaptive-cp-manually-set-mask-list --adaptive-cp-dynamic-attn-mask --adaptive-cp-only-reschedule --tp-2d --tp-x 2
--tp-y 2 --no-pad-to-seq-lengths
"""
SIZES = (
    "--num-layers 8 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --seq-length 32 --padded-vocab-size 128 "
    "--train-iters ${TRAIN_ITERS} --micro-batch-size ${MBS} --lr 1e-5 --min-lr 1e-6 --swiglu --disable-bias-linear --bf16"
)
HEAD = """#!/bin/bash
# git checkout 9648  # a note with "quotes' and (brackets)
export SOME_ALGO="alltoall=level0:NA;level1:pipeline"
NPUS_PER_NODE=8
MASTER_ADDR=localhost #main node
WORLD_SIZE=$(($NPUS_PER_NODE * 2))
basepath=$(cd `dirname $0`; cd ../../../; pwd)
echo "NODE_RANK ${NODE_RANK}"
CKPT_LOAD_DIR="your model ckpt path"
MBS=1
TRAIN_ITERS=2000
"""


def flags_of(text):
    """Each flag with its values, as one text."""
    flags = []
    for word in text.split():
        if word.startswith("--"):
            flags.append(word)
        else:
            flags[-1] += f" {word}"
    return flags


def quoted(name, flags):
    return f'{name}="\n' + "".join(f"    {flag} \\\n" for flag in flags) + '"\n\n'


def quoted_with_gaps(name, flags):
    return f'{name}="\n' + "".join(f"    {flag}{gap}" for flag, gap in zip(flags, ["\n", " \\\n\n"] * len(flags))) + '"\n'


def array(name, flags):
    return f"{name}=(\n" + "".join(f"    {flag}\n" for flag in flags) + ")\n\n"


def array_with_gaps(name, flags):
    return f"{name}=(\n" + "".join(f"    {flag}{gap}" for flag, gap in zip(flags, [" \\\n", "\n\n"] * len(flags))) + ")\n"


SHAPES = [
    (quoted, "${}", "torchrun --nproc_per_node 8 pretrain_gpt.py", "    | tee logs/train.log\n"),
    (quoted_with_gaps, "${{{}}}", "python -m torch.distributed.launch $basepath/posttrain_gpt.py", ""),
    (array, "${{{}[@]}}", "torchrun $basepath/pretrain_gpt.py", "    2>&1 | tee ${log_dir}\n"),
    (array_with_gaps, '"${{{}[@]}}"', "msrun --worker_num 8 --join=True pretrain_gpt.py", "\n"),
]


def script_of(flags, shape):
    """A launch script in one shape."""
    write, reference, launch, end = shape
    text = HEAD + write("GPT_ARGS", flags_of(SIZES)) + write("MORE_ARGS", flags)
    called = "".join(f" \\\n    {reference.format(name)}" for name in ("GPT_ARGS", "UNSET_ARGS", "MORE_ARGS"))
    return f"{text}{launch}{called} \\\n    --load ${{CKPT_LOAD_DIR}} \\\n    --distributed-backend nccl \\\n{end}"


@pytest.mark.parametrize("shape", SHAPES, ids=[shape[0].__name__ for shape in SHAPES])
def test_every_flag_has_a_fate(tmp_path, shape):
    given = {flag.split()[0] for flag in flags_of(SIZES)}
    flags = [flag for flag in flags_of(FLAGS) if flag.split()[0] not in given]
    script = tmp_path / "run.sh"
    script.write_text(script_of(flags, shape))
    fate = convert_script(str(script), {}).fate
    assert not [entry for entry in fate if entry[1].startswith("UNKNOWN")]
    assert {flag.split()[0] for flag in flags} | given <= {flag.split()[0] for flag, _ in fate}
    assert all(text.startswith(("->", "ignored: ", "LEFT OUT: ", "left out: ")) for _, text in fate)


@pytest.mark.parametrize("shape", SHAPES, ids=[shape[0].__name__ for shape in SHAPES])
def test_the_yaml_reads(tmp_path, shape):
    (tmp_path / "run.sh").write_text(script_of(["--no-load-optim", "--ulysses-degree-in-cp 2", "--spec a.b c"], shape))
    result = convert_script(str(tmp_path / "run.sh"), {})
    (tmp_path / "run.yaml").write_text(result.yaml_text)
    all_config = init_configs_from_yaml(str(tmp_path / "run.yaml"))
    assert (all_config.model_config.num_layers, all_config.training_config.training_iters) == (8, 2000)
    assert all_config.training_config.load_checkpoint == "your model ckpt path"
    assert dict(result.fate)["--ulysses-degree-in-cp 2"].startswith("ignored: no effect")
