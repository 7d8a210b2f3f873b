"""Largest difference from recorded figures of SmolLM2-135M-Instruct, per checkpoint and layout.

    bash examples/smollm2/convert.sh FOLDER
    python benchmarks/smollm2.py FOLDER [--prompts FILE] [--checkpoints native hf] [--layouts tp1 tp3 pp2 pp3vpp2]

The recording (default: smollm2.json of the folder MINDSPEED_MS_GOLDEN) is a list of prompts with `text` or `chat`, `ids`,
`mean_nll`, `last_top5_ids`, `last_top5_logits`, `greedy_ids` and `smallest_greedy_margin`; other keys are not read. The
checkpoint is loaded by `inference.loading`. Losses come from whole sequences through the forward-only schedule, whose cross
entropy is over the cut vocabulary; logits and greedy texts come through the key-value cache, each prompt alone and all
together.
Prints one table and whether the tokenizer gives the recorded ids; exits 1 above 1e-4 (mean_nll) or 1e-3 (logits), for other
ids, and for another greedy text where no margin is below 0.005.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

from mindspeed_ms.spelling import SuggestingParser
from mindspeed_ms.testing.worlds import World, close_nursery

LIMITS = {"mean_nll": 1e-4, "last_top5_logits": 1e-3, "other_texts": 0}
LAYOUTS = {  # name: (ranks, arguments of inference.loading.load)
    "tp1": (1, {}),
    "tp3": (3, {"tensor_model_parallel_size": 3}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp3vpp2": (3, {"pipeline_model_parallel_size": 3, "flags": ("--num-layers-per-virtual-pipeline-stage", "5")}),
}
SMALLEST_MARGIN = 0.005


def run_prompts(load, layout, prompts):
    """Load a checkpoint in a layout and run all prompts; on every rank of a world.

    Returns:
        list[dict]: for each prompt "mean_nll", "last_top5_logits" (list) and "greedy" (ids, alone and with the others).
    """
    from mindspeed_ms.core.logging import logger
    from mindspeed_ms.inference.loading import load as load_checkpoint

    logger.setLevel("ERROR")  # no log lines in the table
    longest = max(len(prompt["ids"]) + len(prompt["greedy_ids"]) for prompt in prompts)
    runner = load_checkpoint(load, max_sequence_length=longest, slots=len(prompts), **layout).runner
    scored = runner.score([prompt["ids"] for prompt in prompts])
    together = greedy(runner, prompts)
    results = []
    for prompt, scores, text in zip(prompts, scored, together):
        (alone,) = greedy(runner, [prompt])
        results.append(
            {
                "mean_nll": float(-scores.log_probabilities.mean()),
                "last_top5_logits": [float(alone["logits"][token]) for token in prompt["last_top5_ids"]],
                "greedy": [alone["ids"], text["ids"]],
            }
        )
    return results


def greedy(runner, prompts):
    """Most probable next tokens of prompts that run together, as many as were recorded, and the logits of the first one."""
    from mindspeed_ms.inference.model_runner import Feed

    found = [{"ids": [], "logits": None} for _ in prompts]
    feeds = {slot: Feed(slot, 0, tuple(prompt["ids"])) for slot, prompt in enumerate(prompts)}
    while feeds:
        for slot, logits in zip(list(feeds), runner.forward(list(feeds.values()))):
            one, feed = found[slot], feeds.pop(slot)
            one["ids"].append(int(logits.argmax()))
            one["logits"] = logits.copy() if one["logits"] is None else one["logits"]
            if len(one["ids"]) < len(prompts[slot]["greedy_ids"]):
                feeds[slot] = Feed(slot, feed.start + len(feed.ids), (one["ids"][-1],))
    return found


def largest_differences(prompts, results):
    """Largest differences over prompts and ranks: {"mean_nll": ..., "last_top5_logits": ..., "other_texts": their number}.

    Args:
        prompts (list[dict]): the recording.
        results (list): what each rank returned.
    """
    pairs = [(prompt, result) for rank in results for prompt, result in zip(prompts, rank, strict=True)]
    clear = [pair for pair in pairs if pair[0]["smallest_greedy_margin"] > SMALLEST_MARGIN]
    largest = {  # np.max: nan wins
        name: float(np.max([np.abs(np.subtract(result[name], prompt[name])).max() for prompt, result in pairs]))
        for name in ("mean_nll", "last_top5_logits")
    }
    return {**largest, "other_texts": sum(ids != prompt["greedy_ids"] for prompt, result in clear for ids in result["greedy"])}


def other_ids(folder, prompts):
    """Texts and conversations whose ids by the tokenizer of a Hugging Face folder are not the recorded ones."""
    from mindspeed_ms.core.datasets.tokenizer.hugging_face import from_folder
    from mindspeed_ms.tasks.preprocess.chat_template import ChatTemplate

    tokenizer = from_folder(folder)
    wrong = []
    for prompt in prompts:
        text = prompt["text"]
        if text is None:
            text = ChatTemplate(tokenizer).render(prompt["chat"], add_generation_prompt=True)
        if tokenizer.encode_batch([text], add_special_tokens=prompt["text"] is not None)[0] != prompt["ids"]:
            wrong.append(prompt["text"] or prompt["chat"])
    return wrong


def prompts_of(path):
    """The prompts of a recording: list[dict]; `text` and `greedy_ids` are empty where there are none.

    Raises:
        ValueError: it is no JSON, not a list, empty, or a prompt lacks a key.
    """
    prompts = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(prompts, list) or not prompts:
        raise ValueError("expected a list of prompts that is not empty")
    for number, prompt in enumerate(prompts):
        lost = [key for key in ("ids", "mean_nll", "last_top5_ids", "last_top5_logits") if key not in prompt]
        lost += [] if prompt.get("text") is not None or prompt.get("chat") else ["text or chat"]
        if lost:
            raise ValueError(f"prompt {number} lacks {', '.join(lost)}")
    return [{"text": None, "greedy_ids": [], "smallest_greedy_margin": 0.0, **prompt} for prompt in prompts]


def main(arguments=None):
    """Print the table; exit code 1 if a limit is missed."""
    parser = SuggestingParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what examples/smollm2/convert.sh made")
    parser.add_argument("--checkpoints", nargs="+", default=["native", "hf"], choices=["native", "hf"], help="default: both")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS), help="default: all")
    recorded = Path(os.environ.get("MINDSPEED_MS_GOLDEN", "."), "smollm2.json")
    parser.add_argument("--prompts", type=Path, default=recorded, metavar="FILE", help="the recording; default: %(default)s")
    options = parser.parse_args(arguments)
    recording = options.prompts
    for path in (recording, *(options.folder / name for name in ("hf", *options.checkpoints))):
        if not path.exists():
            parser.error(
                f"{path} does not exist: make FOLDER with examples/smollm2/convert.sh, and name the recording with --prompts, "
                "or the folder of smollm2.json in MINDSPEED_MS_GOLDEN."
            )
    try:
        prompts = prompts_of(recording)
    except ValueError as error:
        parser.error(f"{recording}: {error}")
    missed = False
    sys.stdout.write(f"| checkpoint | layout | {' | '.join(LIMITS)} |\n|---|---|---|---|\n")
    for name in options.checkpoints:
        for layout in options.layouts:
            ranks, arguments = LAYOUTS[layout]
            with World(ranks) as world:
                found = largest_differences(prompts, world(run_prompts, str(options.folder / name), arguments, prompts))
            missed = missed or any(not found[key] <= limit for key, limit in LIMITS.items())
            sys.stdout.write(f"| {name} | {layout} | {' | '.join(f'{found[key]:.2g}' for key in LIMITS)} |\n")
            sys.stdout.flush()
    close_nursery()
    wrong = other_ids(options.folder / "hf", prompts)
    sys.stdout.write(f"the tokenizer gives the recorded ids of {len(prompts) - len(wrong)} of {len(prompts)} prompts\n")
    for one in wrong:
        sys.stdout.write(f"other ids: {one}\n")
    return 1 if missed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
