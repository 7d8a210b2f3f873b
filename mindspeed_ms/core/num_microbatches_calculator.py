"""Number of micro-batches of a step, also during a batch-size ramp-up.

Source: Megatron core, `num_microbatches_calculator.py` (names and rules).
"""

import contextlib

from mindspeed_ms.core.logging import logger

_calculator = None


class ConstantNumMicroBatchesCalculator:
    """Calculator with a fixed global batch size.

    Args:
        global_batch_size (int): samples of a step over all data-parallel ranks.
        micro_batch_size (int): samples of one forward on one rank.
        data_parallel_size (int): data-parallel ranks.

    Raises:
        ValueError: the global batch does not divide into micro-batches; names the nearest valid sizes.
    """

    def __init__(self, global_batch_size, micro_batch_size, data_parallel_size):
        check_batch_sizes(global_batch_size, micro_batch_size, data_parallel_size)
        self.micro_batch_size = micro_batch_size
        self.current_global_batch_size = global_batch_size
        self.num_micro_batches = global_batch_size // (micro_batch_size * data_parallel_size)

    def update(self, consumed_samples):
        """Do nothing: a fixed size does not depend on consumed samples."""

    def use_full_size(self):
        """Do nothing: the size is always the full one."""


class RampupBatchsizeNumMicroBatchesCalculator:
    """Calculator with a global batch size that grows by equal increments over the first samples.

    Args:
        global_batch_size (int): the size at the end.
        micro_batch_size (int): samples of one forward on one rank.
        data_parallel_size (int): data-parallel ranks.
        start_global_batch_size (int): the size at the start.
        batch_size_increment (int): growth at each increment.
        ramup_samples (int): samples over which the size grows.
        decrease_batch_size_if_needed (bool): round sizes that do not divide down to ones that do.

    Raises:
        ValueError: a size of the ramp does not divide into micro-batches, or the increments do not meet the end.
    """

    def __init__(
        self,
        global_batch_size,
        micro_batch_size,
        data_parallel_size,
        start_global_batch_size,
        batch_size_increment,
        ramup_samples,
        decrease_batch_size_if_needed=False,
    ):
        values = {"start batch size": start_global_batch_size, "batch size increment": batch_size_increment}
        for name, value in values.items():
            if value <= 0:
                raise ValueError(f"rampup_batch_size: the {name} is {value}: expected a positive number.")
        difference = global_batch_size - start_global_batch_size
        if ramup_samples < 0 or difference < 0 or difference % batch_size_increment:
            raise ValueError(
                f"rampup_batch_size is [{start_global_batch_size}, {batch_size_increment}, {ramup_samples}] with a "
                f"global batch of {global_batch_size}: expected steps of {batch_size_increment} to lead from the first "
                "exactly to the last, over a number of samples that is not negative."
            )
        if not decrease_batch_size_if_needed:
            for size in range(start_global_batch_size, global_batch_size + 1, batch_size_increment):
                check_batch_sizes(size, micro_batch_size, data_parallel_size)
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.start_global_batch_size = start_global_batch_size
        self.batch_size_increment = batch_size_increment
        self.ramup_samples = ramup_samples
        increments = difference // batch_size_increment
        self.rampup_samples_per_increment = ramup_samples / increments if increments else 0
        self.update(0)

    def update(self, consumed_samples):
        """Choose the size for a step that starts after `consumed_samples`."""
        self._use(self._size_after(consumed_samples))

    def use_full_size(self):
        """Choose the size at the end of the ramp-up."""
        self._use(self.global_batch_size)

    def _size_after(self, consumed_samples):
        if consumed_samples > self.ramup_samples or not self.rampup_samples_per_increment:
            return self.global_batch_size
        steps = int(consumed_samples / self.rampup_samples_per_increment)
        return min(self.start_global_batch_size + steps * self.batch_size_increment, self.global_batch_size)

    def _use(self, size):
        unit = self.micro_batch_times_data_parallel_size
        size = max(size // unit * unit, unit)  # sizes divide unless decrease_batch_size_if_needed let them pass
        self.current_global_batch_size = size
        self.num_micro_batches = size // self.micro_batch_times_data_parallel_size


def check_batch_sizes(global_batch_size, micro_batch_size, data_parallel_size):
    """Raise ValueError unless the global batch is a positive multiple of micro-batch times data-parallel ranks."""
    unit = micro_batch_size * data_parallel_size
    if unit <= 0:
        raise ValueError(
            f"micro batch size is {micro_batch_size} and data-parallel size {data_parallel_size}: expected positive numbers."
        )
    if global_batch_size <= 0 or global_batch_size % unit:
        below = global_batch_size // unit * unit
        nearest = f"{below} or {below + unit}" if below > 0 else f"{unit}"
        raise ValueError(
            f"global batch size {global_batch_size} is not a multiple of micro batch size "
            f"{micro_batch_size} x data-parallel size {data_parallel_size} = {unit}: use {nearest}."
        )


def init_num_microbatches_calculator(
    rank, rampup_batch_size, global_batch_size, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed=False
):
    """Set up the calculator of this process.

    Args:
        rank (int): global rank; rank 0 logs the numbers.
        others: as `make_num_microbatches_calculator`.
    """
    global _calculator
    _calculator = make_num_microbatches_calculator(
        rampup_batch_size, global_batch_size, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed
    )
    if rank == 0:
        logger.info(
            "%d micro-batches of %d samples on each of %d data-parallel ranks make a global batch of %d",
            get_num_microbatches(),
            micro_batch_size,
            data_parallel_size,
            get_current_global_batch_size(),
        )


def make_num_microbatches_calculator(
    rampup_batch_size, global_batch_size, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed=False
):
    """Calculator for these batch sizes.

    Args:
        rampup_batch_size (Optional[list[int]]): [start, increment, samples], or None for a fixed size.
        global_batch_size (int): samples of a step over all data-parallel ranks.
        micro_batch_size (int): samples of one forward on one rank.
        data_parallel_size (int): data-parallel ranks.
        decrease_batch_size_if_needed (bool): round a global batch that does not divide down to one that does.
    """
    if decrease_batch_size_if_needed and rampup_batch_size is None:
        unit = micro_batch_size * data_parallel_size
        global_batch_size = max(global_batch_size // unit * unit, unit)
    if rampup_batch_size is None:
        return ConstantNumMicroBatchesCalculator(global_batch_size, micro_batch_size, data_parallel_size)
    if len(rampup_batch_size) != 3:
        raise ValueError(
            f"rampup_batch_size is {list(rampup_batch_size)}: expected three numbers, start, increment and samples."
        )
    start, increment, samples = (int(value) for value in rampup_batch_size)
    return RampupBatchsizeNumMicroBatchesCalculator(
        global_batch_size, micro_batch_size, data_parallel_size, start, increment, samples, decrease_batch_size_if_needed
    )


def iterations_of_samples(calculator, train_samples, ramp_up_samples=0):
    """Number of steps that use at most `train_samples` samples; a last partial batch is left out, as in Megatron.

    Args:
        calculator: as `make_num_microbatches_calculator` gives; a ramp-up is moved along.
        train_samples (int): length of the run.
        ramp_up_samples (int): samples of the ramp-up; 0 without one.
    """
    consumed = iterations = 0
    while True:
        calculator.update(consumed)
        size = calculator.current_global_batch_size
        if consumed > ramp_up_samples or consumed + size > train_samples:
            return iterations + max(0, train_samples - consumed) // size
        consumed += size
        iterations += 1


def destroy_num_microbatches_calculator():
    """Forget the calculator."""
    global _calculator
    _calculator = None


def _current():
    if _calculator is None:
        raise RuntimeError(
            "the number of micro-batches is not known yet: call init_num_microbatches_calculator() first (pretrain does)."
        )
    return _calculator


def is_initialized():
    """Whether the calculator was set up."""
    return _calculator is not None


def get_num_microbatches():
    """Number of micro-batches of the current step on each data-parallel rank."""
    return _current().num_micro_batches


def get_current_global_batch_size():
    """Number of samples of the current step over all data-parallel ranks."""
    return _current().current_global_batch_size


def get_micro_batch_size():
    """Number of samples of one micro-batch."""
    return _current().micro_batch_size


def update_num_microbatches(consumed_samples):
    """Move a batch-size ramp-up to `consumed_samples`."""
    before = get_current_global_batch_size()
    _current().update(consumed_samples)
    if get_current_global_batch_size() != before:
        logger.info("batch size ramp-up: global batch size is now %d", get_current_global_batch_size())


@contextlib.contextmanager
def full_batch_size():
    """Context manager: sizes are those at the end of a ramp-up; evaluations always use them, as in Megatron."""
    calculator = _current()
    before = calculator.current_global_batch_size, calculator.num_micro_batches
    calculator.use_full_size()
    try:
        yield
    finally:
        calculator.current_global_batch_size, calculator.num_micro_batches = before
