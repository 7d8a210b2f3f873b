"""Rows of ``dataset_config``."""

from mindspeed_ms.config import conversions
from mindspeed_ms.config.rows.row import LIST, OFF, ON, SWITCH, ignored, refused, row


def _data(name, field=None, **details):
    return row(name, f"dataset_config.{field or name}", **details)


ROWS = (
    _data("micro_batch_size", "batch_size", seen="data"),
    _data("micro_batch_num", seen="data"),
    _data(
        "global_batch_size",
        seen="data",
        reason="without it and micro_batch_num a step has one micro-batch per data parallel rank",
        reason_zh="与micro_batch_num都未设时，每步每个数据并行rank一个微批",
    ),
    _data("rampup_batch_size", form=LIST, seen="log"),
    _data("decrease_batch_size_if_needed", seen="log"),
    _data("train_samples", megatron=None, seen="log"),
    _data("dataset_dir", seen="log", **ignored("data is named by data_path and its kin", "数据由data_path等指定")),
    _data("data_path", form=LIST, seen="data"),
    _data("train_data_path", form=LIST, seen="data"),
    _data("valid_data_path", form=LIST, seen="data"),
    _data("test_data_path", form=LIST, seen="data"),
    _data("split", seen="data"),
    _data("data_cache_path", seen="file"),
    _data("mock_data", seen="data"),
    _data("mmap_bin_files", form=OFF, seen="memory"),
    _data(
        "num_workers",
        seen="log",
        **ignored("files are mapped into memory and need no reader processes", "数据文件以内存映射读取，无需读数据进程"),
    ),
    _data("dataloader_type", seen="data"),
    _data("shuffle", form=SWITCH, seen="data"),
    row(
        "no_shuffle",
        "dataset_config.shuffle",
        form=ON,
        convert=conversions.no_shuffle,
        megatron=None,
        seen="data",
        english="The same as shuffle False.",
        chinese="等同shuffle: False。",
    ),
    _data("drop_remainder", form=SWITCH, seen="data"),
    _data(
        "data_layout",
        seen="error",
        **refused(
            "hidden states are [s, b, h] (SBH) inside the model, batches are [b, s] outside",
            "模型内部隐藏状态为[s, b, h]（SBH），外部批次为[b, s]",
        ),
    ),
    _data("reset_attention_mask", seen="output"),
    _data("reset_position_ids", seen="output"),
    _data("eod_mask_loss", seen="optimizer"),
    _data("create_attention_mask_in_dataloader", form=OFF, seen="data"),
    _data("is_instruction_dataset", seen="data"),
    _data("pad_to_multiple_of", seen="data"),
    _data("pad_token_id", seen="data"),
    _data("eos_token_id", seen="data"),
    _data("tokenizer_type", seen="parameters"),
    _data("tokenizer_model", seen="parameters"),
    _data("tokenizer_name_or_path", seen="parameters"),
    _data("use_fast_tokenizer", form=SWITCH, seen="parameters"),
    row(
        "tokenizer_not_use_fast",
        "dataset_config.use_fast_tokenizer",
        form=ON,
        convert=conversions.slow_tokenizer,
        megatron=None,
        seen="parameters",
        english="The same as use_fast_tokenizer False.",
        chinese="等同use_fast_tokenizer: False。",
    ),
    _data("vocab_file", seen="parameters"),
    _data("merge_file", seen="parameters"),
    _data(
        "vocab_size",
        seen="parameters",
        reason="unset: the tokenizer's; without padded_vocab_size padded to a multiple of make_vocab_size_divisible_by * tp",
        reason_zh="不设置时取分词器的词汇量；未设padded_vocab_size时填充到make_vocab_size_divisible_by乘tp的倍数",
    ),
    _data("vocab_extra_ids", seen="parameters"),
)
