"""Form of experts that a conversion writes: SequentialMLP, GroupedMLP or Transformer Engine's (`--experts`)."""

from dataclasses import replace

from mindspeed_ms.core.dist_checkpointing.megatron import kept, names
from mindspeed_ms.core.dist_checkpointing.regrouped_reader import RegroupedReader
from mindspeed_ms.models.families.configuration import config_of_model, model_sections
from mindspeed_ms.tools.converter.errors import ConversionError
from mindspeed_ms.tools.converter.sides import HUGGING_FACE, MEGATRON


def regrouped(conversion, source):
    """The Source with its experts as the target has them: as `--experts` says, else as they are.

    Raises:
        ConversionError: there are none.
        CheckpointError: an expert is missing, or they have biases, which GroupedMLP does not have.
    """
    if source.config.moe_config.num_experts == 1:
        if conversion.experts is not None:
            raise ConversionError(f"--experts (--moe-grouped-gemm): {conversion.load_dir} has no experts. Leave it out.")
        return source
    before = names.GROUPED if source.config.moe_config.moe_grouped_gemm else names.SEQUENTIAL
    wanted = conversion.experts or before
    if conversion.experts is None and conversion.target == MEGATRON:  # a folder of `torch_dist` says it in its args
        wanted = source.reader.manifest.foreign.get(kept.NAME, {}).get("experts") or before
    if conversion.target == HUGGING_FACE or conversion.legacy_names:
        wanted = names.SEQUENTIAL
    grouped = wanted == names.GROUPED
    if grouped == (before == names.GROUPED):
        return source
    reader = RegroupedReader(source.reader, grouped)
    sections = model_sections(source.config.to_dict())
    sections["moe_config"]["moe_grouped_gemm"] = grouped
    return replace(source, reader=reader, config=config_of_model(sections, conversion.load_dir))
