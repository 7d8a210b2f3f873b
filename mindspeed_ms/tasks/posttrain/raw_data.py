"""Preparation of raw records (jsonl and other files of preprocess_data.py) that `data_path` names, once per run's settings."""

import json
import os
from dataclasses import asdict
from types import SimpleNamespace

from mindspeed_ms.config import spelled
from mindspeed_ms.core.datasets.fingerprint import hash_of, of_tokenizer, sampled_hash
from mindspeed_ms.core.datasets.indexed_dataset import IndexedDataset
from mindspeed_ms.core.datasets.indexed_format import get_bin_path, get_idx_path
from mindspeed_ms.core.datasets.instruction_builder import dataset_class_of
from mindspeed_ms.core.datasets.instruction_files import PROMPT_FIELDS, InstructionDataError, field_prefix
from mindspeed_ms.core.datasets.prompt_dataset import records_path
from mindspeed_ms.core.datasets.tokenizer import TokenizerSettings, build_tokenizer
from mindspeed_ms.core.logging import logger
from mindspeed_ms.tasks.preprocess.errors import PreprocessError
from mindspeed_ms.tasks.preprocess.input_files import expand_inputs, is_raw_name
from mindspeed_ms.tasks.preprocess.map_keys import check_map_keys
from mindspeed_ms.tasks.preprocess.pipeline import preprocess
from mindspeed_ms.tasks.preprocess.readers import read_batches
from mindspeed_ms.tasks.preprocess.registry import HANDLER_KINDS, check_handler
from mindspeed_ms.tasks.preprocess.settings import Run, Settings

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
        for path in paths or ():
            if is_raw_name(path) and not os.path.exists(path) and not _is_prepared(path, fields):
                name = spelled(all_config, f"dataset_config.{option}")
                raise InstructionDataError(f"{name}: the file {path} does not exist.")
        if paths and all(_is_raw(path, fields) for path in paths):
            found[option] = [_prepared(all_config, option, tuple(paths))]
    if not found:
        _tell_of_no_effect(all_config)
    return found


def _tell_of_no_effect(all_config):
    """Name the settings of raw records that were set for prepared data."""
    names = [f"dataset_config.{name}" for name in _OF_RECORDS]
    idle = [spelled(all_config, name) for name in names if all_config.settings and all_config.settings.was_set(name)]
    if idle:
        logger.warning("%s: no effect, since the data is prepared already", ", ".join(idle))


def _is_prepared(path, fields):
    return any(IndexedDataset.exists(field_prefix(path, field)) for field in fields)


def _is_raw(path, fields):
    return not _is_prepared(path, fields) and os.path.exists(path)


def _prepared(all_config, option, paths):
    """Prefix of the indexed files of raw files, which are written unless they are there."""
    tokenizer = TokenizerSettings.from_config(all_config.dataset_config)
    if not tokenizer.is_given:
        raise InstructionDataError(
            f"{paths[0]} are records of text, which need a tokenizer: set --tokenizer-name-or-path "
            "(dataset_config.tokenizer_name_or_path), or preprocess them first."
        )
    try:
        files, _ = expand_inputs(paths)
    except PreprocessError as error:  # speaks of preprocess_data.py's option
        raise InstructionDataError(str(error).replace("--input", spelled(all_config, f"dataset_config.{option}"))) from error
    settings = _settings(all_config, tokenizer, files)
    content = [item for file in files for item in (os.path.abspath(file.path), file.size, sampled_hash(file.path))]
    template = [sampled_hash(settings.prompt_type_path)] if settings.prompt_type_path else []
    key = hash_of(asdict(settings), of_tokenizer(build_tokenizer(all_config.dataset_config)), *content, *template)
    folder = all_config.dataset_config.data_cache_path or os.path.join(all_config.training_config.output_dir, "data")
    prefix = os.path.join(folder, f"{os.path.splitext(os.path.basename(os.path.normpath(paths[0])))[0]}_{key}")
    fields = dataset_class_of(all_config).fields
    keeps_records = fields == PROMPT_FIELDS
    written = all(IndexedDataset.exists(field_prefix(prefix, field)) for field in fields)
    if not written or (keeps_records and not os.path.exists(records_path(prefix))):
        os.makedirs(folder, exist_ok=True)
        logger.info("preparing %s: %s", ", ".join(paths), prefix)
        tally = preprocess(settings, Run(paths, prefix, overwrite=True))
        for line in tally.lines():
            logger.info("%s", line)
        _refuse_empty_answers(tally, [field_prefix(prefix, field) for field in fields])
        if keeps_records:
            _keep_records(files, tally, prefix)
    return prefix


def _refuse_empty_answers(tally, written):
    """Raise InstructionDataError if an answer of a pair was empty; what was written is removed."""
    empty = {reason: found for reason, found in tally.dropped.items() if reason in _EMPTY}
    if empty:
        for path in (get(one) for one in written for get in (get_bin_path, get_idx_path)):
            os.remove(path)
        raise InstructionDataError(f"pairs need two answers: {'; '.join(tally.counted(empty))}. Mend or remove these records.")


def _keep_records(files, tally, prefix):
    """Write the records of prompts beside them, one per line: reward functions get them."""
    if tally.dropped:
        raise InstructionDataError(
            f"not every record has a prompt: {'; '.join(tally.counted(tally.dropped))}. Mend or remove these."
        )
    path = records_path(prefix)
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        for source in files:
            for batch in read_batches(source, None):
                file.writelines(f"{json.dumps(record, ensure_ascii=False, default=str)}\n" for record in batch.records()[1])
    os.replace(f"{path}.tmp", path)


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
