"""Files that upstream (mindspeed_ms r0.1.0) or its converter wrote, see `core.dist_checkpointing.upstream_format`."""

from mindspeed_ms.core.dist_checkpointing.foreign import ForeignFormat, register_format
from mindspeed_ms.core.dist_checkpointing.upstream_format import is_upstream_folder, read_upstream_manifest


def _read(path, iteration, config):
    return read_upstream_manifest(path, config, iteration)


UPSTREAM = register_format(
    ForeignFormat(
        name="ckpt",
        title="upstream's",
        holds="rank_*/NAME.ckpt or NAME.safetensors",
        is_folder=is_upstream_folder,
        read_manifest=_read,
        needs_config=True,
    )
)
