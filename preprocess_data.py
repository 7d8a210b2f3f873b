"""Turn text into indexed token files for training: `python preprocess_data.py --help`, docs/preprocess.md."""

import sys

from mindspeed_ms.tasks.preprocess.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
