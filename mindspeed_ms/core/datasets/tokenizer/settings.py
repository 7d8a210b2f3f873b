"""Settings of a tokenizer: plain values that can be sent to another process."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenizerSettings:
    """Arguments of `build_tokenizer`. Names and meanings are those of the options (`--tokenizer-type` and so on).

    Attributes:
        tokenizer_type (Optional[str]): PretrainedFromHF, HuggingFaceTokenizer, Llama2Tokenizer, SentencePieceTokenizer,
            GPTSentencePieceTokenizer, GPT2BPETokenizer or NullTokenizer; None: inferred from the other values.
        tokenizer_name_or_path, tokenizer_model (Optional[str]): a Hugging Face folder or a `tokenizer.json`; the
            sentencepiece model. The Hugging Face types take either option, the first one that is given.
        vocab_file, merge_file (Optional[str]): `vocab.json` and `merges.txt` of a GPT2 tokenizer.
        vocab_size (Optional[int]): of the NullTokenizer, without its end of document.
        vocab_extra_ids (int): `<extra_id_N>` tokens behind a SentencePieceTokenizer.
        use_fast (bool): prefer `tokenizer.json` to a sentencepiece model in the same folder.
    """

    tokenizer_type: str | None = None
    tokenizer_name_or_path: str | None = None
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    vocab_extra_ids: int = 0
    use_fast: bool = True

    @classmethod
    def from_config(cls, dataset_config):
        """Tokenizer settings of a `dataset_config` (DatasetConfig)."""
        return cls(
            tokenizer_type=dataset_config.tokenizer_type,
            tokenizer_name_or_path=dataset_config.tokenizer_name_or_path,
            tokenizer_model=dataset_config.tokenizer_model,
            vocab_file=dataset_config.vocab_file,
            merge_file=dataset_config.merge_file,
            vocab_size=dataset_config.vocab_size,
            vocab_extra_ids=dataset_config.vocab_extra_ids,
            use_fast=dataset_config.use_fast_tokenizer,
        )

    @property
    def is_given(self):
        """Whether any setting names a tokenizer."""
        names = self.tokenizer_type, self.tokenizer_name_or_path, self.tokenizer_model, self.vocab_file, self.merge_file
        return any(names)
