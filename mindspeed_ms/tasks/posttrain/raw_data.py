"""Preparation of raw records (jsonl and other files of preprocess_data.py) that `data_path` names, once per run's settings."""

import json
import os
import re
from dataclasses import asdict
from types import SimpleNamespace

from mindspeed_ms.config import spelled
from mindspeed_ms.core.datasets.fingerprint import hash_of, of_tokenizer, sampled_hash
from mindspeed_ms.core.datasets.indexed_dataset import IndexedDataset
from mindspeed_ms.core.datasets.instruction_builder import dataset_class_of
from mindspeed_ms.core.datasets.instruction_files import PROMPT_FIELDS, InstructionDataError, field_prefix
from mindspeed_ms.core.datasets.prompt_dataset import records_path
from mindspeed_ms.core.datasets.tokenizer import TokenizerSettings, build_tokenizer
from mindspeed_ms.core.dist_checkpointing.durable import replacing
from mindspeed_ms.core.dist_checkpointing.folders import check_writable
from mindspeed_ms.core.logging import logger
from mindspeed_ms.tasks.preprocess.input_files import expand_inputs, names_records
from mindspeed_ms.tasks.preprocess.map_keys import check_map_keys
from mindspeed_ms.tasks.preprocess.pipeline import preprocess
from mindspeed_ms.tasks.preprocess.readers import read_batches
from mindspeed_ms.tasks.preprocess.registry import HANDLER_KINDS, check_handler
from mindspeed_ms.tasks.preprocess.settings import Run, Settings
from mindspeed_ms.tasks.preprocess.truncation import FILLS

_OPTIONS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_OF_RECORDS = (
    *("pack", "handler_name", "prompt_type", "prompt_type_path", "map_keys", "enable_thinking", "append_eod"),
    "placeholder_token",
)
_EMPTY = ("empty chosen answer", "empty rejected answer")
_ONLY_HANDLERS = {"process_reward": "AlpacaStyleProcessRewardHandler", "prompt": "PPOAlpacaStyleInstructionHandler"}
_TASKS = {"sft": "instruction", "prm": "process_reward", "trl_ppo": "prompt", "grpo": "prompt"}  # others: pairwise


def prepare_raw_data(all_config):
    """Turn the raw files of a configuration into indexed files, beside each other in `data_cache_path` or output_dir/data.

    Args:
        all_config (AllConfig): read: data paths, tokenizer, handler, template, length, packing.

    Returns:
        dict[str, list[str]]: settings of `dataset_config` whose raw files were prepared: the prefix of what was written.

    Raises:
        InstructionDataError, PreprocessError, TokenizerError: files, records or settings that cannot be used.
    """
    settings, found, fields = all_config.dataset_config, {}, dataset_class_of(all_config).fields
    for option in _OPTIONS:
        paths = getattr(settings, option)
        if paths and all(_is_raw(path, fields) for path in paths):
            found[option] = [_prepared(all_config, tuple(paths), option)]
    given = [path for option in _OPTIONS for path in getattr(settings, option) or ()]
    if any(_is_prepared(path, fields) for path in given):
        _tell_of_no_effect(all_config)
    return found


def _tell_of_no_effect(all_config):
    """Name the settings of raw records that were set for prepared data."""
    names = [f"dataset_config.{name}" for name in _OF_RECORDS]
    idle = [spelled(all_config, name) for name in names if all_config.settings and all_config.settings.was_set(name)]
    if idle:
        logger.warning("%s: no effect, since the data is prepared already", ", ".join(idle))


def _is_raw(path, fields):
    """Whether a path names records, not the prefix of prepared data; they need not be there."""
    return not _is_prepared(path, fields) and names_records(path)


def _is_prepared(path, fields):
    return any(IndexedDataset.exists(field_prefix(path, field)) for field in fields)


