"""Sequence and context parallelism: ulysses degree, number of ranks per sequence, positions of each, divisor of its length."""

from dataclasses import dataclass
from math import lcm

from mindspeed_ms.layout.errors import LayoutError


def ulysses_problem(parallel):
    """Error text about ulysses_degree_in_cp; None if it fits."""
    cp, degree = parallel.context_parallel_size, parallel.ulysses_degree_in_cp
    if parallel.context_parallel_algo != "hybrid_cp_algo" or cp == 1:
        return None
    if degree is None:
        return "must be given for hybrid_cp_algo"
    if degree < 1 or cp % degree or cp // degree < 2:
        return "must divide context_parallel_size and leave a ring of at least 2"
    return None


def ulysses_degree(parallel):
    """Ulysses degree: ranks that exchange heads for sequence inside a context-parallel group; 1 means ring only.

    Raises:
        LayoutError: an unknown algorithm, or a degree that is missing or does not suit the group.
    """
    cp, degree, algorithm = parallel.context_parallel_size, parallel.ulysses_degree_in_cp, parallel.context_parallel_algo
    degrees = {"megatron_cp_algo": 1, "ulysses_cp_algo": cp, "hybrid_cp_algo": degree}
    if algorithm not in degrees:
        raise LayoutError(f"context_parallel_algo '{algorithm}' is unknown, choose one of {list(degrees)}.")
    problem = ulysses_problem(parallel)
    if problem:
        raise LayoutError(f"ulysses_degree_in_cp {degree} with context_parallel_size {cp} {problem}.")
    return degrees[algorithm] if cp > 1 else 1


def sequence_ranks(parallel):
    """Number of ranks over which hidden states between layers are cut along the sequence."""
    tp = parallel.tensor_model_parallel_size if parallel.cuts_sequence else 1
    return parallel.context_parallel_size * tp


def sequence_unit(parallel):
    """Number that must divide the length of a sequence."""
    cp = parallel.context_parallel_size
    has_ring = cp > 1 and parallel.context_parallel_algo != "ulysses_cp_algo"  # a wrong degree is another rule's error
    return lcm(sequence_ranks(parallel), _pieces(cp, 2 if has_ring else 1))


@dataclass(frozen=True)
class SequenceCut:
    """How a sequence is cut over the ranks of context parallelism: `ring` groups of `ulysses` ranks each.

    A group's part of the sequence is two of 2 * ring chunks, the r-th from the beginning and the r-th from the end, so that
    under a causal mask all groups have equal work (Megatron's order); without a ring it is the whole sequence. The ranks of the
    group share it in contiguous pieces, which they exchange for heads around the attention. The rank of context parallelism is
    `ring_rank * ulysses + ulysses_rank`.
    """

    ulysses: int = 1
    ring: int = 1

    @classmethod
    def of(cls, parallel):
        """The cut of a ParallelDescription."""
        degree = ulysses_degree(parallel)
        return cls(degree, parallel.context_parallel_size // degree)

    @property
    def size(self):
        """Number of ranks that share a sequence."""
        return self.ulysses * self.ring

    @property
    def unit(self):
        """Number that must divide the length of a sequence."""
        return _pieces(self.size, self.ring)

    def check(self, length):
        """Raise a LayoutError, which says how much padding is needed, unless the cut divides a sequence of `length` tokens."""
        if length % self.unit:
            padding = -length % self.unit
            raise LayoutError(
                f"a sequence of {length} tokens cannot be cut over {self.size} context parallel ranks: its length must be a "
                f"multiple of {self.unit}; pad it by {padding} to {length + padding} (with loss_mask 0)."
            )

    def ring_spans(self, ring_rank, length):
        """Positions of a group of the ring: [(start, stop), ...] in rising order."""
        if self.ring == 1:
            return [(0, length)]
        chunk = length // (2 * self.ring)
        first, second = ring_rank * chunk, (2 * self.ring - 1 - ring_rank) * chunk
        if first + chunk == second:
            return [(first, second + chunk)]
        return [(first, first + chunk), (second, second + chunk)]

    def spans(self, rank, length):
        """Positions that a rank of context parallelism holds: [(start, stop), ...] in rising order.

        Raises:
            LayoutError: the length cannot be cut, see `check`.
        """
        self.check(length)
        share, found, offset = length // self.size, [], 0
        low = rank % self.ulysses * share
        for start, stop in self.ring_spans(rank // self.ulysses, length):
            first, last = max(low - offset, 0), min(low + share - offset, stop - start)
            if first < last:
                found.append((start + first, start + last))
            offset += stop - start
        return found


def _pieces(size, ring):
    """Number of equal pieces of a sequence; rings balance the causal mask with two pieces per rank."""
    return size if ring == 1 else 2 * size
