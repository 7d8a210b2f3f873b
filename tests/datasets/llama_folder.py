"""A Hugging Face folder of a Llama tokenizer on the recorded sentencepiece model."""

import json

from tests.datasets.golden import data_folder


def write_llama(folder, legacy, drops_blanks):
    """Write it; `drops_blanks`: the model merges blanks, as recorded, else it keeps them, as Llama's."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString((data_folder() / "sp.model").read_bytes())
    if not drops_blanks:
        model.normalizer_spec.remove_extra_whitespaces = False
        model.normalizer_spec.name, model.normalizer_spec.precompiled_charsmap = "identity", b""
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    flags = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {number: {"content": token, **flags} for number, token in ((0, "<unk>"), (1, "<s>"), (2, "</s>"), (600, "<|end|>"))}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "LlamaTokenizer",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "add_bos_token": True,
                "legacy": legacy,
                "added_tokens_decoder": added,
            }
        )
    )
