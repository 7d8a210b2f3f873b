"""Same-data check: fingerprint of tokenizer and data, kept in each checkpoint and compared where a run starts from one.

    {"tokenizer": {"name": ..., "vocab_size": 1024, "hash": ...},
     "data": {"kind": "indexed", "seq_length": 128, "split": [0.969, 0.03, 0.001], "parts": [
         {"of": "data_path", "weight": 0.3, "path": ..., "documents": 40, "tokens": 9000, "hash": ...}]}}

`data` is None where the run's own program brings it, `tokenizer` where none is named. Nothing here imports MindSpore.
"""

import os

from mindspeed_ms.config import spelled
from mindspeed_ms.core.datasets import fingerprint as fingerprints
from mindspeed_ms.core.datasets.splits import normalize, parse_and_normalize_split
from mindspeed_ms.core.datasets.tokenizer import TokenizerSettings, build_tokenizer
from mindspeed_ms.core.dist_checkpointing import folders
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.foreign import foreign_format, is_foreign_folder, read_manifest
from mindspeed_ms.core.dist_checkpointing.manifest import MANIFEST_FILE, Manifest
from mindspeed_ms.core.logging import logger

_D = "dataset_config"
_BPE = "the BPE "  # name of a tokenizer that was trained on the text
_SHOWN = 3  # parts of a blend


def fingerprint(all_config, kind, parts, split, tokenizer=None):
    """Fingerprint of a run's tokenizer and data (dict of plain values).

    Args:
        all_config (AllConfig): read: tokenizer, seq_length.
        kind (str): "indexed", "conversations", "text", "mock".
        parts (list[dict]): fingerprints of the data, in order, each with `of`, the setting that names it.
        split (Optional[str]): shares of training, validation and test.
        tokenizer (Optional[Tokenizer]): None: the one that the configuration names, if any.

    Raises:
        TokenizerError: the named tokenizer cannot be read.
    """
    data = {
        "kind": kind,
        "seq_length": all_config.model_config.seq_length,
        "split": [round(share, 12) for share in parse_and_normalize_split(split)] if split else None,
        "parts": parts,
    }
    return {"tokenizer": of_tokenizer(all_config, tokenizer), "data": data}


def of_tokenizer(all_config, tokenizer=None):
    """Fingerprint of a tokenizer, by default of the configuration's; None if none is named.

    Raises:
        TokenizerError: it cannot be read.
    """
    settings = all_config.dataset_config
    if tokenizer is None and TokenizerSettings.from_config(settings).is_given:
        tokenizer = build_tokenizer(settings)
    return None if tokenizer is None else fingerprints.of_tokenizer(tokenizer)


def with_shares(of, fingerprints_of_files, weights):
    """Parts of a blend for `fingerprint`: each with the setting that names it and its share of the samples (None: all)."""
    shares = [None] * len(fingerprints_of_files) if weights is None else [round(share, 12) for share in normalize(weights)]
    return [{"of": of, "weight": share, **part} for share, part in zip(shares, fingerprints_of_files)]


def check_before_start(all_config, own):
    """Compare with the checkpoint that a run would start from, if there is one, before any rank starts.

    Args:
        all_config (AllConfig): of the run.
        own (dict): its `fingerprint`.

    Raises:
        CheckpointError: as `check`; or the checkpoint is missing or damaged.
    """
    settings = all_config.training_config
    wanted = settings.resume_training and not settings.finetune
    places = settings.load_checkpoint, settings.output_dir, settings.pretrained_checkpoint
    folder, resumes = folders.checkpoint_to_start_from(*places, wanted)
    if folder is None or not os.path.isdir(folder):
        return  # a missing one is reported where it is loaded
    folders.restore_replaced(folder)
    place, manifest = folders.newest_manifest(folder, settings.ckpt_step, all_config)
    check(place, manifest, own, all_config, resumes)


