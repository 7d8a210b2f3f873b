"""Source of a conversion: which kind of checkpoint a folder holds, opened as a CheckpointReader with its configuration."""

import os
from dataclasses import dataclass

from mindspeed_ms.config import ConfigError, init_configs_from_yaml
from mindspeed_ms.core.dist_checkpointing import folders
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.foreign import foreign_format
from mindspeed_ms.core.dist_checkpointing.manifest import OPTIMIZER_PREFIX
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.core.dist_checkpointing.upstream_format import is_upstream_folder
from mindspeed_ms.models.families.configuration import config_of_model, model_sections
from mindspeed_ms.models.hugging_face import folder as hugging_face
from mindspeed_ms.models.hugging_face.manifest import read_manifest
from mindspeed_ms.tools.checkpoint.source import open_checkpoint
from mindspeed_ms.tools.converter.errors import ConversionError
from mindspeed_ms.tools.converter.model_folder import MODEL_FOLDER
from mindspeed_ms.tools.converter.sides import HUGGING_FACE, MEGATRON, NATIVE, UPSTREAM

TITLES = {HUGGING_FACE: "Hugging Face", MEGATRON: "Megatron", NATIVE: "native", UPSTREAM: "upstream's"}


@dataclass
class Source:
    """Opened source.

    Attributes:
        kind (str): side, see `arguments`.
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
    kind = kind_of(path, conversion.iteration)
    if kind is None and conversion.source is not None:
        kind = conversion.source
    if kind is None:
        raise ConversionError(
            f"--load-dir {path} holds no checkpoint: expected a Hugging Face folder (config.json and weights), a folder "
            f"with {folders.TRACKER_FILE}, or one of its checkpoints."
        )
    if conversion.source not in (None, kind):
        raise ConversionError(
            f"--load-model-type: {path} is a {TITLES[kind]} checkpoint, not a {TITLES.get(conversion.source)} one: leave the "
            "flag out, or give another folder."
        )
    source = _open_hugging_face(conversion, path) if kind == HUGGING_FACE else _open(conversion, path, kind)
    try:
        _check_expected(conversion, source)
        check_one_dtype(conversion, source.reader)
    except BaseException:
        source.reader.close()
        raise
    return source


def kind_of(path, iteration=None):
    """Side of the checkpoint that a folder holds; None if it holds none."""
    if not os.path.isdir(path):
        return None
    found = foreign_format(path)
    if found is not None:
        return HUGGING_FACE if found.title == "Hugging Face" else MEGATRON
    if hugging_face.has_weights(path):
        return HUGGING_FACE
    if is_upstream_folder(path):
        return UPSTREAM
    if folders.is_checkpoint_folder(path):
        return NATIVE
    if not folders.has_checkpoints(path):
        return None
    one = folders.checkpoint_folder(path, iteration) if iteration is not None else (folders.candidates(path) or [path])[0]
    return MEGATRON if foreign_format(one) is not None else NATIVE


def _open_hugging_face(conversion, path):
    manifest = read_manifest(path)
    return Source(HUGGING_FACE, CheckpointReader(path, manifest), config_of_model(manifest.args, path), path)


def _open(conversion, path, kind):
    reader = open_checkpoint(path, conversion.iteration, conversion.config)
    values = reader.manifest.args
    if conversion.config is not None:
        try:
            values = init_configs_from_yaml(conversion.config).to_dict()
        except (ConfigError, FileNotFoundError) as error:
            raise ConversionError(f"--config {conversion.config}: {' '.join(str(error).split())}") from error
    if not values.get("model_config"):
        raise ConversionError(f"{path} holds no configuration of its model: give it with --config model.yaml.")
    places = (reader.folder, os.path.dirname(reader.folder))
    found = [place for place in (os.path.join(one, MODEL_FOLDER) for one in places) if os.path.isdir(place)]
    config = config_of_model(model_sections(values), path)
    return Source(kind, reader, config, found[0] if found else None)


def _check_expected(conversion, source):
    """Compare what the user says about the model with its configuration."""
    values = source.config.to_dict()
    for flag, (path, expected) in conversion.expected.items():
        section, name = path.split(".")
        found = values[section][name]
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
        if key.startswith(OPTIMIZER_PREFIX) or conversion.params_dtype is not None:
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
