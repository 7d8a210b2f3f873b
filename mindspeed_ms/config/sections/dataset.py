"""`dataset_config`: batches, data files, tokenizer."""

from typing import ClassVar

from mindspeed_ms.config import conversions
from mindspeed_ms.config.sections.field import LIST, OFF, SWITCH, Alias, field
from mindspeed_ms.config.sections.posttrain import InstructionFields
from mindspeed_ms.config.values import Bool, Count, Int, IntList, PositiveInt, Str, StrList, one_of

TOKENIZERS = (
    "PretrainedFromHF",
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "NullTokenizer",
)


class DatasetConfig(InstructionFields):
    """`dataset_config`: batches, data files, tokenizer."""

    config_name: ClassVar[str] = "dataset_config"

    batch_size: PositiveInt = field(
        1,
        "Samples per micro-batch and data parallel rank.",
        "每个数据并行rank的微批样本数。",
        "data",
        name="micro_batch_size",
        yaml_names=("micro_batch_size",),
    )
    micro_batch_num: PositiveInt = field(
        1,
        "Micro-batches per step.",
        "每步的微批数。",
        "data",
        derived="global_batch_size / (batch_size * data_parallel_size), if that is set",
    )
    global_batch_size: PositiveInt | None = field(
        None,
        "Samples per step over all ranks.",
        "每步全部rank的样本数。",
        "data",
        derived="batch_size * micro_batch_num * data_parallel_size",
        note=(
            "without it and micro_batch_num a step has one micro-batch per data parallel rank",
            "与micro_batch_num都未设时，每步每个数据并行rank一个微批",
        ),
    )
    rampup_batch_size: IntList | None = field(
        None,
        "[start, increment, samples]: the global batch grows from start over so many samples.",
        "[起始, 增量, 样本数]：全局批次在若干样本内逐步增大。",
        "log",
        form=LIST,
    )
    decrease_batch_size_if_needed: Bool = field(
        False, "Round the ramped batch down to a valid one.", "批次爬升时向下取到合法值。", "log"
    )
    train_samples: Count = field(
        0, "Train this many samples instead of iterations.", "按样本数而不是迭代数训练。", "log", megatron=None
    )

    dataset_dir: Str = field(
        "./dataset",
        "Folder of raw data for the examples.",
        "示例所用原始数据的目录。",
        "log",
        ignored=("data is named by data_path and its kin", "数据由data_path等指定"),
    )
    data_path: StrList | None = field(
        None,
        "Data prefixes, optionally each after a weight: [weight, prefix, ...].",
        "数据前缀，可各带权重：[权重, 前缀, ...]。",
        "data",
        form=LIST,
    )
    train_data_path: StrList | None = field(
        None, "Data prefixes of the training split.", "训练集的数据前缀。", "data", form=LIST
    )
    valid_data_path: StrList | None = field(
        None, "Data prefixes of the validation split.", "验证集的数据前缀。", "data", form=LIST
    )
    test_data_path: StrList | None = field(None, "Data prefixes of the test split.", "测试集的数据前缀。", "data", form=LIST)
    split: Str | None = field(
        None, "Shares of train, validation and test, such as 949,50,1.", "训练、验证、测试的比例，如949,50,1。", "data"
    )
    data_cache_path: Str | None = field(None, "Folder for built indices.", "索引缓存目录。", "file")
    mock_data: Bool = field(False, "Made-up data instead of files.", "使用模拟数据。", "data")
    mmap_bin_files: Bool = field(True, "Map data files into memory.", "以内存映射方式读数据文件。", "memory", form=OFF)
    num_workers: Count = field(
        2,
        "Reader processes.",
        "读数据的进程数。",
        "log",
        ignored=("files are mapped into memory and need no reader processes", "数据文件以内存映射读取，无需读数据进程"),
    )
    dataloader_type: one_of("single", "cyclic", "external") | None = field(
        None,
        "Pass once, cycle with shuffling, or the caller's own loader.",
        "单遍、循环打乱或外部加载器。",
        "data",
        derived="single",
    )
    shuffle: Bool = field(
        False,
        "Shuffle Python datasets that are handed in.",
        "打乱传入的Python数据集。",
        "data",
        form=SWITCH,
        aliases=(Alias("no_shuffle", "The same as shuffle False.", "等同shuffle: False。", value=False),),
    )
    drop_remainder: Bool = field(
        True, "Drop samples at the end that do not fill a batch.", "丢弃不足一个批次的剩余样本。", "data", form=SWITCH
    )
    data_layout: one_of("BSH", "SBH") = field(
        "SBH",
        "Layout of hidden states inside the model.",
        "模型内部隐藏状态的排布。",
        "error",
        refused=(
            "hidden states are [s, b, h] (SBH) inside the model, batches are [b, s] outside",
            "模型内部隐藏状态为[s, b, h]（SBH），外部批次为[b, s]",
        ),
    )

    reset_attention_mask: Bool = field(False, "No attention across documents.", "文档之间互不可见。", "output")
    reset_position_ids: Bool = field(False, "Positions start again at each document.", "每个文档重新计位置。", "output")
    eod_mask_loss: Bool = field(False, "No loss on end-of-document tokens.", "文档结束符不计损失。", "optimizer")
    create_attention_mask_in_dataloader: Bool = field(
        True, "The loader makes attention masks.", "由数据加载器生成注意力掩码。", "data", form=OFF
    )
    pad_to_multiple_of: PositiveInt = field(
        8,
        "With variable_seq_lengths, conversations are filled up to a multiple of this instead of seq_length.",
        "variable_seq_lengths时，对话填充到该值的倍数而不是seq_length。",
        "data",
    )
    pad_token_id: Int | None = field(None, "Token that fills up samples; it has no loss.", "填充token，不计损失。", "data")
    eos_token_id: Count = field(
        0, "Token that ends a document.", "文档结束token。", "data", derived="the tokenizer's, where it is needed"
    )

    tokenizer_type: one_of(*TOKENIZERS) | None = field(None, "Kind of tokenizer.", "分词器种类。", "parameters")
    tokenizer_model: Str | None = field(None, "Tokenizer file.", "分词器文件。", "parameters")
    tokenizer_name_or_path: Str | None = field(
        None, "Folder of a Hugging Face tokenizer.", "Hugging Face分词器目录。", "parameters"
    )
    use_fast_tokenizer: Bool = field(
        True,
        "Use the fast form of a Hugging Face tokenizer.",
        "使用fast分词器。",
        "parameters",
        form=SWITCH,
        aliases=(
            Alias(
                "tokenizer_not_use_fast",
                "The same as use_fast_tokenizer False.",
                "等同use_fast_tokenizer: False。",
                convert=conversions.slow_tokenizer,
            ),
        ),
    )
    vocab_file: Str | None = field(None, "Vocabulary file of a GPT2 tokenizer.", "GPT2分词器的词表文件。", "parameters")
    merge_file: Str | None = field(None, "Merges file of a GPT2 tokenizer.", "GPT2分词器的合并文件。", "parameters")
    vocab_size: PositiveInt | None = field(
        None,
        "Vocabulary size before padding.",
        "填充前的词汇量。",
        "parameters",
        note=(
            "unset: the tokenizer's; without padded_vocab_size padded to a multiple of make_vocab_size_divisible_by * tp",
            "不设置时取分词器的词汇量；未设padded_vocab_size时填充到make_vocab_size_divisible_by乘tp的倍数",
        ),
    )
    vocab_extra_ids: Count = field(0, "Extra ids behind the vocabulary.", "词表之后的附加id数。", "parameters")

    def derive(self):
        """Fill derived fields: the loader passes once by default, as in Megatron."""
        super().derive()
        if self.dataloader_type is None:
            self.fill(dataloader_type="single")
