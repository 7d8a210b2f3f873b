"""Sequence and context parallelism: ulysses degree, number of ranks per sequence, divisor of its length."""

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
    # rings balance the causal mask with two pieces per rank
    pieces = cp if cp == 1 or parallel.context_parallel_algo == "ulysses_cp_algo" else 2 * cp
    return lcm(sequence_ranks(parallel), pieces)
