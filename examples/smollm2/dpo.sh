#!/bin/bash
# SmolLM2-135M-Instruct learns from pairs of a preferred and a rejected answer (DPO), with low-rank adapters (LoRA).
#
#   bash examples/smollm2/convert.sh FOLDER
#   bash examples/smollm2/dpo.sh FOLDER [PAIRS.jsonl] [FLAG...]
#
# FOLDER (smollm2)   holds hf, the model; the adapters go to FOLDER/dpo. A training that was ended goes on from there.
# PAIRS              objects with instruction, chosen, rejected; default: pairs that are made here, in which the short answer wins
# STEPS (20)         a few minutes on two cores
# FLAGs go to posttrain_gpt.py and lie over those below. Then: chat.sh FOLDER dpo, export.sh FOLDER dpo.
set -eu

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${1:-smollm2} hf=${1:-smollm2}/hf run=${1:-smollm2}/dpo steps=${STEPS:-20}
(($# == 0)) || shift
pairs=$run/pairs.jsonl
if (($#)) && [[ $1 != -* ]]; then
    pairs=$1
    shift
fi
[[ -f $hf/config.json ]] || { echo "dpo.sh: error: there is no model in $hf: run examples/smollm2/convert.sh $folder" >&2; exit 2; }

if [[ $pairs == "$run/pairs.jsonl" && ! -f $pairs ]]; then
    mkdir -p "$run"
    python - "$pairs" <<'PYTHON'
import json
import sys

CAPITALS = "France Paris,Spain Madrid,Japan Tokyo,Egypt Cairo,Greece Athens,Norway Oslo,Peru Lima,Kenya Nairobi,Cuba Havana,Poland Warsaw"
LONG = "The capital of {} is {}. It is the largest city in the country and one of the most important places of its region."
with open(sys.argv[1], "w", encoding="utf-8") as file:
    for pair in CAPITALS.split(","):
        country, city = pair.split()
        for question in ("What is the capital of {}?", "Which city is the capital of {}?"):
            record = {"instruction": question.format(country), "chosen": f"{city}.", "rejected": LONG.format(country, city)}
            file.write(json.dumps(record) + "\n")
PYTHON
fi
exec python "$here/posttrain_gpt.py" --stage dpo --use-checkpoint-args \
    --pretrained-checkpoint "$hf" --load "$run" --save "$run" \
    --data-path "$pairs" --tokenizer-name-or-path "$hf" --prompt-type chat_template --split 1,0,0 \
    --seq-length 256 --variable-seq-lengths --pad-to-multiple-of 32 --micro-batch-size 2 --global-batch-size 4 --train-iters "$steps" \
    --lr 1e-4 --pref-ftx 0.1 --lr-decay-style cosine --min-lr 1e-5 --lr-warmup-fraction 0.1 --weight-decay 0 --clip-grad 1.0 \
    --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2 --lora-r 8 --lora-alpha 16 --lora-ckpt-filter \
    --eval-iters 0 --log-interval 5 --save-interval 50 --use-flash-attn "$@"
