"""Upstream's files to a Megatron checkpoint, with the flags of upstream's `convert_ckpt2pt.py`."""

import sys

from mindspeed_ms.tools.converter.__main__ import main

if __name__ == "__main__":
    sys.exit(main(form="ckpt2pt"))
