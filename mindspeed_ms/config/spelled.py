"""Name of a setting in messages, as the user wrote it."""

from mindspeed_ms.config.argument_table import row_at


def spelled(all_config, path):
    """Name of the setting at `path`: the key or flag with which the user set it, else its field and flag."""
    setting = all_config.settings.by_path.get(path) if all_config.settings is not None else None
    if setting is not None:
        return setting.key
    row, name = row_at(path), path.rpartition(".")[2]
    return f"{name} ({row.flags[0]})" if row is not None and row.flags else name
