#!/bin/bash
# What sft.sh or dpo.sh made of SmolLM2-135M-Instruct, for other programs.
#
#   bash examples/smollm2/export.sh FOLDER [sft|dpo]
#
# FOLDER (smollm2)   holds sft or dpo (default: sft), the adapters. Results: FOLDER/<sft|dpo>-hf, a Hugging Face folder with the
#                    adapters merged into the weights, and FOLDER/<sft|dpo>-peft, the adapters as PEFT has them. They must not exist.
set -eu

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${1:-smollm2} stage=${2:-sft}

[[ $stage == sft || $stage == dpo ]] || { echo "export.sh: error: the second word is '$stage': expected sft or dpo" >&2; exit 2; }
for result in "$folder/$stage-hf" "$folder/$stage-peft"; do
    [[ ! -e $result ]] || { echo "export.sh: error: $result exists already: move or delete it" >&2; exit 2; }
done
python "$here/convert_ckpt.py" --load-dir "$folder/$stage" --save-dir "$folder/$stage-hf" --save-model-type hf
exec python -m mindspeed_ms.tools.lora export "$folder/$stage" "$folder/$stage-peft"
