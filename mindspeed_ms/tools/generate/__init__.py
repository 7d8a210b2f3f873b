"""Generation and chat in the terminal: `python -m mindspeed_ms.tools.generate --help`, `inference.py`, docs/inference.md."""
