"""Point-to-point communication of pipeline stages: hidden states and their gradients. Source: Megatron core.

The order of transfers comes from a plan of `layout.schedule_order`, which puts all of them into one order over all stages:
nothing here can wait in a circle, whatever the backend buffers.
"""

from contextlib import contextmanager

import numpy as np

from mindspeed_ms import ops
from mindspeed_ms.core import autograd, parallel_state
from mindspeed_ms.core.comm.errors import DeadlockError, MismatchError
from mindspeed_ms.core.comm.interface import P2P
from mindspeed_ms.core.device import to_dtype
from mindspeed_ms.layout.sequence import sequence_ranks

_DIMENSIONS = 3  # hidden states are [s, b, h]


class PipelineMismatchError(RuntimeError):
    """A stage sends a tensor of another shape or dtype than its neighbour expects; the text names both stages and tensors."""


def tensor_shape(model, seq_length=None, micro_batch_size=None):
    """Shape `[s, b, h]` of one rank's hidden states, from the ModelDescription; Megatron's `get_tensor_shapes`."""
    length = (seq_length or model.seq_length) // sequence_ranks(model.parallel)
    return length, micro_batch_size or model.micro_batch_size, model.hidden_size


class InFlight:
    """Handle of one end of a started transfer."""

    def __init__(self, communicator, transfer, handle, index):
        self.transfer = transfer
        self._communicator, self._handle, self._index = communicator, handle, index

    def wait(self):
        """Block until the transfer is complete; returns the received tensor, None for a send."""
        with self._communicator.naming_stages(self.transfer):
            return self._handle.wait_part(self._index)

    def is_completed(self):
        """True if `wait()` would return at once."""
        with self._communicator.naming_stages(self.transfer):
            return self._handle.is_part_completed(self._index)


class Arrived:
    """Handle of a complete transfer."""

    def __init__(self, transfer, tensor=None):
        self.transfer, self._tensor = transfer, tensor

    def wait(self):
        """Received tensor; None for a send."""
        return self._tensor

    def is_completed(self):
        """Always True."""
        return True


class PipelineCommunicator:
    """Communicator that executes the transfers of a pipeline plan on this stage.

    Args:
        model (ModelDescription): dtype of the hidden states, and whether shapes are exchanged.
        shape (tuple): of every tensor, unless shapes are exchanged.
    """

    def __init__(self, model, shape):
        self.group = parallel_state.get_pipeline_model_parallel_group()
        self.exchanges_shapes = model.parallel.variable_seq_lengths
        self.shape = tuple(shape)
        self.recv_dtype = to_dtype(model.parallel.recv_dtype or model.residual_connection_dtype)

    def start(self, transfers, tensors):
        """Start transfers together.

        Args:
            transfers (sequence[Transfer]): in the plan's order.
            tensors (dict[Transfer, Tensor]): what to send; left alone by the caller until the transfer is complete.

        Returns:
            list: one object with `transfer`, `wait()` and `is_completed()` per transfer. With exchanged shapes all
            are complete: the length of a message must be known before it can be received.

        Raises:
            PipelineMismatchError: a tensor has another shape than the neighbour expects.
        """
        if self.exchanges_shapes:
            return [Arrived(transfer, self._exchange(transfer, tensors.get(transfer))) for transfer in transfers]
        messages = []
        for transfer in transfers:
            if transfer.action == "send":
                self._check_shape(transfer, tensors[transfer])
                messages.append(P2P.send(self._sendable(tensors[transfer]), self._rank(transfer)))
            else:
                messages.append(P2P.recv(self.shape, self.recv_dtype, self._rank(transfer)))
        with self.naming_stages(*transfers):
            handle = self.group.batch_isend_irecv(messages)
        return [InFlight(self, transfer, handle, index) for index, transfer in enumerate(transfers)]

    def _exchange(self, transfer, tensor):
        """Execute one transfer, its shape first; complete on return."""
        rank = self._rank(transfer)
        with self.naming_stages(transfer):
            if transfer.action == "send":
                if len(tensor.shape) != _DIMENSIONS:
                    self._refuse(transfer, tensor, f"{_DIMENSIONS} dimensions [s, b, h]")
                self.group.send(np.array(tensor.shape, np.int64), rank)
                return self.group.send(self._sendable(tensor), rank)
            shape = self.group.recv((_DIMENSIONS,), np.int64, rank)
            return self.group.recv(tuple(int(length) for length in shape), self.recv_dtype, rank)

    def _sendable(self, tensor):
        with autograd.no_grad():
            return ops.cast(autograd.detach(tensor), self.recv_dtype)

    def _rank(self, transfer):
        return self.group.ranks[transfer.peer]

    def _check_shape(self, transfer, tensor):
        if tuple(tensor.shape) != self.shape:
            self._refuse(transfer, tensor, f"shape {self.shape} as the configuration says")

    def _refuse(self, transfer, tensor, expected):
        group = self.group
        raise PipelineMismatchError(
            f"pipeline stage {group.rank} (rank {group.ranks[group.rank]}) has a tensor of shape {tuple(tensor.shape)} to "
            f"send ({transfer}), but stage {transfer.peer} (rank {self._rank(transfer)}) expects {expected}. Give batches "
            "of seq_length tokens and batch_size rows, or set variable_seq_lengths (--variable-seq-lengths) for batches "
            "of different length."
        )

    @contextmanager
    def naming_stages(self, *transfers):
        """Context manager: a MismatchError becomes a PipelineMismatchError that names the stages and transfers."""
        try:
            yield
        except DeadlockError:
            raise
        except MismatchError as error:
            group = self.group
            peers = ", ".join(
                f"stage {peer} (rank {group.ranks[peer]})" for peer in sorted({transfer.peer for transfer in transfers})
            )
            raise PipelineMismatchError(
                f"pipeline stage {group.rank} (rank {group.ranks[group.rank]}) and {peers} do not agree on a tensor "
                f"({'; '.join(map(str, transfers))}): {error}. All stages must have the same seq_length, batch_size, "
                "hidden_size and recv_dtype; for batches of different length set variable_seq_lengths "
                "(--variable-seq-lengths)."
            ) from error
