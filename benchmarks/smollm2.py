"""Largest difference from recorded figures of SmolLM2-135M-Instruct, per checkpoint and layout.

    bash examples/smollm2/convert.sh FOLDER
    python benchmarks/smollm2.py FOLDER [--prompts FILE] [--checkpoints native hf] [--layouts tp1 tp3 pp2 pp3vpp2]

The recording (default: smollm2.json of the folder MINDSPEED_MS_GOLDEN) is a list of prompts with `text` or `chat`, `ids`,
`mean_nll`, `last_top5_ids` and `last_top5_logits`; other keys are not read. Each prompt goes alone through the pipeline
schedule of the layout. The interleaved schedule takes only multiples of pp micro-batches, so a prompt goes into pp3vpp2 as 3
copies, each of which is compared. Nothing is gathered on one rank: the loss is that of the cross entropy over the cut
vocabulary, each logit is taken from the tensor-parallel rank that holds its row.
Prints one table and whether the tokenizer gives the recorded ids; exits 1 above 1e-4 (mean_nll) or 1e-3 (logits), or for
other ids.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

from mindspeed_ms.spelling import SuggestingParser
from mindspeed_ms.testing.worlds import World, close_nursery

LIMITS = {"mean_nll": 1e-4, "last_top5_logits": 1e-3}
LAYOUTS = {  # name: (ranks, flags)
    "tp1": (1, ()),
    "tp3": (3, ("--tensor-model-parallel-size", "3")),
    "pp2": (2, ("--pipeline-model-parallel-size", "2")),
    "pp3vpp2": (3, ("--pipeline-model-parallel-size", "3", "--num-layers-per-virtual-pipeline-stage", "5")),
}


def run_prompts(load, flags, prompts):
    """Load a checkpoint in a layout and run each prompt alone through its schedule; on every rank of a world.

    Returns:
        list[list[dict]]: for each prompt what this rank has of it, nothing on stages before the last: "mean_nll" and
            "last_top5_logits" ({position among the five: logit} of the rows that this rank holds).
    """
    from mindspeed_ms.config import argument_parser, init_configs_from_args
    from mindspeed_ms.core.autograd import no_grad
    from mindspeed_ms.core.dist_checkpointing.load import find_checkpoint, load_tensors, open_checkpoint
    from mindspeed_ms.core.dist_checkpointing.state import model_tensors
    from mindspeed_ms.core.logging import logger
    from mindspeed_ms.core.pipeline_parallel import get_forward_backward_func
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.training.model_setup import get_model
    from mindspeed_ms.training.utils import set_parallel_context, set_seed

    logger.setLevel("ERROR")  # no log lines in the table
    longest = max(len(prompt["ids"]) for prompt in prompts)
    words = f"--use-checkpoint-args --seq-length {longest} --micro-batch-size 1 --train-iters 1 --lr 1".split()
    config = init_configs_from_args(argument_parser().parse_args([*words, *flags, "--load", load]))
    set_parallel_context(config.parallel_config)
    set_seed(1)
    chunks = get_model(
        lambda pre_process=True, post_process=True: GPTModel(
            config.model_config, pre_process=pre_process, post_process=post_process
        ),
        config,
        wrap=lambda description, ddp_config, cell, **_: cell,
    )
    with open_checkpoint(find_checkpoint(load), config) as reader:
        load_tensors(reader, list(model_tensors(chunks)), vocab_size=config.model_config.vocab_size)
    for chunk in chunks:
        chunk.set_train(False)
    copies = config.parallel_config.pipeline_model_parallel_size if len(chunks) > 1 else 1
    results = []
    for prompt in prompts:
        with no_grad():
            found = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter([prompt] * copies),
                model=chunks,
                num_microbatches=copies,
                seq_length=len(prompt["ids"]),
                micro_batch_size=1,
                forward_only=True,
                collect_non_loss_data=True,
            )
        results.append(found)
    return results


def forward_step(data_iterator, model):
    """Forward step of a schedule: the logits `[1, s, v / tp]` of a prompt and the function that reads them."""
    from mindspore import Tensor

    prompt = next(data_iterator)
    ids = np.array([prompt["ids"]], np.int32)
    positions = np.arange(ids.shape[1], dtype=np.int32)[None]

    def read(logits, non_loss_data=True):
        return figures_of(logits, prompt)

    return model(Tensor.from_numpy(ids), Tensor.from_numpy(positions)), read


def figures_of(logits, prompt):
    """What a tensor-parallel rank knows of a prompt, see `run_prompts`, from its logits `[1, s, v / tp]`."""
    from mindspore import Tensor

    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.tensor_parallel import vocab_parallel_cross_entropy

    last = logits[0, -1].asnumpy().astype(np.float64)
    first = parallel_state.get_tensor_model_parallel_rank() * last.size
    rows = [(position, token - first) for position, token in enumerate(prompt["last_top5_ids"])]
    labels = Tensor.from_numpy(np.array([prompt["ids"][1:]], np.int32))
    losses = vocab_parallel_cross_entropy(logits[:, :-1].contiguous(), labels).asnumpy()
    return {
        "mean_nll": float(losses.astype(np.float64).mean()),
        "last_top5_logits": {position: float(last[row]) for position, row in rows if 0 <= row < last.size},
    }


def largest_differences(prompts, results):
    """{"mean_nll": ..., "last_top5_logits": ...}: the largest difference over prompts and ranks; nan if a figure is missing.

    Args:
        prompts (list[dict]): the recording.
        results (list): what each rank returned.
    """
    differences = {"mean_nll": [], "last_top5_logits": []}
    for number, prompt in enumerate(prompts):
        parts = [part for rank in results for part in rank[number]]
        losses = [part["mean_nll"] for part in parts] or [np.nan]
        differences["mean_nll"] += [abs(loss - prompt["mean_nll"]) for loss in losses]
        logits = {position: value for part in parts for position, value in part["last_top5_logits"].items()}
        differences["last_top5_logits"] += [
            abs(logits.get(position, np.nan) - wanted) for position, wanted in enumerate(prompt["last_top5_logits"])
        ]
    return {name: float(np.max(values)) for name, values in differences.items()}  # np.max: nan wins


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
    """The prompts of a recording: list[dict]; `text` is None where there is only `chat`.

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
    return [{"text": None, **prompt} for prompt in prompts]


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
            ranks, flags = LAYOUTS[layout]
            with World(ranks) as world:
                found = largest_differences(prompts, world(run_prompts, str(options.folder / name), flags, prompts))
            missed = missed or any(not found[key] <= limit for key, limit in LIMITS.items())
            sys.stdout.write(f"| {name} | {layout} | {' | '.join(f'{found[key]:.1e}' for key in LIMITS)} |\n")
            sys.stdout.flush()
    close_nursery()
    wrong = other_ids(options.folder / "hf", prompts)
    sys.stdout.write(f"the tokenizer gives the recorded ids of {len(prompts) - len(wrong)} of {len(prompts)} prompts\n")
    for one in wrong:
        sys.stdout.write(f"other ids: {one}\n")
    return 1 if missed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
