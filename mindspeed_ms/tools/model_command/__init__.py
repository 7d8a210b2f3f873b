"""Shared parts of the commands that run a model: generate, serve, inference.py, evaluation.py."""