def check_at_start(path, own, all_config, resumes):
    """`check` with the checkpoint in the folder `path`, whose padding and missing fingerprint are named in warnings.

    Returns:
        dict: fingerprint for the checkpoints of this run: a tokenizer that it does not name stays the one of `path`.
    """
    if not os.path.isfile(os.path.join(path, MANIFEST_FILE)):
        return own  # files of another program
    manifest = Manifest.read(path)
    check(path, manifest, own, all_config, resumes)
    _warn_of_padding(path, manifest, all_config)
    if manifest.fingerprint is None:
        logger.warning(
            "%s was written by a version that kept no fingerprint of tokenizer and data: make sure that they are the same; "
            "the checkpoints of this run keep it",
            path,
        )
        return own
    own = own or {"tokenizer": None, "data": None}
    if resumes and all_config.training_config.new_dataset:
        logger.info("new_dataset (--new-dataset): the data of this run is read from its beginning, sample 0")
    return {**own, "tokenizer": own["tokenizer"] or manifest.fingerprint["tokenizer"]}


def check(path, manifest, own, all_config, resumes):
    """Compare tokenizer and, where the training goes on (`resumes`), data with those of a checkpoint.

    Args:
        path (str): folder of the checkpoint.
        manifest (Manifest): its manifest.
        own (Optional[dict]): `fingerprint` of this run.

    Raises:
        CheckpointError: another tokenizer, unless load_strict is off; other data, unless new_dataset is set.
    """
    saved = manifest.fingerprint
    if saved is None or own is None:
        return
    before, now = saved["tokenizer"], own["tokenizer"]
    if before and now and before["hash"] != now["hash"]:
        text = (
            f"{path} was trained with another tokenizer: it has {_tokenizer(before)}, "
            f"{_tokenizer_setting(all_config, own)} names {_tokenizer(now)}"
        )
        if saved["data"] and own["data"]:  # a BPE of the text depends on the split
            splits = [change for change in differences(saved["data"], own["data"]) if change[0] == "split"]
            text += "".join(f"; {_data_setting(all_config, 'split')} was {one}, is {other}" for _, one, other in splits)
        if all_config.training_config.load_strict:
            raise CheckpointError(f"{text}. {_advice(before, own)}")
        logger.warning("%s (load_strict is off)", text)
    if now and not before and now["name"].startswith(_BPE):
        logger.warning("%s names no tokenizer: make sure that its ids are those of %s", path, now["name"])
    if not resumes or all_config.training_config.new_dataset or not saved["data"] or not own["data"]:
        return
    different = differences(saved["data"], own["data"])
    if different:
        shown = "; ".join(f"{_data_setting(all_config, name)} was {one}, is {other}" for name, one, other in different)
        raise CheckpointError(
            f"{path} was trained on other data: {shown}. Set that as it was, read the new data from its beginning "
            "(new_dataset: True, --new-dataset), or start another run (output_dir, --save)."
        )


def check_trained_here(all_config):
    """Check, before a BPE is trained on the text, that the run starts from no checkpoint of another program and from no
    conversion of one: the model there knows the ids of another tokenizer.

    Raises:
        CheckpointError: it does, and load_strict is not off.
    """
    settings = all_config.training_config
    folder = _starting_folder(settings)
    named = None if folder is None else folders.named_checkpoint(folder, settings.ckpt_step)
    path = named or next(iter(folders.candidates(folder) if folder else ()), None)
    if path is None:
        return
    if is_foreign_folder(path):
        read_manifest(path, settings.ckpt_step, all_config)  # one that cannot be read says so itself
    elif not _is_conversion(path):
        return
    text = (
        f"{path} was trained with a tokenizer that is not named here, and a BPE of the text gives other ids: name its "
        "tokenizer (--tokenizer-type PretrainedFromHF --tokenizer-name-or-path FOLDER; --use-checkpoint-args takes the one "
        "beside the weights, if there is one)"
    )
    if settings.load_strict:
        raise CheckpointError(f"{text}; load_strict: False (--load-strict false) takes the weights over all the same.")
    logger.warning("%s (load_strict is off)", text)


def _is_conversion(path):
    if not os.path.isfile(os.path.join(path, MANIFEST_FILE)):
        return False
    try:
        manifest = Manifest.read(path)
    except CheckpointError:
        return False  # it is passed over
    return manifest.has_only_weights or (manifest.fingerprint is None and bool(manifest.foreign))


