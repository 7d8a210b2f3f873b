"""De-quantised weights by transformers; runs in a process of its own: QUESTION.npz ANSWER.npz.

QUESTION: `blocks`, `scales` (MXFP4), `weight` (bytes), `scale_inv` (FP8). ANSWER: `mxfp4`, `fp8` in bfloat16 bits.
"""

import sys

import numpy as np
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


def bits(tensor):
    """bfloat16 tensor as uint16."""
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


if __name__ == "__main__":
    with np.load(sys.argv[1]) as data:
        given = {name: torch.from_numpy(data[name]) for name in data.files}
    mxfp4 = convert_moe_packed_tensors(given["blocks"], given["scales"])
    weight = given["weight"].view(torch.float8_e4m3fn)
    fp8 = Fp8Dequantize(None)._dequantize_one(weight, given["scale_inv"], torch.bfloat16)
    np.savez(sys.argv[2], mxfp4=bits(mxfp4), fp8=bits(fp8.to(torch.bfloat16)))
