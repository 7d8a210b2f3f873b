"""Whether a checkpoint's configuration is that of this run, in what its tensors do not show.

Source of the idea: Megatron's `check_checkpoint_args`.
"""

from mindspeed_ms.config.same_model import differences
from mindspeed_ms.core import comm
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.logging import logger
from mindspeed_ms.training.gpt_datasets import names_indexed_files


def check_same_model(saved, all_config, must_be_equal):
    """Compare the settings of the model.

    Args:
        saved (dict): the configuration in the checkpoint; empty for files that carry none.
        all_config (AllConfig): this run's.
        must_be_equal (bool): a difference is an error, else a warning (weights may be taken over on purpose).

    Raises:
        CheckpointError: on all ranks, naming each setting with both values.
    """
    different = [
        f"{path} is {before!r} in the checkpoint, {now!r} here"
        for path, before, now in differences(saved, all_config.to_dict())
    ]
    if not different:
        return
    if must_be_equal:
        raise CheckpointError(
            f"the checkpoint is of another model: {'; '.join(different)}. Set them as they were, load its "
            "weights alone (--finetune), or set load_strict: False (--load-strict false)."
        )
    if comm.get_rank() == 0:
        logger.warning("the checkpoint is of another model: %s", "; ".join(different))


def tell_what_changed(manifest, all_config, vocab_size):
    """Log what a continued training does otherwise than the one that was saved: vocabulary, number of samples."""
    if comm.get_rank() != 0:
        return
    if None not in (manifest.vocab_size, vocab_size) and manifest.vocab_size != vocab_size:
        logger.warning("the vocabulary has %d ids, the checkpoint's had %d", vocab_size, manifest.vocab_size)
    saved = manifest.args.get("training_config") or {}, manifest.args.get("dataset_config") or {}
    own = all_config.training_config, all_config.dataset_config
    before, now = [
        tuple(_get(section, name) for section, name in zip(pair, ("training_iters", "train_samples"))) for pair in (saved, own)
    ]
    if saved[0] and before != now and names_indexed_files(all_config):
        logger.warning(
            "training_iters, train_samples were %s, now are %s: the order of Megatron's indexed samples depends on "
            "their number, so those after this point are not the ones that were to come",
            before,
            now,
        )


def _get(section, name):
    return section.get(name) if isinstance(section, dict) else getattr(section, name)
