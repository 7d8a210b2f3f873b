"""Loading for inference: from a folder with a checkpoint to a ModelRunner, its tokenizer and what ends a text."""

from dataclasses import dataclass

from mindspeed_ms.config import ConfigError, argument_parser, init_configs_from_args, require_available
from mindspeed_ms.config.model_description import describe_model, describe_parallel
from mindspeed_ms.core import comm
from mindspeed_ms.core.device import launch_environment
from mindspeed_ms.core.dist_checkpointing.load import load_tensors, open_checkpoint
from mindspeed_ms.core.dist_checkpointing.state import model_tensors
from mindspeed_ms.core.logging import logger
from mindspeed_ms.core.tensor_parallel.cell import allocate_parameters, initialize_parameters
from mindspeed_ms.inference.checkpoint import context_length, find_checkpoint
from mindspeed_ms.inference.model_runner import DEFAULT_PREFILL_CHUNK, ModelRunner
from mindspeed_ms.inference.tokenizer import end_ids, find_tokenizer
from mindspeed_ms.layout.ranks import world_unit_of
from mindspeed_ms.legacy.model.gpt_model import GPTModel
from mindspeed_ms.models.adapter_files import with_adapters
from mindspeed_ms.models.adapters import MergedReader
from mindspeed_ms.models.reward_head import without_critic
from mindspeed_ms.training.model_setup import get_model
from mindspeed_ms.training.utils import set_parallel_context, set_seed

_DTYPES = {"float32": (), "bfloat16": ("--bf16",), "float16": ("--fp16",)}
_SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Loaded:
    """A model that is ready for inference.

    Attributes:
        runner (ModelRunner): on this rank.
        tokenizer (Optional[Tokenizer]): None: the checkpoint has none, ids only.
        chat_template (Optional[str]): jinja template of conversations.
        eos_ids (tuple[int]): tokens that end a text.
        config (AllConfig): the configuration.
    """

    runner: ModelRunner
    tokenizer: object
    chat_template: str | None
    eos_ids: tuple
    config: object


