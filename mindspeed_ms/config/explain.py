"""`explain KEY`: the text about one option, found by path, name, flag or key of the trio."""

from mindspeed_ms.config.argument_table import TABLE, row_at, row_of_flag, row_of_name
from mindspeed_ms.config.errors import ConfigError, Problem
from mindspeed_ms.config.row import IGNORED, WORKS
from mindspeed_ms.config.sections.field import option_of
from mindspeed_ms.config.trio_table import SECTION_KEYS, SPELLINGS, TRIO
from mindspeed_ms.spelling import did_you_mean


def find_rows(key):
    """Rows for a config path, a field name, a Namespace name or a flag; [] if there is none."""
    row = row_of_flag(key.split("=")[0]) or row_at(key) or row_of_name(key.lstrip("-").replace("-", "_"))
    if row is not None:
        return [row]
    return [entry for entry in TABLE if entry.path and entry.path.rpartition(".")[2] == key]


def find_trio_keys(key):
    """Keys of the trio that are, or end in, `key`."""
    key = SPELLINGS.get(key, key).replace("residual-connection", "residual_connection")
    return [name for name in TRIO if name == key or name.endswith("." + key)]


def explain(key):
    """Text about one option.

    Args:
        key (str): `model_config.hidden_size`, `hidden_size`, `--hidden-size` or `accelerate_config...`.

    Raises:
        ConfigError: if nothing has that name.
    """
    rows, trio = find_rows(key), find_trio_keys(key)
    if not rows and not trio:
        known = [*(name for row in TABLE for name in (*row.all_names, row.path)), *TRIO, *SECTION_KEYS]
        raise ConfigError(Problem(key, f"is no option.{did_you_mean(key, known)}"))
    parts = [_row_text(row) for row in rows]
    parts += [_trio_text(name) for name in trio]
    return "\n\n".join(parts)


def _row_text(row):
    lines = [row.path or row.name, f"  {row.help_en}"]
    if row.help_zh and row.help_zh != row.help_en:
        lines.append(f"  {row.help_zh}")
    if row.path and row.path != row.name:
        lines.append(f"  Megatron: {row.name}")
    flags = ", ".join((*row.flags, *row.off_flags))
    lines.append(f"  flags: {flags or 'none'}")
    lines.append(f"  takes: {row.expects}")
    lines.append(
        f"  default: {default_text(row.guide_default)} in yaml; {default_text(row.megatron_default)} from Megatron arguments"
    )
    if row.info is not None and option_of(row.info).derived:
        lines.append(f"  unset: {option_of(row.info).derived}")
    trio = [name for name, entry in TRIO.items() if row.path and entry.path == row.path]
    if trio:
        lines.append(f"  in the trio: {', '.join(trio)}")
    lines.append(f"  changes: {row.seen}")
    lines.append(f"  status: {status_text(row)}")
    return "\n".join(lines)


def status_text(row):
    """Status of an option: "works", or the reason why not."""
    later = option_of(row.info).later if row.info is not None else ""
    if later:
        return f"checked, but {later} is not available yet"
    if row.status == WORKS:
        return f"works ({row.reason})" if row.reason else "works"
    return f"{'ignored' if row.status == IGNORED else 'not available'}: {row.reason}"


def default_text(value):
    """A default in words."""
    if value is ...:
        return "none, must be given"
    return "unset" if value is None else repr(value)


def _trio_text(name):
    entry = TRIO[name]
    lines = [name, f"  sets: {entry.path or 'several settings'}"]
    if entry.note:
        lines.append(f"  read as: {entry.note}")
    if entry.path:
        row = row_at(entry.path)
        lines += [f"  {row.help_en}", f"  takes: {row.expects}"]
    return "\n".join(lines)
