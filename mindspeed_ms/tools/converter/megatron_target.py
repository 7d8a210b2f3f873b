"""Target of a conversion: a Megatron checkpoint of the format `torch` or `torch_dist`."""

from mindspeed_ms.core.dist_checkpointing.manifest import OPTIMIZER_PREFIX
from mindspeed_ms.core.dist_checkpointing.megatron import names
from mindspeed_ms.core.dist_checkpointing.megatron.torch_dist_writer import TorchDistTarget
from mindspeed_ms.core.dist_checkpointing.megatron.writer import MegatronTarget
from mindspeed_ms.tools.checkpoint.rewrite import progress_bar
from mindspeed_ms.tools.converter.errors import ConversionError
from mindspeed_ms.tools.converter.model_folder import write_model_folder
from mindspeed_ms.tools.converter.sides import MEGATRON


class MegatronFolder:
    """A Megatron checkpoint; see `target.NativeTarget`."""

    kind = MEGATRON

    def __init__(self, conversion, source, reader, config):
        self.conversion, self.source = conversion, source
        style = names.LEGACY if conversion.legacy_names else None
        style = names.TRANSFORMER_ENGINE if conversion.experts == names.ENGINE_GROUPED else style
        if conversion.verify and conversion.ckpt_format == TorchDistTarget.ckpt_format and config.moe_config.moe_grouped_gemm:
            raise ConversionError(
                "--verify: --ckpt-format torch_dist stores experts one by one, which cannot be compared with a tensor of all "
                "(--moe-grouped-gemm). Leave --verify out."
            )
        kind = TorchDistTarget if conversion.ckpt_format == TorchDistTarget.ckpt_format else MegatronTarget
        self.target = kind(reader, config, style, with_optimizer=conversion.with_optimizer, experts=conversion.experts)
        self.nbytes = self.target.nbytes()

    def places(self):
        """Where each of our tensors goes: {key: text}."""
        found = {}
        for name, parameters in self.target.written:
            for one in parameters:
                found.setdefault(one.key, []).append(f"{one.core} in {name}")
        places = {key: "; ".join(dict.fromkeys(texts)) for key, texts in found.items()}
        for key in self.target.reader.manifest.tensors:
            if key.startswith(OPTIMIZER_PREFIX):
                weight = key.removeprefix(OPTIMIZER_PREFIX).partition(".")[2]
                places[key] = f"optimizer state of {places[weight]}"
        return places

    def elements(self):
        """Elements of the weights that are written, padding included, copies once."""
        parts = {(one.key, one.sharding) for _, _, parameters in self.target.ranks for one in parameters}
        return sum(sharding.numel for _, sharding in parts)

    def write(self, folder):
        """Write into a folder."""
        with progress_bar(self.nbytes) as bar:
            self.target.write(folder, bar.update, self.conversion.workers)
        write_model_folder(self.conversion, self.source, folder)