def _prepared(all_config, paths, option):
    """Prefix of the indexed files of raw files, which are written unless they are there and were found good."""
    tokenizer = TokenizerSettings.from_config(all_config.dataset_config)
    if not tokenizer.is_given:
        raise InstructionDataError(
            f"{paths[0]} are records of text, which need a tokenizer: set --tokenizer-name-or-path "
            "(dataset_config.tokenizer_name_or_path), or preprocess them first."
        )
    files, _ = expand_inputs(paths, spelled(all_config, f"dataset_config.{option}"))
    settings = _settings(all_config, tokenizer, files)
    content = [item for file in files for item in (os.path.abspath(file.path), file.size, sampled_hash(file.path))]
    template = [sampled_hash(path) for path in (settings.prompt_type_path,) if path and os.path.isfile(path)]
    key = hash_of(asdict(settings), of_tokenizer(build_tokenizer(all_config.dataset_config)), *content, *template)
    folder = all_config.dataset_config.data_cache_path or os.path.join(all_config.training_config.output_dir, "data")
    name = re.sub(r"[*?\[\]]", "", os.path.splitext(os.path.basename(os.path.normpath(paths[0])))[0])  # of a pattern
    prefix = os.path.join(folder, f"{name}_{key}")
    fields = dataset_class_of(all_config).fields
    report = f"{prefix}_report.json"
    if not os.path.exists(report) or not all(IndexedDataset.exists(field_prefix(prefix, field)) for field in fields):
        _make(folder, all_config)
        logger.info("preparing %s: %s", ", ".join(paths), prefix)
        tally = preprocess(settings, Run(paths, prefix, overwrite=True))
        for line in tally.lines():
            logger.info("%s", line)
        _refuse_answers(tally)
        if fields == PROMPT_FIELDS:
            _keep_records(files, tally, prefix)
        with replacing(report) as file:
            file.write(json.dumps(tally.counted(tally.dropped | tally.notes)).encode())
    with open(report, encoding="utf-8") as file:
        for remark in json.load(file):
            logger.warning("%s: %s", ", ".join(paths), remark)
    return prefix


def _make(folder, all_config):
    """Make the folder of prepared data.

    Raises:
        InstructionDataError: it cannot be written.
    """
    option = "dataset_config.data_cache_path" if all_config.dataset_config.data_cache_path else "training_config.output_dir"
    try:
        check_writable(folder)
    except OSError as error:
        raise InstructionDataError(
            f"{spelled(all_config, option)}: data cannot be prepared in {folder} ({error.strerror})."
        ) from error


def _refuse_answers(tally):
    """Raise InstructionDataError if an answer of a pair is empty, or leaves no room for its question."""
    empty = {reason: found for reason, found in tally.dropped.items() if reason in _EMPTY}
    if empty:
        raise InstructionDataError(f"pairs need two answers: {'; '.join(tally.counted(empty))}. Mend or remove these records.")
    if FILLS in tally.notes:
        raise InstructionDataError(
            f"{'; '.join(tally.counted({FILLS: tally.notes[FILLS]}))}: that leaves no room for the question. Raise seq_length "
            "(--seq-length), or shorten or remove these records."
        )


def _keep_records(files, tally, prefix):
    """Write the records of prompts beside them, one per line: reward functions get them."""
    if tally.dropped:
        raise InstructionDataError(
            f"not every record has a prompt: {'; '.join(tally.counted(tally.dropped))}. Mend or remove these."
        )
    records = (one for source in files for batch in read_batches(source, None) for one in batch.records()[1])
    with replacing(records_path(prefix)) as file:
        file.writelines(f"{json.dumps(record, default=str)}\n".encode() for record in records)


def _settings(all_config, tokenizer, files):
    given, stage = all_config.dataset_config, all_config.training_config.stage
    task = _TASKS.get(stage, "pairwise")
    handler = given.handler_name or _handler_of(files, task)
    length = all_config.model_config.seq_length
    pack = given.pack or given.neat_pack
    words = SimpleNamespace(prompt_type=given.prompt_type, pack=pack, neat_pack=given.neat_pack, seq_length=length)
    check_handler(handler, words)
    if HANDLER_KINDS[handler].task != task:
        fitting = [name for name, kind in HANDLER_KINDS.items() if kind.task == task]
        raise InstructionDataError(
            f"handler_name (--handler-name) {handler} writes {HANDLER_KINDS[handler].task} data, and stage {stage} trains on "
            f"{task} data: leave it out, or take {' or '.join(fitting)}."
        )
    return Settings(
        handler_name=handler,
        tokenizer=tokenizer,
        map_keys=check_map_keys(given.map_keys, handler) if given.map_keys else {},
        prompt_type=given.prompt_type,
        prompt_type_path=given.prompt_type_path,
        enable_thinking=given.enable_thinking,
        append_eod=given.append_eod,
        seq_length=length,
        pack=pack,
        neat_pack=given.neat_pack,
        placeholder_token=given.placeholder_token,
        reward_tokens=tuple(given.reward_tokens),
    )


def _handler_of(files, task):
    """Name of the handler of a task that fits the columns of the first record."""
    if task in _ONLY_HANDLERS:
        return _ONLY_HANDLERS[task]
    batch = next(iter(read_batches(files[0], None)), None)
    records = batch.records()[1] if batch is not None else []
    columns = records[0] if records and isinstance(records[0], dict) else {}
    kind = "Instruction" if task == "instruction" else "Pairwise"
    if "messages" in columns and task == "instruction":
        return "OpenAIInstructionHandler"
    return f"SharegptStyle{kind}Handler" if "conversations" in columns else f"AlpacaStyle{kind}Handler"
