"""megatron-core on one CPU rank: it asks about a GPU in a few places, none of which is timed or compared."""

import torch


def redirect_cuda_to_cpu():
    """Answer the questions that megatron-core asks about its GPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    for name in ("empty", "zeros", "ones", "tensor", "arange"):
        original = getattr(torch, name)

        def on_cpu(*args, _original=original, **kwargs):
            if str(kwargs.get("device", "")).startswith("cuda") or isinstance(kwargs.get("device"), int):
                kwargs["device"] = "cpu"
            return _original(*args, **kwargs)

        setattr(torch, name, on_cpu)
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self
