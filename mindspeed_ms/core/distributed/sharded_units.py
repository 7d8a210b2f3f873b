"""Sharding units (ZeRO-3): parts of a model whose parameters are all-gathered before use and released after it.

Units are the layers of lists of layers, or what `unit_modules` names; the rest (embedding, final norm, head) is one more, the
root, which stays in full from the forward to the last backward of a step. The others are gathered before their forward,
released after it, gathered again when the gradient of their output arrives, and released when all their gradients have been
taken or the backward has come to the next unit. A parameter of several units, or of a unit and a cell outside, belongs to
the root.
"""

from fnmatch import fnmatchcase

from mindspore import Tensor

from mindspeed_ms.core import autograd


class ShardedUnits:
    """Gather and release of the sharding units of one model chunk.

    Args:
        module (nn.Cell): the chunk; hooks are installed on its units.
        ddp_config (DistributedDataParallelConfig): read: overlap_param_gather, param_resident, unit_modules.
    """

    def __init__(self, module, ddp_config):
        self.prefetches = ddp_config.overlap_param_gather
        self.is_resident = ddp_config.param_resident
        self.cells = find_units(module, ddp_config.unit_modules)
        self._unit_of = self._assign(module)
        self._buckets = [[] for _ in range(len(self.cells) + 1)]
        self._arrived = {}
        self._in_work = set()  # units whose backward has begun and that were not released since
        self._in_backward = self._keeps = False

    def _assign(self, module):
        """Unit number of each parameter (by id): that of all cells that own it, else the root's, which is the last."""
        root = len(self.cells)
        inside = {id(cell): number for number, unit in enumerate(self.cells) for _, cell in unit.cells_and_names()}
        unit_of = {}
        for _, cell in module.cells_and_names():
            number = inside.get(id(cell), root)
            for param in cell.get_parameters(expand=False):
                if unit_of.setdefault(id(param), number) != number:
                    unit_of[id(param)] = root
        return unit_of

    def unit_of(self, param):
        """Unit number of a parameter."""
        return self._unit_of[id(param)]

    def attach(self, buffers):
        """Assign the buckets of these buffers to units and install the forward hooks."""
        for buffer in buffers:
            for bucket in reversed(buffer.buckets):  # in the order of the forward
                self._buckets[self.unit_of(bucket.params[0])].append(bucket)
        for number, cell in enumerate(self.cells):
            cell.register_forward_pre_hook(lambda _cell, _args, number=number: self._before_forward(number))
            cell.register_forward_hook(lambda _cell, _args, output, number=number: self._after_forward(number, output))

    # ---- the chunk's forward and step --------------------------------------------------------------------------------

    def begin_forward(self):
        """Prepare the chunk's forward: release units whose backward has finished, gather the root unit."""
        self._in_backward = False
        self._release_worked()
        self._keeps = self.is_resident and autograd.is_grad_enabled()
        self._gather(len(self.cells))

    def end_forward(self, output):
        """End the chunk's forward: install the hook that marks its backward, or without gradients release all units."""
        if autograd.is_grad_enabled():
            for tensor in _differentiable(output):
                autograd.gradient_hook(tensor, self._begin_backward)
        else:
            self.release_all()

    def _begin_backward(self, _grad):
        self._in_backward = True

    def gather_all(self):
        """All-gather all parameters of the chunk."""
        for number in range(len(self._buckets)):
            self._gather(number)

    def release_all(self):
        """Release all parameters."""
        self._arrived.clear()
        self._in_work.clear()
        for number in range(len(self._buckets)):
            self._release(number)

    # ---- a unit ------------------------------------------------------------------------------------------------------

    def _before_forward(self, number):
        self._gather(number)
        self._prefetch(number - 1 if self._in_backward else number + 1)

    def _after_forward(self, number, output):
        for tensor in _differentiable(output):
            autograd.gradient_hook(tensor, lambda _grad: self._before_backward(number))
        if not self._keeps and not self._in_backward:  # in the backward a recomputation precedes it
            self._release(number)

    def _before_backward(self, number):
        self._release_worked(except_for=number)
        self._in_work.add(number)
        self._gather(number)
        self._prefetch(number - 1)

    def _release_worked(self, except_for=None):
        """Release the units whose backward has finished, including those with unused parameters.

        The backward takes operations in the reverse order of the forward, those that depend on nothing but parameters
        too: when the gradient of an earlier unit's output arrives, nothing of the later one is left to do.
        """
        for number in self._in_work - {except_for}:
            self._in_work.remove(number)
            for bucket in self._buckets[number]:
                self._arrived.pop(id(bucket), None)
            if not self._keeps:
                self._release(number)

    def grad_arrived(self, param, bucket):
        """Note the gradient of a parameter; the bucket's last one releases the bucket's parameters."""
        if self._keeps or self.unit_of(param) == len(self.cells):
            return
        arrived = self._arrived.setdefault(id(bucket), set())
        arrived.add(id(param))
        if len(arrived) == len(bucket.params):
            arrived.clear()
            bucket.release_params()

    def _gather(self, number):
        for bucket in self._buckets[number]:
            bucket.finish_param_gather()

    def _prefetch(self, number):
        if self.prefetches and 0 <= number < len(self.cells):
            for bucket in self._buckets[number]:
                bucket.start_param_gather(async_op=True)

    def _release(self, number):
        for bucket in self._buckets[number]:
            bucket.release_params()


def find_units(module, unit_modules=None):
    """Cells of a model that are sharding units, outermost only, in the order of the model.

    Args:
        module (nn.Cell): the model or a chunk of it.
        unit_modules (Optional[sequence]): cell names with wildcards (`fnmatch`, "*.layers.*") or cell classes; None: the
            layers of all lists of layers, cells whose children are all called by numbers.

    Raises:
        ValueError: no cell is one of `unit_modules`.
    """
    cells = list(module.cells_and_names())
    if unit_modules is None:
        in_lists = {id(child) for _, cell in cells for child in _listed_layers(cell)}
    units, inside = [], set()
    for name, cell in cells:
        chosen = id(cell) in in_lists if unit_modules is None else _is_one_of(name, cell, unit_modules)
        if chosen and id(cell) not in inside and any(True for _ in cell.get_parameters()):
            units.append(cell)
            inside.update(id(part) for _, part in cell.cells_and_names())
    if unit_modules is not None and not units:
        raise ValueError(
            f"unit_modules is {unit_modules!r}, but no cell of {type(module).__name__} with parameters has such a name or "
            f"class: expected names like {', '.join(name for name, _ in cells[1:4])}, or classes of cells."
        )
    return units


def _listed_layers(cell):
    children = cell.name_cells()
    return children.values() if children and all(name.isdigit() for name in children) else ()


def _is_one_of(name, cell, unit_modules):
    return any(isinstance(cell, one) if isinstance(one, type) else fnmatchcase(name, one) for one in unit_modules)


def _differentiable(output):
    """Tensors of an output (a Tensor or a sequence) that will receive a gradient."""
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    return [tensor for tensor in outputs if isinstance(tensor, Tensor) and autograd.requires_grad(tensor)]