def _starting_folder(settings):
    """Folder of the checkpoint that a run starts from; None: of none whose files say anything."""
    places = settings.load_checkpoint, settings.output_dir, settings.pretrained_checkpoint
    folder, _ = folders.checkpoint_to_start_from(*places, settings.resume_training and not settings.finetune)
    if folder is None or not os.path.isdir(folder):
        return None
    found = foreign_format(folder)
    return folder if found is None or found.keeps_tokenizer else None


def differences(saved, own):
    """Differences between the data of two fingerprints: list of (setting, text of the saved value, text of the own one)."""
    found = []
    if saved["kind"] != own["kind"]:
        return [("data_path", f"{saved['kind']}: {_parts(saved['parts'])}", f"{own['kind']}: {_parts(own['parts'])}")]
    if saved["seq_length"] != own["seq_length"]:
        found.append(("seq_length", saved["seq_length"], own["seq_length"]))
    if saved["split"] != own["split"]:
        found.append(("split", _split(saved["split"]), _split(own["split"])))
        if own["kind"] == "text":
            return found  # its parts follow from the split
    if [_content(part) for part in saved["parts"]] != [_content(part) for part in own["parts"]]:
        one, other = _changed(saved["parts"], own["parts"])
        found.append((other[0]["of"] if other else one[0]["of"], _parts(one), _parts(other)))
    return found


def _content(part):
    return part["of"], part.get("weight"), part["hash"]


def _changed(saved, own):
    """Parts that differ, of both; all of them if their number or order differs."""
    if len(saved) != len(own) or sorted(map(str, map(_content, saved))) == sorted(map(str, map(_content, own))):
        return saved, own
    pairs = [(one, other) for one, other in zip(saved, own) if _content(one) != _content(other)]
    return [one for one, _ in pairs], [other for _, other in pairs]


def _parts(parts):
    texts = [
        ("" if part.get("weight") is None else f"{part['weight']:.4g} of ")
        + (f"{part['path']} ({part['documents']:,} documents, {part['tokens']:,} tokens, {part['hash'][:8]})")
        for part in parts[:_SHOWN]
    ]
    return " and ".join([*texts, f"{len(parts) - _SHOWN} more"] if len(parts) > _SHOWN else texts) or "nothing"


def _split(shares):
    return "not given" if shares is None else ",".join(f"{100 * share:.4g}" for share in shares) + " per cent"


def _tokenizer(found):
    return f"{found['name']} ({found['vocab_size']:,} ids, {found['hash'][:8]})"


def _tokenizer_setting(all_config, own):
    names = "tokenizer_name_or_path", "tokenizer_model", "vocab_file", "tokenizer_type"
    given = [name for name in names if getattr(all_config.dataset_config, name)]
    if not given and (own["data"] or {}).get("kind") == "text":
        return _data_setting(all_config, "data_path")
    return spelled(all_config, f"{_D}.{given[0] if given else names[-1]}")


def _advice(before, own):
    data = own["data"] or {}
    if data.get("kind") == "text" and before["name"].startswith(_BPE):
        return (
            "The BPE follows from the text: train on the text as it was, or keep the tokenizer (--tokenizer-type "
            f"PretrainedFromHF --tokenizer-name-or-path {before['name'].removeprefix(_BPE)} --new-dataset), or start "
            "another run (output_dir, --save)."
        )
    return (
        "Name the tokenizer of the checkpoint, or start another run (output_dir, --save); load_strict: False (--load-strict "
        "false) takes the weights over all the same."
    )


def _data_setting(all_config, name):
    if name == "seq_length":
        return spelled(all_config, "model_config.seq_length")
    return spelled(all_config, f"{_D}.{name}")


def _warn_of_padding(path, manifest, all_config):
    rows = {stored.shape[0] for stored in manifest.tensors.values() if stored.grouping == "vocab"}
    now = all_config.model_config.vocab_size
    before = max(rows, default=now)
    if before == now:
        return
    size = all_config.parallel_config.tensor_model_parallel_size
    change = "are untrained and take part in the softmax" if now > before else "are left out of the softmax"
    way = f"--padded-vocab-size {before} keeps it as it was"
    if before % size:
        way = f"{before} does not divide by the tensor parallel size {size}, so that it cannot stay as it was"
    logger.warning(
        "the vocabulary is padded to %d rows, in %s to %d: %d rows %s, and the loss changes a little at once; %s",
        now,
        path,
        before,
        abs(now - before),
        change,
        way,
    )
