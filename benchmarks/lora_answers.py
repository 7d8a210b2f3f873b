"""What the adapters of `examples/smollm2/sft.sh` say: greedy answers, and logits beside those of the merged weights.

    python benchmarks/lora_answers.py FOLDER OUT.npz live|adapter|merged

FOLDER: where sft.sh and export.sh worked. `live`: logits of the training's model, whose adapters compute beside the frozen
base; `adapter` and `merged`: greedy answers and logits of the inference with adapters on the base, and with the weights that
they were merged into. `lora.py` starts it; `peer_lora_answers.py` does the same with PEFT.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

IGNORED = -100
LOGITS = 8
"""Prompts whose logits are compared."""


def pairs_of(folder):
    """Question-answer pairs of the packed files of a folder: a list of (ids of the prompt, ids of the answer)."""
    from mindspeed_ms.core.datasets.indexed_dataset import IndexedDataset

    prefixes = (
        str(next((folder / "sft" / "data").glob(f"*_packed_{name}_document.idx")))[:-4] for name in ("input_ids", "labels")
    )
    ids, labels = map(IndexedDataset, prefixes)
    pairs = []
    for number in range(len(ids)):
        tokens, is_answer = np.asarray(ids[number], np.int64), np.asarray(labels[number]) != IGNORED
        changes = np.flatnonzero(np.diff(is_answer, prepend=False, append=False))
        end = 0
        for first, last in changes.reshape(-1, 2):
            start = end + np.flatnonzero(tokens[end:first] == tokens[0])[0]  # behind what follows the answer before
            pairs.append((tokens[start:first].tolist(), tokens[first:last].tolist()))
            end = last
    return pairs


def live_logits(folder, prompts):
    """Logits after each prompt, of the model as it was trained."""
    from mindspore import Tensor

    from mindspeed_ms.config import argument_parser, init_configs_from_args
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.training import initialize
    from mindspeed_ms.training.training import build_trainer, training_run

    run = folder / "sft"
    words = f"--use-checkpoint-args --pretrained-checkpoint {folder / 'hf'} --load {run} --seq-length 256 --micro-batch-size 2"
    words += " --global-batch-size 4 --train-iters 1000 --lr 1e-3 --lr-decay-style constant --lora-r 8 --lora-alpha 16"
    words += " --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2 --lora-ckpt-filter --use-flash-attn"
    words += " --finetune"
    config = init_configs_from_args(argument_parser().parse_args(words.split()))
    initialize.set_all_config(config)

    def provider(pre_process=True, post_process=True):
        return GPTModel(config.model_config, pre_process=pre_process, post_process=post_process)

    with tempfile.TemporaryDirectory() as unused, training_run(config):
        del unused
        trainer = build_trainer(config, provider, loaders=([], None, None))
        trainer.checkpoints.load()
        model = trainer.model[0].module
        model.set_train(False)
        return [model(Tensor(np.array([ids], np.int32))).asnumpy()[0, -1] for ids in prompts]


def inferred(folder, pairs, is_merged):
    """Greedy answers (ids) to all prompts, as long as the wanted ones, and logits after some."""
    from mindspeed_ms.core.logging import logger
    from mindspeed_ms.inference.engine import Engine
    from mindspeed_ms.inference.loading import load
    from mindspeed_ms.inference.model_runner import Feed
    from mindspeed_ms.inference.sampling import SamplingParams

    logger.setLevel("ERROR")
    place, adapter = (folder / "sft-hf", None) if is_merged else (folder / "hf", str(folder / "sft"))
    runner = load(str(place), adapter=adapter, max_sequence_length=256, slots=16).runner
    logits = [runner.forward([Feed(0, 0, tuple(ids))])[0] for ids, _ in pairs[:LOGITS]]
    params = [SamplingParams(max_new_tokens=len(answer), temperature=0.0, ignore_eos=True) for _, answer in pairs]
    completions = Engine(runner).generate([ids for ids, _ in pairs], params)
    return [list(one.token_ids) for one in completions], logits


def main():
    """Write OUT: `answers` (JSON) and `logits`; see the module."""
    folder, out, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    pairs, answers = pairs_of(folder), []
    if kind == "live":
        logits = live_logits(folder, [ids for ids, _ in pairs[:LOGITS]])
    else:
        answers, logits = inferred(folder, pairs, kind == "merged")
    np.savez(out, answers=json.dumps(answers), logits=np.stack([np.ravel(row) for row in logits]))


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[3] not in ("live", "adapter", "merged"):
        sys.exit(__doc__)
    main()
