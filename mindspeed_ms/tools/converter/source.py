"""Source of a conversion: which kind of checkpoint a folder holds, opened as a CheckpointReader with its configuration."""

import os
from dataclasses import dataclass

from mindspeed_ms.config import ConfigError, init_configs_from_yaml
from mindspeed_ms.core.dist_checkpointing import folders
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.foreign import foreign_format, foreign_formats, is_foreign_folder, what_was_found
from mindspeed_ms.core.dist_checkpointing.manifest import OPTIMIZER_PREFIX
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.core.logging import logger
from mindspeed_ms.models.adapter_files import merged_reader
from mindspeed_ms.models.families.configuration import config_of_model, model_sections
from mindspeed_ms.models.hugging_face import folder as hugging_face
from mindspeed_ms.models.reward_head import without_critic
from mindspeed_ms.tools.checkpoint.source import open_checkpoint
from mindspeed_ms.tools.converter.errors import ConversionError
from mindspeed_ms.tools.converter.noop_layers import without_places
from mindspeed_ms.tools.converter.sides import MEGATRON, NATIVE

_KEPT_IN_FLOAT32 = ".router.expert_bias"
"""End of the keys of biases that models in half precision have in float32."""
TITLES = {NATIVE: "native", **{name: one.title for name, one in foreign_formats().items()}}


@dataclass
class Source:
    """Opened source.

    Attributes:
        kind (str): NATIVE, or name of the foreign format (`core.dist_checkpointing.foreign`).
        reader (CheckpointReader): of the checkpoint.
        config (AllConfig): the model in one part.
        model_folder (Optional[str]): Hugging Face files of the model: config.json, tokenizer.
    """

    kind: str
    reader: CheckpointReader
    config: object
    model_folder: str | None

    @property
    def family_name(self):
        """`model_type` of its config.json; None without one."""
        if self.model_folder is None:
            return None
        return hugging_face.read_json(os.path.join(self.model_folder, hugging_face.CONFIG_FILE)).get("model_type")


def open_source(conversion):
    """Open the source of a Conversion.

    Raises:
        CheckpointError: none there, or it is damaged.
        ConversionError: it is of another kind or model than the flags say.
    """
    path = conversion.load_dir
    if not os.path.exists(path):
        raise ConversionError(f"--load-dir {path} does not exist.")
    if not os.path.isdir(path):
        raise ConversionError(f"--load-dir {path} is a file: expected a folder, or a file that ends with .gguf.")
    if not (is_foreign_folder(path) or folders.is_checkpoint_folder(path) or folders.has_checkpoints(path)):
        names = sorted(name for name in os.listdir(path) if name.endswith(".gguf"))
        hint = f" A GGUF file is named itself: --load-dir {os.path.join(path, names[0])}." if names else ""
        raise ConversionError(f"--load-dir {what_was_found(path)}{hint}")
    reader = open_checkpoint(path, conversion.iteration, conversion.config)
    try:
        merged = merged_reader(reader.folder, reader.manifest, conversion.adapter, conversion.adapter_sign)
        if merged is not None:
            reader.close()
            reader, path = merged, merged.folder
        policy = without_critic(reader.manifest)
        if policy is not reader.manifest:
            logger.warning("%s: the critic's head, and the optimizer's state, are left out", reader.folder)
            reader.manifest = policy
        source = _source(conversion, path, reader)
        _check_expected(conversion, source)
        check_one_dtype(conversion, reader)
    except BaseException:
        reader.close()
        raise
    return source


def _source(conversion, path, reader):
    kind, family = kind_of(reader), getattr(reader.manifest, "family", None)
    if (conversion.source, kind) == (MEGATRON, NATIVE):
        logger.info("%s is a native checkpoint, which trainings save in place of Megatron's: it is read as such", path)
    elif conversion.source not in (None, kind):
        raise ConversionError(
            f"--load-model-type: {path} is a {TITLES[kind]} checkpoint, not {described(conversion.source)}: leave the flag "
            "out, or give another folder."
        )
    if family is not None:
        return Source(kind, reader, config_of_model(reader.manifest.args, path), path)
    values = reader.manifest.args
    if conversion.config is not None:
        try:
            values = init_configs_from_yaml(conversion.config).to_dict()
        except (ConfigError, FileNotFoundError) as error:
            raise ConversionError(f"--config {conversion.config}: {' '.join(str(error).split())}") from error
    if not values.get("model_config"):
        raise ConversionError(
            f"{path} ({TITLES[kind]}) has no {hugging_face.CONFIG_FILE} and no other configuration of its model: copy that of "
            "the model there, or give --config model.yaml."
        )
    noops = (values.get("parallel_config") or {}).get("noop_layers")
    sections = without_places(model_sections(values), noops, path)
    return Source(kind, reader, config_of_model(sections, path), hugging_face.model_folder_of(reader.folder))


def kind_of(reader):
    """Kind of an opened checkpoint: NATIVE, or the name of its foreign format."""
    found = foreign_format(reader.folder)
    return NATIVE if found is None else found.name


def described(kind):
    """A kind with what its folders hold."""
    one = foreign_formats().get(kind)
    return f"a {TITLES.get(kind)} one" + (f" ({one.holds})" if one is not None else "")


def _check_expected(conversion, source):
    """Compare what the user says about the checkpoint with it."""
    found = source.reader.manifest.iteration
    if conversion.iteration not in (None, found):
        raise ConversionError(f"--iteration {conversion.iteration}: {source.reader.folder} is of iteration {found}.")
    layout = source.reader.manifest.args.get("parallel_config") or {}
    for flag, (name, expected) in conversion.source_layout.items():
        size = layout.get(name) or 1
        if expected != size:
            found = f"has {name} {size}" if layout else f"({TITLES[source.kind]}) is not cut over ranks"
            raise ConversionError(
                f"{flag} {expected} does not fit: {source.reader.folder} {found}. Leave the flag out, or mend it."
            )
    values = source.config.to_dict()
    for flag, (path, expected) in conversion.expected.items():
        section, name = path.split(".")
        found = values[section][name]
        if name == "num_layers" and expected == found + len(conversion.parallel.get("noop_layers") or ()):
            continue  # counted with the places without weights, as in MindSpeed-LLM
        if expected == 0 and found is None:
            continue
        if name.endswith("_has_bias"):
            found = found or values[section]["add_bias_linear"]
        if found != expected:
            raise ConversionError(
                f"{flag} {'' if expected is True else f'{expected} '}does not fit: the model has {path} {found}."
            )


def check_one_dtype(conversion, reader):
    """Raise CheckpointError if weights have several dtypes, unless they are all converted to one."""
    first = None
    for key, stored in reader.manifest.tensors.items():
        if key.startswith(OPTIMIZER_PREFIX) or key.endswith(_KEPT_IN_FLOAT32) or conversion.params_dtype is not None:
            continue
        first = first or (key, stored)
        if stored.dtype != first[1].dtype:
            (name, file), (other, other_file) = (_place(reader, *one) for one in ((key, stored), first))
            raise CheckpointError(
                f"{file}: tensor {name} is {stored.dtype}, but {other} of {os.path.basename(other_file)} is "
                f"{first[1].dtype}: give --params-dtype to convert all weights to one."
            )


def _place(reader, key, stored):
    """(name in its file, path of the file) of a stored tensor."""
    sources = getattr(reader.manifest, "sources", {})
    name = next((name for name, (part, _) in sources.items() if part.key == key), key)
    return name, os.path.join(reader.folder, stored.pieces[0].file)
