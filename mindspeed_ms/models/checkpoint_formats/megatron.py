"""Checkpoints that Megatron-LM wrote, formats torch and torch_dist, see `core.dist_checkpointing.megatron`."""

from mindspeed_ms.core.dist_checkpointing.foreign import ForeignFormat, register_format
from mindspeed_ms.core.dist_checkpointing.megatron import files
from mindspeed_ms.core.dist_checkpointing.megatron.manifest import read_megatron_manifest


def _read(path, iteration, config):
    del config  # its args say it
    return read_megatron_manifest(path, iteration)


MEGATRON = register_format(
    ForeignFormat(
        name="mg",
        title="Megatron",
        holds=f"mp_rank_*/{files.MODEL_FILE}, or {files.METADATA_FILE}, {files.COMMON_FILE} and *.distcp",
        is_folder=files.is_megatron_folder,
        read_manifest=_read,
        keeps_tokenizer=True,
    )
)
