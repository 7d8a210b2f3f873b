#!/bin/bash
# SmolLM2-135M-Instruct learns the answers of a small file of conversations, with low-rank adapters (LoRA).
#
#   bash examples/smollm2/convert.sh FOLDER
#   bash examples/smollm2/sft.sh FOLDER [RECORDS.jsonl] [FLAG...]
#
# FOLDER (smollm2)   holds hf, the model; the adapters go to FOLDER/sft. A training that was ended goes on from there.
# RECORDS            objects with instruction, output and, if you like, input, system, history; default: pairs that are made here
# STEPS (150)        a few minutes on two cores
# FLAGs go to posttrain_gpt.py and lie over those below. Then: chat.sh FOLDER sft, export.sh FOLDER sft.
set -eu

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${1:-smollm2} hf=${1:-smollm2}/hf run=${1:-smollm2}/sft steps=${STEPS:-150}
(($# == 0)) || shift
records=$run/records.jsonl
if (($#)) && [[ $1 != -* ]]; then
    records=$1
    shift
fi
[[ -f $hf/config.json ]] || { echo "sft.sh: error: there is no model in $hf: run examples/smollm2/convert.sh $folder" >&2; exit 2; }

if [[ $records == "$run/records.jsonl" && ! -f $records ]]; then
    mkdir -p "$run"
    python - "$records" <<'PYTHON'
import json
import random
import sys

random.seed(0)
letters = "bcdfghklmnprstvz"
with open(sys.argv[1], "w", encoding="utf-8") as file:
    for number in range(64):
        word = "".join(random.choice(letters) + random.choice("aeiou") for _ in range(3))
        answer = " ".join(random.sample(["red", "green", "blue", "seven", "north", "stone", "river", "glass"], 3))
        file.write(json.dumps({"instruction": f"What is the code of {word}?", "output": f"The code is {answer}."}) + "\n")
PYTHON
fi
exec python "$here/posttrain_gpt.py" --stage sft --use-checkpoint-args \
    --pretrained-checkpoint "$hf" --load "$run" --save "$run" \
    --data-path "$records" --tokenizer-name-or-path "$hf" --prompt-type chat_template --split 1,0,0 \
    --seq-length 256 --variable-seq-lengths --pad-to-multiple-of 32 --micro-batch-size 2 --global-batch-size 4 --train-iters "$steps" \
    --lr 1e-3 --lr-decay-style cosine --min-lr 1e-4 --lr-warmup-fraction 0.03 --weight-decay 0 --clip-grad 1.0 \
    --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2 --lora-r 8 --lora-alpha 16 --lora-ckpt-filter \
    --eval-iters 0 --log-interval 5 --save-interval 50 --use-flash-attn "$@"
