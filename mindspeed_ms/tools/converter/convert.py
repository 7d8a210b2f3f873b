"""A conversion from plan to result: opens the source, plans the target, writes it under a temporary name, verifies it."""

import os
import re
import time
from dataclasses import replace
from math import prod

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import OPTIMIZER_PREFIX
from mindspeed_ms.core.dist_checkpointing.new_folder import new_folder
from mindspeed_ms.core.logging import logger
from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.parameters import describe_whole_model
from mindspeed_ms.layout.vocabulary import padded_vocab_size
from mindspeed_ms.models.families.configuration import config_of_model, model_sections
from mindspeed_ms.models.hugging_face.folder import CONFIG_FILE
from mindspeed_ms.models.hugging_face.gguf_file import GgufModel
from mindspeed_ms.models.hugging_face.manifest import read_manifest
from mindspeed_ms.tools.checkpoint.diff import differences
from mindspeed_ms.tools.checkpoint.rewrite import CheckedSource, check_space, progress_bar
from mindspeed_ms.tools.checkpoint.source import open_checkpoint
from mindspeed_ms.tools.converter import effects
from mindspeed_ms.tools.converter.converted import ConvertedReader
from mindspeed_ms.tools.converter.errors import ConversionError
from mindspeed_ms.tools.converter.experts import regrouped
from mindspeed_ms.tools.converter.noop_layers import with_places
from mindspeed_ms.tools.converter.plan import plan_lines
from mindspeed_ms.tools.converter.sides import GGUF, HUGGING_FACE, NATIVE, UPSTREAM
from mindspeed_ms.tools.converter.source import TITLES, described, kind_of, open_source
from mindspeed_ms.tools.converter.target import TARGETS, vocabulary_rows

_SHOWN = 10  # differences


def convert(conversion):
    """Run a Conversion.

    Returns:
        list[str]: lines of the report; those of the plan with `dry_run`.

    Raises:
        ConversionError, CheckpointError, OSError: nothing is left of the result.
    """
    for note in conversion.notes:
        logger.info("%s", note)
    conversion, save_dir = _with_model_folder(conversion)
    if not conversion.dry_run:
        _check_new(save_dir)
    started = time.monotonic()
    if conversion.source == GGUF or conversion.load_dir.endswith(".gguf"):
        return _convert_gguf(conversion, save_dir, started)
    opened = open_source(conversion)
    with opened.reader:
        for note in effects.check_source(conversion, opened):
            logger.info("%s", note)
        source = regrouped(conversion, opened)
        config = target_config(conversion, source)
        with _converted(conversion, source, config) as reader:
            _check_coverage(source, reader)
            target = _in_words(conversion, lambda: TARGETS[conversion.target](conversion, source, reader, config))
            if conversion.dry_run:
                return plan_lines(source, reader, target)
            check_space(save_dir, target.nbytes)
            with new_folder(save_dir) as folder:
                with CheckedSource(opened.reader) as check:
                    target.write(folder)
                    check()
                found = _verify(reader, target, folder, config) if conversion.verify else None
            return _report(source, reader, target, save_dir, time.monotonic() - started, found)


def _convert_gguf(conversion, save_dir, started):
    """Convert a GGUF file to a Hugging Face folder; see `convert`."""
    if conversion.target != HUGGING_FACE:
        raise ConversionError(
            f"--load-dir {conversion.load_dir}: a GGUF file is converted to a Hugging Face folder first "
            "(--save-model-type hf), and that to all else."
        )
    model = GgufModel(conversion.load_dir)
    if conversion.dry_run:
        return [f"{part.name}  float32  {list(part.shape)}" for part in model.parts]
    check_space(save_dir, model.nbytes)
    with new_folder(save_dir) as folder, progress_bar(model.nbytes) as bar:
        notes = model.write(folder, bar.update)
        read_manifest(folder)
    seconds, count = time.monotonic() - started, sum(part.numel for part in model.parts)
    return [
        *notes,
        f"converted GGUF {model.path} ({count:,} parameters) to Hugging Face {save_dir} ({count:,} parameters): "
        f"{model.nbytes / 1e9:.3f} GB in {seconds:.1f} s, {model.nbytes / 1e9 / seconds:.2f} GB/s",
    ]


