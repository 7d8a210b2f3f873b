"""Command line of evaluation.py, with MindSpeed-LLM's flags; all others go to the configuration, as in inference.py."""

import os
import re
import tempfile
from dataclasses import dataclass, field

from mindspeed_ms.core.datasets.errors import DatasetError
from mindspeed_ms.spelling import SuggestingParser
from mindspeed_ms.tasks.evaluation import generation, multiple_choice
from mindspeed_ms.tasks.evaluation.errors import EvaluationError
from mindspeed_ms.tasks.evaluation.records import read_records
from mindspeed_ms.tasks.evaluation.shapes import SHAPES, shape_of
from mindspeed_ms.tasks.preprocess.templates import FROM_TOKENIZER
from mindspeed_ms.tools.evaluate.preparation import GSM8K, PERPLEXITY, prepare
from mindspeed_ms.tools.model_command import flags
from mindspeed_ms.tools.model_command.job import Job, JobError, flag_of

PROGRAM = "evaluation.py"
_DEFAULT_NEW_TOKENS = 256
_OF_TASKS = {  # flag: tasks that it has an effect on
    "num_shots": (*SHAPES, GSM8K),
    "few_shot_path": (*SHAPES, GSM8K),
    "hf_chat_template": (GSM8K,),
    "prompt_type": (GSM8K,),
    "prompt_type_path": (GSM8K,),
    "system": (GSM8K,),
    "window": (PERPLEXITY,),
    "stride": (PERPLEXITY,),
    "max_eval_samples": (*SHAPES, GSM8K),
}


@dataclass
class EvaluateJob(Job):
    """What a command line asks for: the model as in Job, and the evaluation.

    Attributes:
        task (str): a shape, "gsm8k" or "perplexity".
        paths (list[str]): data.
        questions (list), examples (list): Questions or Problems, and those that are shown before; of perplexity none.
        shots (int): how many are shown.
        batch_size (int), max_new_tokens (int), window, stride (Optional[int]): settings.
        output (Optional[str]): json file of the results.
        notes (list[str]): about flags of MindSpeed-LLM's scripts that have no effect here.
    """

    task: str = PERPLEXITY
    paths: list = field(default_factory=list)
    questions: list = field(default_factory=list)
    examples: list = field(default_factory=list)
    shots: int = 0
    batch_size: int = 8
    max_new_tokens: int = _DEFAULT_NEW_TOKENS
    window: int | None = None
    stride: int | None = None
    output: str | None = None
    notes: list = field(default_factory=list)

    @property
    def slots(self):
        """Cache slots (int)."""
        return self.batch_size if self.task == GSM8K else 1

    slots_flag = "--evaluation-batch-size"

    def prepare(self, plan):
        """Documents by path, pairs of ids or requests; see `Job.prepare`."""
        try:
            return prepare(self, plan)
        except (EvaluationError, DatasetError) as error:
            raise JobError(str(error)) from error


def parser():
    """The argparse.ArgumentParser; flags that it does not know are the configuration's."""
    result = SuggestingParser(
        prog=PROGRAM, description="Evaluate a checkpoint. Model and layout flags of training are known too.", allow_abbrev=False
    )
    tasks = (PERPLEXITY, *SHAPES, GSM8K)
    result.add_argument("--task", required=True, choices=tasks, metavar="TASK", help=f"one of {', '.join(tasks)}")
    flags.add_mindspeed_llm_flags(result)
    result.add_argument("--task-data-path", required=True, nargs="+", metavar="PATH", help="files or folders of data")
    result.add_argument("--num-shots", type=flags.not_negative, metavar="N", help="examples before each question (0)")
    result.add_argument("--few-shot-path", metavar="PATH", help="data that the examples are from")
    result.add_argument("--max-eval-samples", type=flags.positive, metavar="N", help="only the first N questions")
    result.add_argument("--evaluation-batch-size", type=flags.positive, default=8, metavar="N", help="sequences at a time (8)")
    result.add_argument("--max-new-tokens", type=flags.positive, metavar="N", help=f"longest answer ({_DEFAULT_NEW_TOKENS})")
    result.add_argument("--window", type=int, metavar="N", help=f"of {PERPLEXITY}: tokens at a time; default: the context")
    result.add_argument("--stride", type=int, metavar="N", help="new tokens of each window; default: half of it")
    result.add_argument("--output", metavar="FILE", help="write the results as json, with what was chosen for each question")
    result.add_argument("--hf-chat-template", action="store_true", default=None, help="put questions into the chat template")
    result.add_argument("--prompt-type", metavar="NAME", help="template of templates.json, or chat_template: the folder's own")
    result.add_argument("--prompt-type-path", metavar="FILE", help="a templates.json in place of the package's")
    result.add_argument("--system", metavar="TEXT", help="system message before the questions, with a template")
    result.add_argument("--tokenizer-name-or-path", metavar="FOLDER", help="a tokenizer in place of the checkpoint's")
    result.set_defaults(history_turns=None, enable_thinking=None)
    return result


