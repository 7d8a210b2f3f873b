"""Megatron's legacy model tree."""