def _with_model_folder(conversion):
    """(Conversion, folder of the result); MindSpeed-LLM writes Hugging Face's into `mg2hf` of the original model's folder."""
    save_dir = os.path.normpath(conversion.save_dir)
    if conversion.target == HUGGING_FACE and os.path.isfile(os.path.join(save_dir, CONFIG_FILE)):
        return replace(conversion, model_folder=conversion.model_folder or save_dir), os.path.join(save_dir, "mg2hf")
    return conversion, save_dir


def _check_new(save_dir):
    if os.path.lexists(save_dir) and (not os.path.isdir(save_dir) or os.listdir(save_dir)):
        raise ConversionError(f"--save-dir {save_dir} exists already: choose a new or empty folder.")


def target_config(conversion, source):
    """AllConfig of the model in the target's layout.

    Raises:
        ConversionError: the layout does not fit the model, in the words of the flags.
    """
    noops = conversion.parallel.get("noop_layers")
    sections = _in_words(conversion, lambda: with_places(model_sections(source.config.to_dict()), noops, conversion.load_dir))
    rows = vocabulary_rows(source.reader)
    true_rows = conversion.true_vocab_size or source.reader.manifest.vocab_size
    sections["model_config"]["vocab_size"] = _padded_rows(conversion, rows, true_rows)
    # experts are only cut over tensor ranks together with the sequence, which changes no file
    cuts_experts = source.config.moe_config.num_experts > 1 and conversion.parallel.get("tensor_model_parallel_size", 1) > 1
    sections["parallel_config"] = {**conversion.parallel, "sequence_parallel": cuts_experts}
    config = _in_words(conversion, lambda: config_of_model(sections, "the target"))
    _in_words(conversion, lambda: describe_whole_model(describe_model(config)))
    return config


def _padded_rows(conversion, rows, true_rows):
    if conversion.target == HUGGING_FACE:
        return rows
    parts = conversion.parallel.get("tensor_model_parallel_size", 1)
    if conversion.vocab_multiple is None:
        return padded_vocab_size(rows, 1, parts)
    return padded_vocab_size(true_rows or rows, conversion.vocab_multiple, parts)


def _in_words(conversion, work):
    """Result of `work`; an error about the layout names the flags that were typed."""
    try:
        return work()
    except (LayoutError, CheckpointError) as error:
        text = str(error)
        for name, flag in conversion.flags.items():
            text = re.sub(rf"(parallel_config\.)?\b{name}\b", flag, text)
        if isinstance(error, LayoutError) and not any(flag in text for flag in conversion.flags.values()):
            asked = ", ".join(f"{conversion.flags[name]} {value}" for name, value in conversion.parallel.items())
            text = f"{text.removesuffix('.')} ({asked})."
        raise ConversionError(text) from error


def _converted(conversion, source, config):
    """ConvertedReader of the source for the target."""
    manifest = source.reader.manifest
    wanted, found = config.model_config.vocab_size, vocabulary_rows(source.reader)
    with_optimizer = conversion.with_optimizer and conversion.target != HUGGING_FACE
    if with_optimizer and manifest.not_resumable and not manifest.has_only_weights:
        logger.warning("the optimizer's state is left out (%s)", manifest.not_resumable)
    if wanted != found:
        logger.warning(
            "the vocabulary gets %d rows instead of %d (%s): new rows are copies of the last one, and losses of a softmax over "
            "all rows change",
            wanted,
            found,
            "--make-vocab-size-divisible-by" if conversion.vocab_multiple else conversion.flags["tensor_model_parallel_size"],
        )
        if with_optimizer and any(key.startswith(OPTIMIZER_PREFIX) for key in manifest.tensors):
            raise ConversionError(
                f"the optimizer's state has {found} rows of the vocabulary, the target {wanted}: leave "
                "--make-vocab-size-divisible-by out, or the optimizer (--no-save-optim)."
            )
    args = _described(conversion, manifest.args, config.to_dict())
    true_rows = conversion.true_vocab_size or manifest.vocab_size
    return ConvertedReader(
        source.reader, args, conversion.params_dtype, wanted if wanted != found else None, with_optimizer, true_rows
    )


