"""Overlapped parameter gather (`overlap_param_gather`): updated parameters are gathered while the next forward runs."""

from mindspore import Parameter


class OverlappedParamGather:
    """Parameter gather that waits for a bucket when the first cell that needs it is called.

    A cell needs the parameters that it owns and those that it is called with. The first forward, before any update, finds
    parameters that are used otherwise; later forwards wait for these at their beginning.

    Args:
        module (nn.Cell): the chunk; hooks are put on its cells.
        buffers (list[ParamAndGradBuffer]): of the chunk.
    """

    def __init__(self, module, buffers):
        self._bucket_of = {
            id(param): bucket for buffer in buffers for param in buffer.params for bucket in (buffer.bucket_of(param),)
        }
        # later buckets hold the parameters that the forward needs first
        self._buckets = [bucket for buffer in buffers for bucket in reversed(buffer.buckets)]
        self._announced, self._at_once = set(), None
        self._pending = False
        for _, cell in module.cells_and_names():
            own = [param for param in cell.get_parameters(expand=False) if id(param) in self._bucket_of]
            cell.register_forward_pre_hook(lambda _cell, args, own=own: self._before_forward(own, args))

    def start(self):
        """Start the gather of all buckets after an update, in the order of the forward."""
        for bucket in self._buckets:
            bucket.start_param_gather(async_op=True)
        self._pending = True

    def finish(self):
        """Wait for all buckets."""
        if self._pending:
            for bucket in self._buckets:
                bucket.finish_param_gather()
        self._pending = False

    def begin_forward(self):
        """Wait, before the chunk's forward, for parameters that no cell announces (before the first one for all)."""
        if self._at_once is None:
            self.finish()
        elif self._pending:
            for bucket in self._at_once:
                bucket.finish_param_gather()

    def end_forward(self):
        """Wait for all buckets at the end of the chunk's forward."""
        if self._at_once is None:
            self._at_once = {bucket for param, bucket in self._bucket_of.items() if param not in self._announced}
            self._at_once = [bucket for bucket in self._buckets if bucket in self._at_once]
        self.finish()

    def _before_forward(self, own, args):
        needed = own + [arg for arg in args if isinstance(arg, Parameter) and id(arg) in self._bucket_of]
        if self._at_once is None:
            self._announced.update(id(param) for param in needed)
        elif self._pending:
            for param in needed:
                self._bucket_of[id(param)].finish_param_gather()
