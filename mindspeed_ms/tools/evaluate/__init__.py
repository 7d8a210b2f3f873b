"""Command line of evaluation.py: perplexity, multiple choice and generation tasks."""
