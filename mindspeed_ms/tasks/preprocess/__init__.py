"""From raw text to Megatron's indexed token files: `preprocess_data.py`. Nothing here imports MindSpore."""
