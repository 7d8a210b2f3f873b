"""Base classes of handlers, and the Judge of unusable records."""

from abc import ABC, abstractmethod

import numpy as np

from mindspeed_ms.core.datasets.tokenizer import TokenizerError
from mindspeed_ms.tasks.preprocess.errors import BadRecord, RecordError, Unusable

IGNORED_LABEL = -100


class Judge:
    """Treatment of records that cannot be used: count them, or end the run.

    Args:
        tally (Tally): counts.
        skip_invalid (bool): count invalid records too.
    """

    def __init__(self, tally, skip_invalid):
        self.tally, self._skip_invalid = tally, skip_invalid

    def invalid(self, error):
        """Count an invalid record and leave it out, or raise its RecordError."""
        if not self._skip_invalid:
            raise error
        self.tally.drop(error.reason, error.place)

    def drop(self, reason, place):
        """Leave out and count a record that gives no training sample."""
        self.tally.drop(reason, place)

    def run(self, place, function, *arguments):
        """Call `function(*arguments)`; None if it finds the record unusable."""
        try:
            return function(*arguments)
        except BadRecord as error:
            self.invalid(RecordError(place, error.text, error.reason))
        except TokenizerError as error:
            self.invalid(RecordError(place, f"the text cannot be tokenized: {error}", "text that cannot be tokenized"))
        except Unusable as error:
            self.tally.drop(error.reason, place, error.detail)
        return None


class Handler(ABC):
    """Handler: converts records to samples.

    Args:
        settings (Settings): what to do.
        tokenizer (Tokenizer): how to tokenize.

    Attributes:
        keys (tuple[str]): names of the outputs.
        infix (str): text between the output prefix and the key in file names.
        dtype (type): numpy type of the stored ids.
        pad (Optional[int]): id that fills packed sequences.
        remarks (list[str]): what the user should know before the run.
    """

    keys = ()
    infix = "_packed"
    dtype = np.int32  # labels of -100 must fit; upstream stores all fields so
    pad = None

    def __init__(self, settings, tokenizer):
        self.settings, self.tokenizer = settings, tokenizer
        self.remarks = []

    def check_first(self, records):  # noqa: B027  most handlers have nothing to check
        """Raise BadRecord if the first records (list[dict]) of a file show that columns are named wrongly."""

    @abstractmethod
    def encode(self, places, records, judge):
        """Samples of records.

        Args:
            places (list[str]): file and line of each record.
            records (list[dict]): the records.
            judge (Judge): gets the records that are left out.

        Returns:
            dict[str, list[tuple[str, list[int]]]]: for each key the places and ids of the samples.
        """


class RecordHandler(Handler):
    """Handler that converts each record by itself to one sample with a value for every key."""

    @abstractmethod
    def sample(self, record, note):
        """Sample of a record: ids by key, dict[str, list[int]].

        Args:
            record (dict): the record.
            note (Callable[[str], None]): counts something worth knowing.

        Raises:
            BadRecord, Unusable: there is no sample.
        """

    def encode(self, places, records, judge):
        """See Handler."""
        samples = {key: [] for key in self.keys}
        for place, record in zip(places, records):

            def note(text, place=place):
                judge.tally.note(text, place)

            sample = judge.run(place, self.sample, record, note)
            if sample is not None:
                for key in self.keys:
                    samples[key].append((place, sample[key]))
        return samples


def append_end(ids, labels, end):
    """Append the id `end` to a sample that does not end with it."""
    if not ids or ids[-1] != end or labels[-1] != end:
        ids.append(end)
        labels.append(end)
