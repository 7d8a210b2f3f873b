"""Files of `torch.save` (`.pt`, `.bin`), read and written without torch; no code from a file ever runs.

    tree = read_torch_file("model_optim_rng.pt")        # dicts, lists, numbers, ...; tensors are TensorReference
    array = tree["model"]["output_layer.weight"].read()  # numpy; bfloat16 as uint16 bits
    write_torch_file("model_optim_rng.pt", tree)         # tensors: TensorReference or TensorToWrite

`objects` (what such trees consist of), `zip_records` (table of a zip file), `pickle_machine` (the opcodes of a pickle),
`unpickler` (what names and calls mean: `allowed` names, inert `constructors`), `reader`; `pickler` and `writer`; `distributed`
(folders of torch.distributed.checkpoint), `check_sums`. Without MindSpore.
"""

from mindspeed_ms.core.dist_checkpointing.torch_file.distributed import read_distributed
from mindspeed_ms.core.dist_checkpointing.torch_file.objects import Global, Opaque, Size, TensorReference, TensorToWrite
from mindspeed_ms.core.dist_checkpointing.torch_file.reader import is_torch_file, read_pickle_file, read_torch_file
from mindspeed_ms.core.dist_checkpointing.torch_file.writer import write_torch_file