def job_of(arguments):
    """EvaluateJob of a command line (list[str]), its data read.

    Raises:
        JobError: flags that contradict each other, data that cannot be evaluated.
    """
    options, others = parser().parse_known_args(arguments)
    _check(options)
    try:
        questions, examples = _data(options)
    except EvaluationError as error:
        raise JobError(str(error)) from error
    shared = flags.mindspeed_llm_arguments(options, others)
    if options.hf_chat_template:
        shared["prompt_type"] = FROM_TOKENIZER
    return EvaluateJob(
        tasks=[],
        prompts=[],
        max_sequence_length=options.seq_length,
        length_flag="--seq-length",
        task=options.task,
        paths=options.task_data_path,
        questions=questions,
        examples=examples,
        shots=options.num_shots or 0,
        batch_size=options.evaluation_batch_size,
        max_new_tokens=options.max_new_tokens or _DEFAULT_NEW_TOKENS,
        window=options.window,
        stride=options.stride,
        output=options.output,
        notes=_notes(options),
        **shared,
    )


def _notes(options):
    if options.max_new_tokens is None or options.task == GSM8K:
        return []
    return [f"--max-new-tokens has no effect on --task {options.task}: nothing is generated."]


def _check(options):
    for name, tasks in _OF_TASKS.items():
        if getattr(options, name) is not None and options.task not in tasks:
            raise JobError(f"{flag_of(name)} has no effect on --task {options.task} (only {', '.join(tasks)}): leave it out.")
    if bool(options.num_shots) != (options.few_shot_path is not None):
        raise JobError("--num-shots and --few-shot-path belong together: how many examples, and the data that they are from.")
    if options.system is not None and not (options.hf_chat_template or options.prompt_type):
        raise JobError("--system needs a template: give --hf-chat-template or --prompt-type.")
    if options.output is not None:
        folder = os.path.dirname(os.path.abspath(options.output))
        if not os.path.isdir(folder) or os.path.isdir(options.output):
            raise JobError(f"--output is {options.output}: expected a file in a folder that exists.")
        if os.path.lexists(options.output) and not _holds_results(options.output):
            raise JobError(f"--output is {options.output}, which holds no results of an evaluation: choose another file.")
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise JobError(f"--output is {options.output}: the folder cannot be written: {error.strerror}.") from error


def _holds_results(path):
    """Whether a file is an earlier --output, which is replaced; all else stays as it is."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return re.match(rb'\{\s*"task":', file.read(64)) is not None


def _data(options):
    """(questions, examples) of the files."""
    if options.task == PERPLEXITY:
        for path in options.task_data_path:
            prefix = path.removesuffix(".bin").removesuffix(".idx")
            if not os.path.isfile(path) and not os.path.isfile(prefix + ".idx"):
                raise EvaluationError(
                    f"--task-data-path {path}: expected a text, a .jsonl file, or the prefix of .bin and .idx."
                )
        return [], []
    questions = [question for path in options.task_data_path for question in _questions(options.task, path)]
    examples = _questions(options.task, options.few_shot_path) if options.few_shot_path else []
    return questions[: options.max_eval_samples], examples


def _questions(task, path):
    if task == GSM8K:
        return generation.problems_of(read_records(path))
    shape = shape_of(task)
    return multiple_choice.questions_of(read_records(path, shape.columns), shape)
