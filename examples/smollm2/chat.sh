#!/bin/bash
# Chat before and after a training: the same questions to SmolLM2-135M-Instruct and to what sft.sh or dpo.sh made of it.
#
#   bash examples/smollm2/chat.sh FOLDER [sft|dpo] [QUESTION...]
#
# FOLDER (smollm2)   holds hf, the model, and sft or dpo (default: sft), the adapters
# QUESTION           each is asked by itself; without any, a chat with the trained model is opened
# MAX_NEW_TOKENS (48)
set -eu

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${1:-smollm2} hf=${1:-smollm2}/hf stage=${2:-sft}
(($# == 0)) || shift
(($# == 0)) || shift

[[ $stage == sft || $stage == dpo ]] || { echo "chat.sh: error: the second word is '$stage': expected sft or dpo" >&2; exit 2; }
for needed in "$hf/config.json convert.sh" "$folder/$stage/latest_checkpointed_iteration.txt $stage.sh"; do
    [[ -f ${needed% *} ]] || { echo "chat.sh: error: there is no ${needed% *}: run examples/smollm2/${needed##* } $folder" >&2; exit 2; }
done
chat=(python "$here/inference.py" --task chat --load "$hf" --hf-chat-template --temperature 0 --max-new-tokens "${MAX_NEW_TOKENS:-48}")
if (($# == 0)); then
    exec "${chat[@]}" --adapter "$folder/$stage"
fi
echo "== before"
printf '%s\nclear\n' "$@" | "${chat[@]}"
echo "== after $stage.sh"
printf '%s\nclear\n' "$@" | "${chat[@]}" --adapter "$folder/$stage"
