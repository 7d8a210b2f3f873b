"""Encoder: converts batches of records to the bytes of token files; runs in the tokenizing processes."""

import os
import threading
from array import array
from dataclasses import dataclass

import numpy as np

from mindspeed_ms.core.datasets.tokenizer import build_tokenizer
from mindspeed_ms.tasks.preprocess.batches import Unreadable
from mindspeed_ms.tasks.preprocess.errors import BadRecord, RecordError
from mindspeed_ms.tasks.preprocess.handlers import make_handler
from mindspeed_ms.tasks.preprocess.handlers.base import Judge
from mindspeed_ms.tasks.preprocess.tally import Tally


@dataclass(frozen=True)
class Encoded:
    """Encoded samples of a batch.

    Attributes:
        columns (dict[str, tuple[bytes, bytes]]): for each key the tokens and the lengths (int32) of the samples.
        tally (Tally): counts of the batch.
    """

    columns: dict
    tally: Tally


class Encoder:
    """Encoder of batches by Settings; the same batch always gives the same bytes.

    Raises:
        TokenizerError, TemplateError, PreprocessError: the settings name something that does not exist.
    """

    def __init__(self, settings):
        self.settings = settings
        self.tokenizer = build_tokenizer(settings.tokenizer)
        self.handler = make_handler(settings, self.tokenizer)
        self.vocab_size = self.tokenizer.vocab_size  # after the template has added its tokens

    def encode(self, batch, limit=None):
        """Encode the first `limit` (None: all) records of a Batch.

        Raises:
            RecordError: a record is invalid and must not be left out.
        """
        places, records = (values[:limit] for values in batch.records())
        tally = Tally(records=len(records))
        judge = Judge(tally, self.settings.skip_invalid)
        usable = []
        for place, record in zip(places, records):
            if isinstance(record, Unreadable):
                judge.invalid(record.error)
            else:
                usable.append((place, record))
        places, records = [place for place, _ in usable], [record for _, record in usable]
        if batch.begins_file:
            try:
                self.handler.check_first(records)
            except BadRecord as error:
                raise RecordError(batch.path, error.text, error.reason) from error
        samples = self.handler.encode(places, records, judge)
        return Encoded({key: self._column(key, samples[key], tally) for key in self.handler.keys}, tally)

    def _column(self, key, samples, tally):
        lists = [ids for _, ids in samples]
        lengths = np.fromiter(map(len, lists), np.int32, len(lists))
        flat = array("i")  # raises OverflowError for a number that is no int32
        for ids in lists:
            flat.fromlist(ids)
        tokens = np.frombuffer(flat, np.int32) if flat else np.empty(0, np.int32)
        if tokens.size and int(tokens.max()) >= self.vocab_size:
            sample = int(np.searchsorted(np.cumsum(lengths), int(tokens.argmax()), "right"))
            raise RecordError(
                samples[sample][0],
                f"the id {tokens.max()} is not below the vocabulary size {self.vocab_size} of "
                f"{self.tokenizer.name}: the tokenizer's files do not fit each other",
                "id outside the vocabulary",
            )
        tally.samples[key], tally.tokens[key] = len(lists), len(tokens)
        return tokens.astype(self.handler.dtype, copy=False).tobytes(), lengths.tobytes()


_encoder = None


def start_process(settings):
    """Prepare this process for `encode_batch`."""
    import signal

    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one core
    _end_with_parent()
    _encoder = Encoder(settings)


def encode_batch(batch, limit):
    """Run `Encoder.encode` in a prepared process."""
    return _encoder.encode(batch, limit)


def _end_with_parent():
    """Start a thread that ends this process when its parent has ended; otherwise it would wait for work without end."""
    from multiprocessing import connection, parent_process

    def watch(sentinel):
        connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, args=(parent_process().sentinel,), daemon=True).start()
