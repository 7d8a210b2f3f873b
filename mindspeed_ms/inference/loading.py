"""Loading for inference: from a folder with a checkpoint to a ModelRunner, its tokenizer and what ends a text."""

from dataclasses import dataclass

from mindspeed_ms.config.model_description import describe_parallel
from mindspeed_ms.core import comm
from mindspeed_ms.core.dist_checkpointing.load import load_tensors, open_checkpoint
from mindspeed_ms.core.dist_checkpointing.state import model_tensors
from mindspeed_ms.core.launch_environment import launch_environment
from mindspeed_ms.core.logging import logger
from mindspeed_ms.core.tensor_parallel.cell import allocate_parameters, initialize_parameters
from mindspeed_ms.inference.checkpoint import DEFAULT_PREFILL_CHUNK, read_checkpoint, require_positive, stored_vocabulary
from mindspeed_ms.inference.configuration import LoadError
from mindspeed_ms.inference.model_runner import ModelRunner
from mindspeed_ms.layout.ranks import world_unit_of
from mindspeed_ms.legacy.model.gpt_model import GPTModel
from mindspeed_ms.models.adapters import MergedReader
from mindspeed_ms.models.reward_head import without_critic
from mindspeed_ms.training.model_setup import get_model
from mindspeed_ms.training.utils import set_parallel_context, set_seed


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


def load(checkpoint, *, slots=8, prefill_chunk=DEFAULT_PREFILL_CHUNK, **arguments):
    """Load a checkpoint for inference. All ranks call it together; it starts device and communication if nothing did.

    Args:
        checkpoint (str): folder of a run or of one checkpoint, native or Megatron's, or a Hugging Face folder.
        slots (int): sequences in the cache at a time.
        prefill_chunk (int): tokens of a sequence that enter in one forward.
        arguments: layout, dtype, length and the rest, as of `inference.checkpoint.read_checkpoint`.

    Returns:
        Loaded

    Raises:
        CheckpointError: no checkpoint, or one that does not fit.
        ValueError: any other argument that cannot be used (ConfigError: of the layout); before anything is built.
    """
    return load_checkpoint(read_checkpoint(checkpoint, **arguments), slots, prefill_chunk)


def load_checkpoint(checkpoint, slots=8, prefill_chunk=DEFAULT_PREFILL_CHUNK):
    """Load a Checkpoint (`inference.checkpoint`); ranks, arguments, result and errors as of `load`."""
    require_positive("slots", slots)
    require_positive("prefill_chunk", prefill_chunk)
    checkpoint.check_memory(slots, prefill_chunk)
    config, place, length = checkpoint.config, checkpoint.place, checkpoint.max_sequence_length
    _check_world(config.parallel_config)
    set_parallel_context(config.parallel_config)
    if comm.get_rank() == 0:
        for warning in checkpoint.warnings:
            logger.warning("%s", warning)
    set_seed(1)  # a model cannot be built without; nothing is drawn
    chunks = build_chunks(config, allocate_parameters)
    if checkpoint.adapters is None:
        opened = open_checkpoint(place, config, checkpoint.iteration)
    else:
        opened = MergedReader(place, checkpoint.manifest, checkpoint.adapters)
    with opened as reader:
        reader.manifest = without_critic(reader.manifest)
        reader.manifest.tensors = {key: one for key, one in reader.manifest.tensors.items() if not key.startswith("mtp.")}
        load_tensors(reader, list(model_tensors(chunks)), vocab_size=stored_vocabulary(config, reader.manifest))
    runner = ModelRunner(chunks, checkpoint.model, checkpoint.vocab_size, length, slots, prefill_chunk=prefill_chunk)
    if comm.get_rank() == 0:
        logger.info(
            "loaded %s%s: %d slots of %d tokens, cache of %.1f MB per rank",
            place,
            " without its layers of multi-token prediction" if checkpoint.has_further_predictions else "",
            slots,
            length,
            runner.cache.bytes / 1e6,
        )
    template = getattr(checkpoint.tokenizer, "chat_template", None)
    return Loaded(runner, checkpoint.tokenizer, template, checkpoint.eos_ids, config)


def _check_world(parallel):
    ranks = comm.get_world_size() if comm.is_initialized() else launch_environment().world_size
    sizes = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    needed = world_unit_of(describe_parallel(parallel))
    if needed != ranks:
        experts = parallel.expert_model_parallel_size
        raise LoadError(
            f"{ranks} ranks were started, but tensor_model_parallel_size {sizes[0]} x pipeline_model_parallel_size {sizes[1]} "
            + (f"with expert_model_parallel_size {experts} " if experts > 1 else "")
            + f"is {needed}: start that many."
        )


def build_chunks(config, initialize=initialize_parameters):
    """This rank's GPTModel chunks of an AllConfig (list[Cell]), filled by `initialize`."""

    def provider(pre_process=True, post_process=True):
        return GPTModel(config.model_config, pre_process=pre_process, post_process=post_process)

    return get_model(provider, config, wrap=lambda description, ddp_config, cell, **_: cell, initialize=initialize)
