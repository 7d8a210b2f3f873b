"""Random numbers: named states for dropout, and initial weights that are the same in every layout.

MindSpore's own CPU generators ignore `Generator` and cannot be restored, so masks come from numpy's Philox on CPU and from
`ms.Generator` on Ascend, behind one interface. Initial weights always come from Philox on the host, keyed by the global
name of the parameter and the block of rows: every layout starts from the same weights and a rank draws only its blocks.
"""

import zlib
from contextlib import contextmanager

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from mindspeed_ms.core.device import device_target, to_dtype

ROWS_PER_BLOCK = 64
"""Rows of one independently drawn block of a parameter; part of the definition of the initial weights."""

DATA_PARALLEL_RNG = "data-parallel-rng"
MODEL_PARALLEL_RNG = "model-parallel-rng"
EXPERT_PARALLEL_RNG = "expert-parallel-rng"


class RngState:
    """Random number stream that can be saved and restored."""

    def __init__(self, seed):
        self.seed = int(seed)
        self._on_host = device_target() == "CPU"
        if self._on_host:
            self._generator = np.random.Generator(np.random.Philox(self.seed))
        else:
            self._generator = ms.Generator()
            self._generator.manual_seed(self.seed)

    def keep_mask(self, shape, keep_probability):
        """Boolean Tensor of `shape`, True with `keep_probability`."""
        if not 0.0 <= keep_probability <= 1.0:
            raise ValueError(f"keep probability is {keep_probability}: expected 0 to 1.")
        if self._on_host:
            # 24 bits are enough for a probability and half the cost of doubles
            draws = self._generator.random(shape, np.float32)
            return Tensor.from_numpy(np.less(draws, np.float32(keep_probability)))
        return ms.mint.rand(*shape, generator=self._generator) < keep_probability

    def uniform(self, shape):
        """Float32 Tensor of `shape`, uniform in [0, 1)."""
        if self._on_host:
            return Tensor.from_numpy(self._generator.random(shape, np.float32))
        return ms.mint.rand(*shape, generator=self._generator)

    def normal(self, shape):
        """Float32 Tensor of `shape`, standard normal."""
        if self._on_host:
            return Tensor.from_numpy(self._generator.standard_normal(shape, np.float32))
        return ms.mint.randn(*shape, generator=self._generator)

    def state(self):
        """A picklable copy of the position in the stream."""
        return self._generator.bit_generator.state if self._on_host else self._generator.get_state().asnumpy()

    def draw_seed(self):
        """A seed (int) for an operator that draws its own numbers, such as fused attention with dropout."""
        return int(float(self.uniform((1,)).asnumpy()[0]) * 2**24)

    def set_state(self, state):
        """Restore a position that `state()` returned."""
        if self._on_host:
            self._generator.bit_generator.state = state
        else:
            self._generator.set_state(Tensor(state))


class RngTracker:
    """Tracker of named random states, one of which is current. Source: Megatron's CudaRNGStatesTracker."""

    def __init__(self):
        self.reset()

    def reset(self):
        """Remove all named states and start the default one from seed 0."""
        self.initial_seed = 0  # seed of the initial weights: the run's own, without rank offsets
        self.initialized_names = {}  # how many stand-alone layers of each class were initialised since then
        self._states = {}
        self._default = self._current = RngState(0)

    @property
    def current(self):
        """Current state, which dropout draws from."""
        return self._current

    def set_default(self, seed):
        """Restart the default state (equal on all ranks of a tensor-parallel group)."""
        self._default = self._current = RngState(seed)

    def add(self, name, seed):
        """Add a named state.

        Raises:
            ValueError: the name exists, or another state has this seed (their streams would be the same).
        """
        if name in self._states:
            raise ValueError(f"random state {name!r} exists already: reset the tracker first.")
        if any(state.seed == int(seed) for state in self._states.values()):
            raise ValueError(f"seed {seed} is used by another random state: {name!r} would repeat its numbers.")
        self._states[name] = RngState(seed)

    def is_initialized(self):
        """Whether there is any named state."""
        return bool(self._states)

    @contextmanager
    def fork(self, name=MODEL_PARALLEL_RNG):
        """Context manager: draw from the named state.

        Raises:
            ValueError: no state has this name.
        """
        if name not in self._states:
            raise ValueError(
                f"random state {name!r} is not known: expected one of {sorted(self._states)}. "
                "Call model_parallel_manual_seed (set_seed) first."
            )
        previous, self._current = self._current, self._states[name]
        try:
            yield self._current
        finally:
            self._current = previous

    def get_states(self):
        """Positions of all states, picklable: `{"default": ..., name: ...}`."""
        return {"default": self._default.state(), **{name: state.state() for name, state in self._states.items()}}

    def set_states(self, states):
        """Restore what `get_states` returned.

        Raises:
            ValueError: the names differ from the present ones.
        """
        names = {"default", *self._states}
        if set(states) != names:
            raise ValueError(f"random states {sorted(states)} do not fit this run's {sorted(names)}.")
        for name, position in states.items():
            (self._default if name == "default" else self._states[name]).set_state(position)


