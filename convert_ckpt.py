"""Convert a checkpoint between Megatron, Hugging Face and our format: `python convert_ckpt.py --help`, docs/conversion.md."""

import sys

from mindspeed_ms.tools.converter.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