def load(
    checkpoint,
    *,
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    expert_model_parallel_size=1,
    expert_tensor_parallel_size=None,
    dtype=None,
    max_sequence_length=None,
    slots=8,
    prefill_chunk=DEFAULT_PREFILL_CHUNK,
    iteration=None,
    adapter=None,
    flags=(),
):
    """Load a checkpoint for inference. All ranks call it together; it starts device and communication if nothing did.

    Args:
        checkpoint (str): folder of a run or of one checkpoint, native or Megatron's, or a Hugging Face folder.
        tensor_model_parallel_size, pipeline_model_parallel_size (int): their product is the number of ranks, unless experts
            need more: `layout.ranks.world_unit`.
        expert_model_parallel_size (int): ranks that share the experts of a layer; each does the rest of the model as well.
        expert_tensor_parallel_size (Optional[int]): ranks that share an expert; None: tensor_model_parallel_size.
        dtype (Optional[str]): of parameters, computation and cache: float32, bfloat16, float16; None: the checkpoint's.
        max_sequence_length (Optional[int]): longest sequence; None: what the model was trained for, at most 8192.
        slots (int): sequences in the cache at a time.
        prefill_chunk (int): tokens of a sequence that enter in one forward.
        iteration (Optional[int]): of a run's checkpoints; None: the newest.
        adapter (Optional[str]): adapters on top of the checkpoint: folder of a run with adapters, or of PEFT. These, or those
            of the checkpoint, are merged into the weights.
        flags (sequence[str]): further flags of the configuration, such as --num-layers-per-virtual-pipeline-stage N.

    Returns:
        Loaded

    Raises:
        CheckpointError: no checkpoint, or one that does not fit.
        ValueError: any other argument that cannot be used (ConfigError: of the layout); before anything is built.
    """
    place, manifest = find_checkpoint(checkpoint, iteration)
    place, manifest, adapters = with_adapters(place, manifest, adapter)
    numbers = {
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "pipeline_model_parallel_size": pipeline_model_parallel_size,
        "expert_model_parallel_size": expert_model_parallel_size,
        **({} if expert_tensor_parallel_size is None else {"expert_tensor_parallel_size": expert_tensor_parallel_size}),
        "slots": slots,
        "prefill_chunk": prefill_chunk,
        **({} if max_sequence_length is None else {"max_sequence_length": max_sequence_length}),
    }
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}: expected an integer > 0.")
    saved = manifest.args["model_config"]
    length = context_length(max_sequence_length, saved)
    words = ["--tensor-model-parallel-size", tensor_model_parallel_size]
    words += ["--pipeline-model-parallel-size", pipeline_model_parallel_size]
    if expert_model_parallel_size > 1 or expert_tensor_parallel_size is not None:
        words += ["--expert-model-parallel-size", expert_model_parallel_size]
        words += ["--expert-tensor-parallel-size", expert_tensor_parallel_size or tensor_model_parallel_size]
    # training cuts the sequence where experts meet tensor parallelism, inference does not: it is switched off behind the checks
    cuts_sequence = tensor_model_parallel_size > 1 and (manifest.args.get("moe_config") or {}).get("num_experts", 1) > 1
    known_length = -(-length // tensor_model_parallel_size) * tensor_model_parallel_size if cuts_sequence else length
    words += ["--sequence-parallel"] if cuts_sequence else []
    words += ["--use-checkpoint-args", "--load", place, "--seq-length", known_length, "--micro-batch-size", 1, "--finetune"]
    words += [*_dtype_flags(dtype, saved), "--train-iters", 1, "--lr", 1, *flags, "--use-lora", "False"]
    config = _configuration([str(word) for word in words])
    config.parallel_config.fill(sequence_parallel=False)
    tokenizer = find_tokenizer(checkpoint, place, manifest)
    _check_world(config.parallel_config)
    set_parallel_context(config.parallel_config)
    set_seed(1)  # a model cannot be built without; nothing is drawn
    chunks = build_chunks(config, allocate_parameters)
    vocab_size = manifest.vocab_size or config.model_config.vocab_size
    opened = open_checkpoint(place, config, iteration) if adapters is None else MergedReader(place, manifest, adapters)
    with opened as reader:
        reader.manifest = without_critic(reader.manifest)
        load_tensors(reader, list(model_tensors(chunks)), vocab_size=config.model_config.vocab_size)
    runner = ModelRunner(chunks, describe_model(config), vocab_size, length, slots, prefill_chunk=prefill_chunk)
    if comm.get_rank() == 0:
        logger.info(
            "loaded %s: %d slots of %d tokens, cache of %.1f MB per rank", place, slots, length, runner.cache.bytes / 1e6
        )
    template = getattr(tokenizer, "chat_template", None)
    return Loaded(runner, tokenizer, template, end_ids(checkpoint, place, manifest, tokenizer), config)


def _dtype_flags(dtype, saved):
    name = _SHORT_DTYPES.get(dtype, dtype) or saved.get("compute_dtype") or saved.get("params_dtype") or "float32"
    if name not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(_DTYPES)} (or fp32, bf16, fp16).")
    return _DTYPES[name]


def _configuration(words):
    """AllConfig of flags. ConfigError: the first problem alone, since the others often follow from it."""
    try:
        config = init_configs_from_args(argument_parser().parse_args(words))
        require_available(config)
    except ConfigError as error:
        raise ConfigError(error.problems[0]) from None
    return config


def _check_world(parallel):
    ranks = comm.get_world_size() if comm.is_initialized() else launch_environment().world_size
    sizes = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    needed = world_unit_of(describe_parallel(parallel))
    if needed != ranks:
        experts = parallel.expert_model_parallel_size
        raise ValueError(
            f"{ranks} ranks were started, but tensor_model_parallel_size {sizes[0]} x pipeline_model_parallel_size {sizes[1]} "
            + (f"with expert_model_parallel_size {experts} " if experts > 1 else "")
            + f"is {needed}: start that many."
        )


def build_chunks(config, initialize=initialize_parameters):
    """This rank's GPTModel chunks of an AllConfig (list[Cell]), filled by `initialize`."""

    def provider(pre_process=True, post_process=True):
        return GPTModel(config.model_config, pre_process=pre_process, post_process=post_process)

    return get_model(provider, config, wrap=lambda description, ddp_config, cell, **_: cell, initialize=initialize)