_tracker = None


def get_rng_tracker():
    """RngTracker of this process."""
    global _tracker
    if _tracker is None:
        _tracker = RngTracker()
    return _tracker


def model_parallel_manual_seed(
    seed,
    tensor_rank=0,
    pipeline_rank=0,
    data_rank=0,
    expert_rank=0,
    expert_tensor_rank=0,
    data_parallel_random_init=False,
    context_rank=0,
):
    """Seed every state by Megatron's arithmetic (`model_parallel_cuda_manual_seed`).

    Default and data-parallel: seed + 100 * pipeline_rank (+ 10 * data_rank with `data_parallel_random_init`), equal
    within a tensor-parallel group. Model-parallel: that + 2718 + tensor_rank. Expert: that + 1024 + 100 * expert_rank +
    expert_tensor_rank. Ranks of context parallelism hold other tokens, so 7919 * context_rank is added to all but the
    data-parallel one (Megatron gives them one stream).
    """
    tracker = get_rng_tracker()
    tracker.reset()
    tracker.initial_seed = int(seed)
    seed = int(seed) + 100 * pipeline_rank + (10 * data_rank if data_parallel_random_init else 0)
    tracker.add(DATA_PARALLEL_RNG, seed)
    seed += 7919 * context_rank
    tracker.set_default(seed)
    tracker.add(MODEL_PARALLEL_RNG, seed + 2718 + tensor_rank)
    tracker.add(EXPERT_PARALLEL_RNG, seed + 1024 + 100 * expert_rank + expert_tensor_rank)


def initial_values(name, sharding, kind, value, seed, dtype="float32"):
    """Initial values (Tensor) of this rank's part of a parameter; the global values are the same in every layout.

    Args:
        name: global name of the parameter.
        sharding: `layout.ParameterSharding` (global shape and what this rank holds).
        kind: "normal" (mean 0, standard deviation `value`), "constant" (`value`), "zeros" or "ones".
        value: see `kind`.
        seed: seed of the run.
        dtype: dtype of the result; normal values are drawn in float32 and rounded once.
    """
    shape, dtype = sharding.local_shape, to_dtype(dtype)
    if kind == "zeros":
        return ops.zeros(shape, dtype)
    if kind == "ones" or kind == "constant":
        # by a cast: filling has no bfloat16 form on CPU
        return ops.full(shape, 1.0 if kind == "ones" else float(value), dtype=ms.float32).astype(dtype)
    if kind != "normal":
        raise ValueError(f"initialisation {kind!r} of {name} is unknown: expected normal, constant, zeros or ones.")
    tensor = Tensor.from_numpy(normal_values(name, sharding, float(value), seed))
    return tensor if dtype == ms.float32 else tensor.astype(dtype)


def normal_values(name, sharding, standard_deviation, seed):
    """Normally distributed values of this rank's part of a parameter (float32 array), drawn block of rows by block."""
    global_shape = tuple(sharding.global_shape)
    rows, width = global_shape[0], global_shape[1:]
    local = np.empty(sharding.local_shape, np.float32)
    axis, ranges = sharding.axis, sharding.ranges
    row_ranges = ranges if axis == 0 else (sharding.leading or (0, rows),)
    offset = 0
    for start, stop in row_ranges:
        for block in range(start // ROWS_PER_BLOCK, -(-stop // ROWS_PER_BLOCK)):
            first = block * ROWS_PER_BLOCK
            values = _draw_block(name, block, (min(ROWS_PER_BLOCK, rows - first), *width), seed)
            low, high = max(start, first), min(stop, first + len(values))
            part = values[low - first : high - first]
            if axis is not None and axis > 0:
                part = np.concatenate([np.take(part, range(*columns), axis=axis) for columns in ranges], axis=axis)
            local[offset : offset + high - low] = part
            offset += high - low
    local *= np.float32(standard_deviation)
    return local


def _draw_block(name, block, shape, seed):
    key = (int(seed) & 0xFFFFFFFFFFFFFFFF) << 64 | zlib.crc32(name.encode()) << 32 | block
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, np.float32)
