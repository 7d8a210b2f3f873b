"""megatron-core on one CPU rank: answers for the few questions that it asks about a GPU."""

import contextlib
import types

import torch


def redirect_cuda_to_cpu():
    """Replace the CUDA functions and devices of torch that megatron-core uses by CPU ones."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    stream = types.SimpleNamespace(synchronize=lambda: None)
    torch.cuda.Stream = torch.cuda.current_stream = lambda *_: stream
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    for name in ("empty", "zeros", "ones", "tensor", "arange"):
        original = getattr(torch, name)

        def on_cpu(*args, _original=original, **kwargs):
            if str(kwargs.get("device", "")).startswith("cuda") or isinstance(kwargs.get("device"), int):
                kwargs["device"] = "cpu"
            return _original(*args, **kwargs)

        setattr(torch, name, on_cpu)
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self
