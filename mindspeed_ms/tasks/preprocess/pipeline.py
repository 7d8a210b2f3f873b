"""Pipeline of a preprocessing run: read, tokenize, write, pack, publish. It can be interrupted and resumed at any point."""

import glob
import os
import time
from dataclasses import asdict

import numpy as np
from tqdm import tqdm

from mindspeed_ms.core.datasets.fingerprint import sampled_hash
from mindspeed_ms.core.datasets.indexed_format import get_bin_path, get_idx_path
from mindspeed_ms.core.datasets.tokenizer import model_vocab_size
from mindspeed_ms.core.logging import logger, set_progress_bar
from mindspeed_ms.tasks.preprocess.encoding import Encoder
from mindspeed_ms.tasks.preprocess.errors import PreprocessError
from mindspeed_ms.tasks.preprocess.input_files import UNFINISHED, expand_inputs
from mindspeed_ms.tasks.preprocess.packing import pack
from mindspeed_ms.tasks.preprocess.readers import count_bytes, read_batches
from mindspeed_ms.tasks.preprocess.registry import HANDLER_KINDS
from mindspeed_ms.tasks.preprocess.unfinished import START_OVER, Unfinished, make_writable, publish, write_index
from mindspeed_ms.tasks.preprocess.workers import cores, encode_all, most_processes

_FORMAT_VERSION = 2  # of the batches that a journal counts


def preprocess(settings, run, make_vocab_size_divisible_by=128):
    """Run a preprocessing Run by Settings.

    Returns:
        Tally: counts of records read, written and left out.

    Raises:
        PreprocessError, TokenizerError, TemplateError: something is wrong with options, input or output. Output files appear
            complete or not at all; finished work is kept for the next try where that helps.
        OSError: the disk is full or fails.
    """
    files, ignored = expand_inputs(run.inputs)
    encoder = Encoder(settings)
    outputs = {key: f"{run.output_prefix}{encoder.handler.infix}_{key}_document" for key in encoder.handler.keys}
    _check_vocabulary(encoder, run, make_vocab_size_divisible_by)
    for text in _remarks(encoder, files, ignored, run):
        logger.warning(text)
    folder = _unfinished_folder(run)
    make_writable(os.path.dirname(run.output_prefix) or ".")
    unfinished = Unfinished(folder, encoder.handler.keys, _description(settings, run, files), run.restart)
    try:
        _check_outputs(outputs, run, unfinished)
        _write(settings, run, encoder, files, outputs, unfinished)
    except BaseException:
        unfinished.release()
        raise
    unfinished.discard()
    return unfinished.tally


def _write(settings, run, encoder, files, outputs, unfinished):
    if unfinished.continued:
        logger.info("continuing the unfinished run in %s after %d records", unfinished.folder, unfinished.tally.records)
    begun = _unchanged(files, unfinished)
    if not unfinished.is_complete:
        if not unfinished.position.get("tokenized"):
            _tokenize(run, encoder, files, unfinished, begun)
        tally = unfinished.tally
        if not any(tally.samples.values()):
            reasons = "; ".join(tally.counted(tally.dropped))
            unfinished.discard()
            names = ", ".join(file.path for file in files[:5])
            raise PreprocessError(
                f"nothing to write: {tally.records} records gave no sample. "
                + (f"Left out: {reasons}." if reasons else f"There are no records in {names}.")
            )
        if settings.pack:
            _pack(settings, encoder, unfinished)
        for key in outputs:
            write_index(unfinished.path(f"{key}.idx"), encoder.handler.dtype, _samples(settings, unfinished, f"{key}.lengths"))
        unfinished.record({"complete": True, "begun": begun})
        unfinished.save()
    for key, prefix in outputs.items():
        publish(_samples(settings, unfinished, f"{key}.bin"), unfinished.path(f"{key}.idx"), prefix)


def _samples(settings, unfinished, name):
    return unfinished.path(f"packed-{name}" if settings.pack else name)


def _tokenize(run, encoder, files, unfinished, begun):
    tally, start = unfinished.tally, time.monotonic()
    first = encoder.handler.keys[0]
    before, done = tally.tokens.get(first, 0), unfinished.position.get("files", 0)
    with tqdm(total=count_bytes(files), unit="B", unit_scale=True, desc="tokenizing", dynamic_ncols=True) as bar:
        set_progress_bar(bar)
        try:
            batches = _batches(files, encoder, unfinished.position, run.max_samples, tally.records)
            for (number, count, consumed), encoded in encode_all(batches, encoder, _processes(run)):
                for key, (tokens, lengths) in encoded.columns.items():
                    unfinished.append(key, tokens, lengths)
                tally.add(encoded.tally)
                begun += [file.fingerprint() for file in files[len(begun) : number + 1]]
                unfinished.record({"files": number, "batches": count, "begun": begun})
                bar.update(count_bytes(files[:number]) + consumed - bar.n)
                speed = (tally.tokens.get(first, 0) - before) / (time.monotonic() - start)
                bar.set_postfix_str(f"{speed:,.0f} tokens/s, {tally.tokens.get(first, 0):,} tokens", refresh=False)
                done = number
        except OSError:
            raise  # a full disk: the journal has the last entry that found room
        except BaseException:
            unfinished.save()
            raise
        finally:
            set_progress_bar(None)
    unfinished.record({"files": done + 1, "tokenized": True, "begun": begun})
    unfinished.save()
    seconds = time.monotonic() - start
    logger.info(
        "%s tokens in %.1f s (%s tokens/s, %d processes)",
        f"{tally.tokens.get(first, 0) - before:,}",
        seconds,
        f"{(tally.tokens.get(first, 0) - before) / max(seconds, 1e-9):,.0f}",
        _processes(run),
    )


