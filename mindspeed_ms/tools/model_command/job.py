"""Job: what is to be generated, checked before a model is loaded and before ranks start. Imports no MindSpore."""

import math
from dataclasses import dataclass, field, replace
from functools import partial

from mindspeed_ms.config import ConfigError
from mindspeed_ms.core.datasets.tokenizer import TokenizerError
from mindspeed_ms.core.datasets.tokenizer.chat_template import TemplateError
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.inference.beam_search import check_beams
from mindspeed_ms.inference.checkpoint import read_checkpoint
from mindspeed_ms.inference.configuration import LoadError
from mindspeed_ms.inference.conversation import jinja_prompt
from mindspeed_ms.inference.engine import check, encode
from mindspeed_ms.inference.requests import Request
from mindspeed_ms.inference.sampling import RequestError, SamplingParams
from mindspeed_ms.spelling import did_you_mean
from mindspeed_ms.tasks.preprocess.chat_template import get_template
from mindspeed_ms.tasks.preprocess.templates import FROM_TOKENIZER, fix_tokenizer

DEFAULT_NEW_TOKENS = 128
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Parallel sizes of a Job, of its flags and of `inference.loading.load`."""
_MOST_SLOTS = 8


class JobError(ValueError):
    """Error: a job that cannot be done; the message names the flag."""


@dataclass(frozen=True)
class Prompt:
    """A prompt: its text, and what gave it: a flag, with the line of a file."""

    text: str
    place: str = "--prompt"


@dataclass(frozen=True)
class Task:
    """One way to answer the prompts.

    Attributes:
        name (str): shown above its answers.
        params (SamplingParams): max_new_tokens None: DEFAULT_NEW_TOKENS, or what fits.
        num_beams (Optional[int]): beam search with as many beams.
        length_penalty (float): of beam search.
        is_chat (bool): a chat in place of the prompts.
    """

    name: str
    params: SamplingParams
    num_beams: int | None = None
    length_penalty: float = 1.0
    is_chat: bool = False


@dataclass
class Job:
    """What a command line asks for.

    Attributes:
        checkpoint (str), iteration (Optional[int]), adapter (Optional[str]): what to load.
        tasks (list[Task]), prompts (list[Prompt]): each task answers each prompt.
        prompt_type, prompt_type_path (Optional[str]): template of templates.json for prompts and chats; "chat_template": the
            folder's own.
        enable_thinking (Optional[bool]), system (Optional[str]), history_turns (Optional[int]): of conversations.
        added_ends (list[str | int]): further end tokens, or their ids.
        as_json (bool): print a json line for each answer.
        tensor_model_parallel_size, pipeline_model_parallel_size, expert_model_parallel_size (int),
            expert_tensor_parallel_size (Optional[int]), dtype (Optional[str]), max_sequence_length (Optional[int]),
            flags (list[str]): as of `inference.loading.load`.
        length_flag (str): the flag that gave max_sequence_length.
    """

    checkpoint: str
    tasks: list
    prompts: list
    iteration: int | None = None
    adapter: str | None = None
    prompt_type: str | None = None
    prompt_type_path: str | None = None
    enable_thinking: bool | None = None
    system: str | None = None
    history_turns: int | None = None
    added_ends: list = field(default_factory=list)
    as_json: bool = False
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    dtype: str | None = None
    max_sequence_length: int | None = None
    length_flag: str = "--max-sequence-length"
    flags: list = field(default_factory=list)

    @property
    def slots(self):
        """Cache slots (int): as many as answers or beams at a time, at most eight answers."""
        answers = [len(self.prompts) * task.params.n for task in self.tasks if not task.num_beams and not task.is_chat]
        return max([1, min(_MOST_SLOTS, max(answers, default=1)), *(task.num_beams or 1 for task in self.tasks)])

    @property
    def slots_flag(self):
        """What decides `slots` (str), in errors."""
        return "--num-beams" if any((task.num_beams or 0) > _MOST_SLOTS for task in self.tasks) else "a number of answers of"

    def prepare(self, plan):
        """What the job needs beside its Plan, made and checked before a model is loaded and before ranks start.

        Raises:
            JobError, RequestError: it cannot be used.
        """


@dataclass(frozen=True)
class Plan:
    """What follows from a job and its checkpoint.

    Attributes:
        tokenizer (Tokenizer): the one to use.
        eos_ids (frozenset[int]): end tokens.
        template (Optional[Callable]): messages -> ids.
        requests (dict[str, list[Request]]): by name of the task.
        checkpoint (Checkpoint): what is to be loaded.
        prepared: what `Job.prepare` gave.
    """

    tokenizer: object
    eos_ids: frozenset
    template: object
    requests: dict
    checkpoint: object
    prepared: object = None

    def ids(self, text, system=None):
        """Token ids (tuple[int, ...]) of a prompt, in the template if there is one.

        Raises:
            RequestError: an empty prompt.
        """
        return _ids(text, self.tokenizer, self.template, system)


def plan(job):
    """The Plan of a job; mistakes that can be known now are found here.

    Raises:
        JobError: one line that names the flag.
    """
    if job.max_sequence_length is not None and job.max_sequence_length < 1:
        raise JobError(f"{job.length_flag} is {job.max_sequence_length}: expected an integer > 0.")
    try:
        checkpoint = read_checkpoint(
            job.checkpoint,
            **{name: getattr(job, name) for name in SIZES},
            dtype=job.dtype,
            max_sequence_length=job.max_sequence_length,
            iteration=job.iteration,
            adapter=job.adapter,
            flags=job.flags,
            length_name=job.length_flag,
        )
        planned = _plan(job, checkpoint)
        checkpoint.check_memory(job.slots, length_name=job.length_flag, slots_name=job.slots_flag)
        return replace(planned, prepared=job.prepare(planned))
    except RequestError as error:
        raise JobError(f"{flag_of(error.parameter)} {error.rest}") from error
    except (LoadError, ConfigError, CheckpointError, TemplateError, TokenizerError, OSError) as error:
        raise JobError(" ".join(str(error).split())) from error


def flag_of(name):
    """Flag (str) of an option's or a parameter's name; what is none stays as it is."""
    return {"stop_token_ids": "--stop-token-id"}.get(name, name if name.startswith("--") else "--" + name.replace("_", "-"))


def _plan(job, checkpoint):
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        raise JobError(
            f"{job.checkpoint} has no tokenizer: name one with --tokenizer-name-or-path, or put tokenizer.json into the folder."
        )
    template, ends = None, set(checkpoint.eos_ids)
    chats = any(task.is_chat for task in job.tasks)
    if job.prompt_type or chats or job.system:
        template, more = _template(job, tokenizer)
        ends |= more
    ends |= {_end(word, tokenizer, checkpoint.vocab_size) for word in job.added_ends}
    if chats and job.system:
        template([{"role": "system", "content": job.system}, {"role": "user", "content": "?"}])
    requests = {}
    for task in job.tasks:
        if task.num_beams:
            check_beams(task.params, task.num_beams, job.slots)
            if not math.isfinite(task.length_penalty):
                raise JobError(f"--length-penalty is {task.length_penalty}: expected a number.")
        if task.is_chat:
            _check_chat(task.params, checkpoint.max_sequence_length)
            continue
        requests[task.name] = [_request(job, task, prompt, checkpoint, template) for prompt in job.prompts]
    return Plan(tokenizer, frozenset(ends), template, requests, checkpoint)


def _request(job, task, prompt, checkpoint, template):
    """Checked Request of a task for a Prompt; an error names the place of the prompt."""
    try:
        ids = _ids(prompt.text, checkpoint.tokenizer, template, job.system)
        request = Request(ids, _fitting(task.params, ids, checkpoint.max_sequence_length))
        check(request, checkpoint, checkpoint.tokenizer)
    except RequestError as error:
        raise RequestError(prompt.place if error.parameter == "prompt" else error.parameter, error.rest) from error
    except TokenizerError as error:
        raise RequestError(prompt.place, f"cannot be encoded: {error}") from error
    return request


def _ids(prompt, tokenizer, template, system):
    if template is None:
        return encode(prompt, tokenizer)
    if not prompt:
        raise RequestError("prompt", "is empty: expected some text.")
    messages = [{"role": "system", "content": system}] if system else []
    return tuple(template([*messages, {"role": "user", "content": prompt}]))


def _fitting(params, ids, context):
    """Parameters with the default number of new tokens, or what fits, where none was given."""
    if params.max_new_tokens is not None:
        return params
    return replace(params, max_new_tokens=max(1, min(DEFAULT_NEW_TOKENS, context - len(ids))))


def _check_chat(params, context):
    if params.max_new_tokens is not None and params.max_new_tokens >= context:
        raise RequestError(
            "max_new_tokens", f"is {params.max_new_tokens}, but the context of {context} holds question and answer: lower it."
        )
    if params.max_new_tokens == 0:
        raise RequestError("max_new_tokens", "is 0: expected an integer > 0 for a chat.")
    if params.n > 1:
        raise RequestError("n", f"is {params.n}: a chat has one answer, leave it out.")


def _template(job, tokenizer):
    """(Function from messages to ids, further end tokens (set[int])) of the template."""
    if job.prompt_type in (None, FROM_TOKENIZER):
        hint = ": name a template of templates.json with --prompt-type"
        return jinja_prompt(tokenizer, job.enable_thinking, hint), set()
    template = get_template(job.prompt_type, job.prompt_type_path, job.enable_thinking)
    fix_tokenizer(tokenizer, template)
    ends = {tokenizer.eos, *(tokenizer.token_to_id(word) for word in template.stop_words)}
    return partial(_prompt_by_template, template, tokenizer), ends


def _prompt_by_template(template, tokenizer, messages):
    """Ids of all turns, and of the header of the next answer, whose thought is up to the model unless it is not to think."""
    answered = [*messages, {"role": "assistant", "content": ""}]
    turns = template.encode_multiturn(tokenizer, answered)[:-1]
    free = template if template.enable_thinking is False else replace(template, enable_thinking=True)
    header, _ = free.encode_multiturn(tokenizer, answered)[-1]
    return [*(token for source, target in turns for token in (*source, *target)), *header]


def _end(word, tokenizer, vocab_size):
    """Id of an end token that is given as its text or its id."""
    if isinstance(word, int):
        if not 0 <= word < vocab_size:
            raise JobError(f"--eos-id is {word}: expected an id from 0 to {vocab_size - 1}.")
        return word
    number = tokenizer.token_to_id(word)
    if number is None and word.isdecimal() and int(word) < vocab_size:
        return int(word)
    if number is None:
        known = [token for token, known in tokenizer.vocab.items() if known in tokenizer.special_ids]
        raise JobError(
            f"--add-eos-token is {word!r}, which is no token of {tokenizer.name} and no id below {vocab_size}."
            + did_you_mean(word, known)
        )
    return number