def _described(conversion, before, now):
    """The result's configuration by sections: `now`, and in files of ours the training that `before` tells of."""
    args = {**before, **now}
    if conversion.target == NATIVE:
        for section in ("training_config", "optimizer_config", "dataset_config"):
            args[section] = {**(now.get(section) or {}), **(before.get(section) or {})}
        args["dataset_config"]["vocab_size"] = (now.get("dataset_config") or {}).get("vocab_size")
    return args


def _check_coverage(source, reader):
    """Compare the source's tensors with its configuration. CheckpointError: lists what is left on both sides."""
    described = {one.name for one in describe_whole_model(describe_model(source.config)) if one.shared_with is None}
    stored = {key for key in reader.manifest.tensors if not key.startswith(OPTIMIZER_PREFIX)}
    if described != stored:
        lists = [
            f"{title}: {', '.join(sorted(names)[:8])}{' ...' if len(names) > 8 else ''}."
            for title, names in (("Left in the source", stored - described), ("Left of the model", described - stored))
            if names
        ]
        raise CheckpointError(f"{reader.folder} does not hold the model of its configuration. {' '.join(lists)}")


def _verify(reader, target, folder, config):
    """Read the result again and compare it with the source; returns the number of tensors.

    Raises:
        CheckpointError: they differ.
    """
    with open_checkpoint(folder, config=config) as again:
        if kind_of(again) != target.kind:
            raise CheckpointError(f"the result is not {described(target.kind)}. It was deleted.")
        found = differences(reader, again, weights_only=target.kind in (HUGGING_FACE, UPSTREAM))
        tensors = {*reader.manifest.tensors, *again.manifest.tensors}  # counters have other forms elsewhere
        texts = [f"{one.key}: {one.text}" for one in found if one.key in tensors]
    if texts:
        shown = "; ".join(texts[:_SHOWN]) + (" ..." if len(texts) > _SHOWN else "")
        raise CheckpointError(f"the result differs from {reader.folder}: {shown}. It was deleted.")
    return len(reader.manifest.tensors)


def _report(source, reader, target, save_dir, seconds, verified):
    stored = source.reader.manifest.tensors
    weights = [one for key, one in stored.items() if not key.startswith(OPTIMIZER_PREFIX)]
    elements = sum(prod(one.shape) for one in weights) - _padding(source.reader.manifest, reader.manifest.vocab_size)
    written = target.elements() - (0 if target.kind == HUGGING_FACE else _padding(reader.manifest, reader.manifest.vocab_size))
    left_out = getattr(source.reader.manifest, "left_out", {})
    lines = [f"left out {name}: {reason}" for name, reason in left_out.items()]
    if verified is not None:
        lines.append(f"verified: {verified} tensors are equal in {save_dir}")
    lines.append(
        f"converted {TITLES[source.kind]} {source.reader.folder} ({elements:,} parameters) to {TITLES[target.kind]} {save_dir} "
        f"({written:,} parameters): {target.nbytes / 1e9:.3f} GB in {seconds:.1f} s, "
        f"{target.nbytes / 1e9 / max(seconds, 1e-9):.2f} GB/s"
    )
    return lines


def _padding(manifest, true_rows):
    """Elements of rows of the vocabulary beyond the true ones."""
    weights = [one for key, one in manifest.tensors.items() if not key.startswith(OPTIMIZER_PREFIX)]
    tables = [one.shape for one in weights if one.grouping == "vocab"]
    return sum((shape[0] - min(true_rows or shape[0], shape[0])) * prod(shape[1:]) for shape in tables)
