"""StoredSamples: which of the stored samples of instruction data a run takes, and in which order."""

import numpy as np

from mindspeed_ms.core.datasets.instruction_files import InstructionDataError, InstructionFiles


class StoredSamples:
    """Files of instruction data, and the order in which a run takes their samples; base class of its datasets.

    Args:
        path_prefix (str): `--output-prefix` of preprocessing.
        bounds (Optional[tuple[int, int]]): first sample and one past the last, for splits; None: all.
        num_samples (Optional[int]): how many are taken; passes over the data follow each other as often as needed. None: one
            pass.
        seed (int): with the number of the pass it decides the order.
        shuffle (bool): another random order on every pass; else as stored.
        full_shuffle (bool): with `shuffle`, one random order of all passes together.
        mmap (bool): see IndexedDataset.

    Attributes:
        fields (tuple[str]): of the data, each in files of its own.
        files (InstructionFiles): the stored samples.
        first, stored (int): number of the first one, and how many there are.

    Raises:
        InstructionDataError: files that are missing or do not belong together, no samples.
    """

    fields = ()

    def __init__(self, path_prefix, *, bounds=None, num_samples=None, seed=1234, shuffle=True, full_shuffle=False, mmap=True):
        self.files = InstructionFiles(path_prefix, self.fields, mmap)
        self.first, end = bounds or (0, len(self.files))
        self.stored = end - self.first
        if self.stored <= 0:
            raise InstructionDataError(f"{path_prefix} has {len(self.files)} samples, none of which is in this split.")
        self.num_samples = self.stored if num_samples is None else num_samples
        self.seed, self.shuffle, self.full_shuffle = seed, shuffle, full_shuffle
        self._order = (None, None)

    def __len__(self):
        return self.num_samples

    def stored_index(self, index):
        """Number of the stored sample that is sample `index`.

        Raises:
            IndexError: no such sample.
        """
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        count = self.num_samples if self.full_shuffle else self.stored
        epoch, place = divmod(int(index), count)
        if not self.shuffle:
            return self.first + int(index) % self.stored
        if self._order[0] != epoch:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._order = (epoch, generator.permutation(count))
        return self.first + int(self._order[1][place]) % self.stored

    def used_indices(self):
        """Numbers of the stored samples that the dataset has, ascending: int array."""
        if self.num_samples >= self.stored:
            return np.arange(self.first, self.first + self.stored)
        return np.unique([self.stored_index(index) for index in range(self.num_samples)])