def _batches(files, encoder, position, max_samples, records):
    """Yield ((file number, its batches so far, its bytes so far), Batch, number of records to use) from a position on."""
    settings = encoder.settings
    columns = list(settings.json_keys) if HANDLER_KINDS[settings.handler_name].task == "text" else None
    start, skipped, left = position.get("files", 0), position.get("batches", 0), None
    if max_samples is not None:
        left = max_samples - records
    for number in range(start, len(files)):
        for count, batch in enumerate(read_batches(files[number], columns), 1):
            if number == start and count <= skipped:
                continue
            if left is not None and left <= 0:
                return
            yield (number, count, batch.consumed), batch, left
            if left is not None:
                left -= len(batch.records()[0])


def _processes(run):
    return min(run.workers, most_processes())


def _unchanged(files, unfinished):
    """Fingerprints (list) of files that an unfinished run has begun to read; PreprocessError if one has changed."""
    begun = list(unfinished.position.get("begun", []))
    for file, known in zip(files, begun):
        if file.fingerprint() != known:
            raise PreprocessError(
                f"{file.path} was changed since the unfinished run in {unfinished.folder} read it: "
                f"{START_OVER % unfinished.folder}."
            )
    return begun


def _pack(settings, encoder, unfinished):
    sequences, tokens = pack(
        unfinished.path,
        lambda name: unfinished.path(f"packed-{name}"),
        settings.seq_length,
        encoder.handler.pad,
        settings.neat_pack,
    )
    unfinished.tally.packs, unfinished.tally.pack_length = sequences, settings.seq_length
    logger.info(
        "packed %d samples into %d sequences of %d tokens, %.1f %% of them padding",
        unfinished.tally.samples["input_ids"],
        sequences,
        settings.seq_length,
        100 - 100 * tokens / (sequences * settings.seq_length),
    )


def _check_vocabulary(encoder, run, divisible_by):
    size = encoder.vocab_size
    if run.model_vocab_size is not None and size > run.model_vocab_size:
        raise PreprocessError(
            f"--pad-vocab-size-to is {run.model_vocab_size}, but {encoder.tokenizer.name} has {size} ids, "
            "added tokens included: ids from there on would have no row in the model's embedding. Give at "
            f"least {size}, or another tokenizer."
        )
    if run.model_vocab_size is None:
        model_vocab_size(encoder.tokenizer, divisible_by)  # says it in the log
    logger.info("ids are stored as %s", np.dtype(encoder.handler.dtype).name)


def _check_outputs(outputs, run, unfinished):
    """Refuse existing output files, unless the user allowed it or an interrupted run was publishing them."""
    paths = [path for prefix in outputs.values() for path in (get_bin_path(prefix), get_idx_path(prefix))]
    there = [path for path in paths if os.path.exists(path)]
    if there and not run.overwrite and not unfinished.is_complete:
        raise PreprocessError(f"{there[0]} exists: give another --output-prefix, or replace it with --overwrite-output.")


def _remarks(encoder, files, ignored, run):
    remarks = list(encoder.handler.remarks)
    if ignored:
        remarks.append(f"{len(ignored)} files in the input folders are no data and are not read: {', '.join(ignored[:5])}")
    empty = [file.path for file in files if not file.size]
    if empty:
        remarks.append(f"{len(empty)} of {len(files)} input files are empty: {', '.join(empty[:5])}")
    if run.workers > most_processes():
        remarks.append(
            f"{run.workers} processes are asked for (--workers, --n-subs), but there are {cores()} cores: "
            f"{most_processes()} tokenize; the output is the same"
        )
    if run.workers == 1 and cores() > 1 and count_bytes(files) > 1 << 27:
        remarks.append(f"one process tokenizes, but there are {cores()} cores: --workers {cores()} is faster")
    return remarks


def _unfinished_folder(run):
    folder, name = os.path.split(run.output_prefix)
    return os.path.join(run.cache_dir or folder or ".", name + UNFINISHED)


def _content(settings):
    """Hashes of small input files: those that the settings name and those in the tokenizer's folder."""
    tokenizer, paths = settings.tokenizer, [settings.prompt_type_path]
    for path in (tokenizer.tokenizer_name_or_path, tokenizer.tokenizer_model, tokenizer.vocab_file, tokenizer.merge_file):
        paths += sorted(glob.glob(os.path.join(glob.escape(path), "*"))) if path and os.path.isdir(path) else [path]
    return {
        path: sampled_hash(path)
        for path in paths
        if path and os.path.isfile(path) and path.endswith((".json", ".model", ".jinja", ".txt"))
    }


def _description(settings, run, files):
    return {
        "version": _FORMAT_VERSION,
        "settings": asdict(settings),
        "content of tokenizer and templates": _content(settings),
        "output": os.path.abspath(run.output_prefix),
        "max_samples": run.max_samples,
        "files": [os.path.abspath(file.path) for file in files],
    }
