"""Hugging Face folders: config.json, safetensors or .bin files of weights; read through a Manifest, and written."""
