"""Counter of the activations that a pipeline stage keeps for its backwards, counted as live objects.

Each tensor that an operator saves is packed into a `Saved`, which dies with the graph that needs it. So the live `Saved`
objects are the tensors that are really kept, whatever the plan says.
"""

import weakref
from contextlib import contextmanager

import numpy as np

from mindspeed_ms.testing import small_trainings as job
from mindspeed_ms.testing.memory import resident_bytes
from mindspeed_ms.testing.parity.runner import local_batch, micro_batches


class Saved:
    """Saved tensor of a backward; `place` is (micro-batch, chunk), `in_layers` whether a transformer layer saved it."""

    def __init__(self, tensor, place, in_layers):
        self.tensor, self.place, self.in_layers = tensor, place, in_layers


class LiveTensors:
    """Counter of saved tensors and stage outputs during a step.

    Args:
        resident_start (int): memory of the process that its growth is counted from.

    Attributes:
        peak (dict): at the moment with the most saved bytes: micro_batches, tensors, layer_tensors, saved_bytes,
            output_bytes.
        most_micro_batches (int): the most (micro-batch, chunk) pairs that were live at once.
        layer_tensors (set[int]): numbers of tensors that the layers of one chunk kept for one micro-batch.
    """

    def __init__(self, resident_start):
        self._live = weakref.WeakSet()
        self._outputs = []
        self._place, self._in_layers = None, False
        self._forwards = {}
        self.peak, self.most_micro_batches, self.layer_tensors = {"saved_bytes": -1}, 0, set()
        self.resident_start, self.resident_peak = resident_start, 0

    def _pack(self, tensor):
        saved = Saved(tensor, self._place, self._in_layers)
        self._live.add(saved)
        return saved

    def following(self, forward_step):
        """Wrap a `forward_step` so that its saved tensors and outputs are counted."""
        from mindspeed_ms.core import autograd, parallel_state

        def step(data_iterator, model):
            chunk = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
            number = self._forwards[chunk] = self._forwards.get(chunk, -1) + 1
            self._place = number, chunk
            with autograd.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
                output, loss_func = forward_step(data_iterator, model)
            self._outputs.append(weakref.ref(output))
            self._look(parallel_state.is_pipeline_last_stage())
            return output, loss_func

        return step

    @contextmanager
    def marking_layers(self):
        """Context manager: mark tensors that transformer layers save."""
        from mindspeed_ms.legacy.model.transformer_block import ParallelTransformer

        original = ParallelTransformer.construct

        def construct(block, *arguments, **keywords):
            self._in_layers = True
            try:
                return original(block, *arguments, **keywords)
            finally:
                self._in_layers = False

        ParallelTransformer.construct = construct
        try:
            yield
        finally:
            ParallelTransformer.construct = original

    def _look(self, is_last):
        live = list(self._live)
        places = {saved.place for saved in live} | {self._place}
        self.most_micro_batches = max(self.most_micro_batches, len(places))
        own = [saved for saved in live if saved.place == self._place and saved.in_layers]
        self.layer_tensors.add(len(own))
        arrays = {saved.tensor.data_ptr(): saved.tensor.nbytes for saved in live}
        outputs = [output for output in (reference() for reference in self._outputs[:-1]) if output is not None]
        self.resident_peak = max(self.resident_peak, resident_bytes())
        if sum(arrays.values()) > self.peak["saved_bytes"]:
            self.peak = {
                "micro_batches": len(places),
                "tensors": len(live),
                "layer_tensors": sum(saved.in_layers for saved in live),
                "saved_bytes": sum(arrays.values()),
                "output_bytes": 0 if is_last else sum(output.nbytes for output in outputs),
            }

    def live_count(self):
        """Number of tensors that are still kept."""
        return len(self._live)


def measure(model_fields, parallel, micro_batches_per_step, rows=1):
    """Run one warm-up step, then one measured step.

    Returns:
        dict: stage, peak, most_micro_batches, layer_tensors, left (tensors still kept after the step), buffer_bytes,
        resident_bytes (growth of VmRSS since the model was built).
    """
    from mindspeed_ms.core import parallel_state

    length = model_fields["seq_length"]
    all_config = job.make_config(
        model_fields, parallel, dataset={"batch_size": rows, "global_batch_size": rows * micro_batches_per_step}
    )
    model, _, step = job.build(all_config)
    data = job.batches(1, length, rows * micro_batches_per_step)
    for name in ("tokens", "labels"):
        data[name] = np.ascontiguousarray(data[name] % model_fields["vocab_size"])
    resident_start = resident_bytes()
    step(micro_batches(local_batch(data, 0, rows), rows), 1)
    live = LiveTensors(resident_start)
    step.forward_step_func = live.following(step.forward_step_func)
    with live.marking_layers():
        step(micro_batches(local_batch(data, 0, rows), rows), 2)
    return {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "peak": live.peak,
        "most_micro_batches": live.most_micro_batches,
        "layer_tensors": sorted(live.layer_tensors),
        "left": live.live_count(),
        "buffer_bytes": sum(chunk.nbytes for chunk in model),
        "resident_bytes": live.resident_peak - live.resident_start,
    }
