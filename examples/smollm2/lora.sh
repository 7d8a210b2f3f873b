#!/bin/bash
# SmolLM2-135M-Instruct learns question-answer pairs with low-rank adapters, which then go to PEFT and into the weights.
#
#   bash examples/smollm2/convert.sh FOLDER
#   bash examples/smollm2/lora.sh FOLDER [RECORDS.jsonl]
#
# RECORDS: objects with instruction, output and, if you like, input, system, history; default: pairs that are made here. Results:
# FOLDER/lora/run (adapters alone), FOLDER/lora/peft (a PEFT folder), FOLDER/lora/merged (a Hugging Face folder).
set -eu

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${1:-smollm2}
records=${2:-$folder/lora/pairs.jsonl}
hf=$folder/hf out=$folder/lora
steps=${STEPS:-100}
mkdir -p "$out"

if [[ ! -f $records ]]; then
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
if [[ ! -f $out/data_packed_input_ids_document.idx ]]; then
    python "$here/preprocess_data.py" --input "$records" --output-prefix "$out/data" --tokenizer-name-or-path "$hf" \
        --handler-name AlpacaStyleInstructionHandler --prompt-type chat_template --seq-length 256 --pack --neat-pack
fi
if [[ $steps == 0 ]]; then exit; fi # the data alone
bash "$here/gpt/pretrain_gpt.sh" --use-checkpoint-args --pretrained-checkpoint "$hf" --load "$out/run" --save "$out/run" \
    --is-instruction-dataset --data-path "$out/data" --split 1,0,0 --seq-length 256 --neat-pack \
    --tokenizer-name-or-path "$hf" --micro-batch-size 2 --global-batch-size 4 --train-iters "$steps" \
    --lr 2e-3 --lr-decay-style cosine --min-lr 1e-4 --lr-warmup-fraction 0.03 --weight-decay 0 --clip-grad 1.0 \
    --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2 --lora-r 8 --lora-alpha 16 --lora-ckpt-filter \
    --eval-iters 0 --no-sample --log-interval 5 --save-interval 50 --use-flash-attn
rm -rf "$out/peft" "$out/merged"
python -m mindspeed_ms.tools.lora export "$out/run" "$out/peft"
python -m mindspeed_ms.tools.lora merge "$out/run" "$out/merged" --save-model-type hf
for adapter in "" "--adapter $out/run"; do
    python -m mindspeed_ms.tools.generate "$hf" $adapter --prompt-type chat_template --max-new-tokens 24 \
        --prompt "$(python -c 'import json, sys; print(json.loads(open(sys.argv[1]).readline())["instruction"])' "$records")"
done
