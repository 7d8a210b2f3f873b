"""Model folder of a run: config.json and tokenizer of the model that it starts from, kept for the way back to Hugging Face."""

import os
import shutil

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.new_folder import new_folder
from mindspeed_ms.core.logging import logger
from mindspeed_ms.models.hugging_face.folder import CONFIG_FILE, GENERATION_FILE, MODEL_FOLDER, model_folder_of, side_files

_TOKENIZER = ("tokenizer_name_or_path", "tokenizer_model", "vocab_file", "merge_file")


def keep(start, all_config):
    """Copy the small files of the model that a run starts from into its output folder; one rank calls it before the first save.

    A run that goes on keeps those that are there. Files of another tokenizer than the run's are left out: its own are taken.
    A failure is a warning, since the training itself needs none of them.

    Args:
        start (StartingPoint): of the run.
        all_config (AllConfig): read: output_dir, tokenizer.
    """
    place = os.path.join(os.path.abspath(all_config.training_config.output_dir), MODEL_FOLDER)
    source = model_folder_of(start.path, needs_config=False) if start.path else None
    if start.resumes and os.path.isdir(place):
        return
    if source is None:
        if os.path.isdir(place) and not start.resumes:
            logger.warning(
                "%s stays, and a conversion to Hugging Face takes its config.json and tokenizer: delete it if they are of "
                "another model",
                place,
            )
        return
    if os.path.realpath(source) == os.path.realpath(place):
        return
    try:
        _copy(source, place, _tokenizer_files(start, all_config.dataset_config, source))
    except (OSError, CheckpointError) as error:
        logger.warning(
            "%s could not be copied to %s (%s): a conversion to Hugging Face needs --hf-cfg-dir", source, place, error
        )


def _tokenizer_files(start, settings, source):
    """Paths of the tokenizer of the run: the folder's, or those that the run was given; of a BPE of the text none."""
    given = [value for value in (getattr(settings, name) for name in _TOKENIZER) if value]
    name = ((start.fingerprint or {}).get("tokenizer") or {}).get("name", "")
    own = [os.path.join(source, one) for one in side_files(source) if one != GENERATION_FILE]
    folders = {os.path.realpath(path if os.path.isdir(path) else os.path.dirname(path)) for path in given}
    if not given:
        return [] if name.startswith("the BPE ") else own
    if folders == {os.path.realpath(source)}:
        return own
    found = []
    for path in given:
        names = side_files(path) if os.path.isdir(path) else ()
        found += [os.path.join(path, one) for one in names if one != GENERATION_FILE] if names else [path]
    return [path for path in found if os.path.isfile(path)]


def _copy(source, place, tokenizer):
    """Replace a folder by one with the files of a model and of a tokenizer."""
    models = [os.path.join(source, name) for name in (CONFIG_FILE, GENERATION_FILE)]
    copies = [path for path in models if os.path.isfile(path)] + tokenizer
    with new_folder(place) as folder:
        for path in copies:
            shutil.copyfile(path, os.path.join(folder, os.path.basename(path)))
        # the last moment, so that an error leaves what was there
        shutil.rmtree(place, ignore_errors=True)
