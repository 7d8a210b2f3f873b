"""Preprocessing of raw text into Megatron's indexed token files: `preprocess_data.py`. Nothing here imports MindSpore."""
