"""Handler of a pretraining corpus: each text is a document."""

from mindspeed_ms.core.datasets.indexed_format import best_fitting_dtype
from mindspeed_ms.core.datasets.tokenizer import TokenizerError
from mindspeed_ms.tasks.preprocess.conversations import text_of
from mindspeed_ms.tasks.preprocess.errors import column
from mindspeed_ms.tasks.preprocess.handlers.base import Handler


class PretrainHandler(Handler):
    """Handler of plain text: one output for each of `--json-keys`; an empty text gives no document."""

    infix = ""

    def __init__(self, settings, tokenizer):
        super().__init__(settings, tokenizer)
        self.keys = settings.json_keys
        self.dtype = best_fitting_dtype(tokenizer.vocab_size)
        self._end = [tokenizer.eod] if settings.append_eod else []
        self._around = int(tokenizer.adds_bos) + int(tokenizer.adds_eos)
        if not settings.append_eod:
            self.remarks.append("documents are not ended by a token: add --append-eod unless that is meant")

    def encode(self, places, records, judge):
        """See Handler."""
        return {key: self._documents(key, places, records, judge) for key in self.keys}

    def _documents(self, key, places, records, judge):
        kept, texts = [], []
        for place, record in zip(places, records):
            text = judge.run(place, _text, record, key)
            if text:
                kept.append(place)
                texts.append(text)
            elif text == "":
                judge.drop("empty document", place)
        documents = []
        for place, ids in zip(kept, self._encoded(kept, texts, judge)):
            if ids is None:
                continue
            if len(ids) <= self._around:
                judge.drop("empty document", place)
                continue
            documents.append((place, ids + self._end))
            self._note_doubles(documents[-1], judge.tally)
        return documents

    def _encoded(self, places, texts, judge):
        try:
            return self.tokenizer.encode_batch(texts)
        except TokenizerError:  # lone surrogates, words that are no numbers, ...
            return [judge.run(place, self.tokenizer.tokenize, text) for place, text in zip(places, texts)]

    def _note_doubles(self, document, tally):
        place, ids = document
        tokenizer = self.tokenizer
        if tokenizer.bos is not None and ids[:2] == [tokenizer.bos] * 2:
            tally.note("texts with two begin tokens", place)
        if self._end and len(ids) > 1 and ids[-2:] == self._end * 2:
            tally.note("texts with two end tokens", place)


def _text(record, key):
    return text_of(column(record, key, "the text of a document", "--json-keys KEY..."), key)
