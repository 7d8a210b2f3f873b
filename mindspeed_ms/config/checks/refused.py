"""Rule about settings that are ignored or refused here: fields with `ignored=` or `refused=`."""

from mindspeed_ms.config.argument_table import rows_with_path
from mindspeed_ms.config.checks.rule import rule
from mindspeed_ms.config.row import IGNORED, REFUSED, WORKS


@rule
def ignored_and_refused_settings(context):
    """Notice if an ignored setting is set, refuse a refused one; both with the reason."""
    for row in rows_with_path():
        if row.status == WORKS or context.value(row.path) in (None, row.guide_default):
            continue
        if row.section == "model_config" and context.model is None:
            continue
        if row.status == IGNORED:
            context.notice(f"{context.name(row.path)}: ignored, {row.reason}")
        elif row.status == REFUSED:
            yield context.problem(row.path, f"is not available: {row.reason}")
