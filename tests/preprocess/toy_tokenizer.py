"""A byte-level BPE that merges blanks and line ends with their neighbours, and knows the templates' special tokens."""

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mindspeed_ms.core.datasets.tokenizer import TokenizerSettings, build_tokenizer

SPECIAL = (
    "<s> </s> <|im_start|> <|im_end|> <|endoftext|> <think> </think> <|start_header_id|> <|end_header_id|> <|eot_id|> [INST] "
    "[/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [gMASK] sop <sop> <|system|> <|user|> <|assistant|> <|observation|> <｜User｜> "
    "<｜Assistant｜> <start_of_turn> <end_of_turn> <reserved_106> <reserved_107> <用户> <AI> <role> </role> <|role_end|> "
    "<|start|> <|end|> <|message|> <|channel|>"
).split()
TEXT = (
    "how are you?\n\nfine, and you?\n\n\nwell then: \n\nUser: \n\nAssistant: the end.\n\n### Response:\n\nHuman: what is it? "
) * 20


@cache
def _content():
    backend = Tokenizer(models.BPE())
    # whole lines are one word, so that merges cross blanks and line ends
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=5,
    )
    backend.train_from_iterator([TEXT], trainer)
    return backend.to_str()


def write_tokenizer(folder, **config):
    """A Hugging Face folder with it; returns the folder's name."""
    (folder / "tokenizer.json").write_text(_content(), encoding="utf-8")
    roles = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles | config), encoding="utf-8")
    return str(folder)


def toy_tokenizer(folder, **config):
    """It, built from that folder."""
    return build_tokenizer(TokenizerSettings("PretrainedFromHF", tokenizer_name_or_path=write_tokenizer(folder, **config)))
