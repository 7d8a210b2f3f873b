"""Megatron's checkpoint to upstream's files, with the flags of upstream's `convert_pt2ckpt.py`."""

import sys

from mindspeed_ms.tools.converter.__main__ import main

if __name__ == "__main__":
    sys.exit(main(form="pt2ckpt"))
