"""Parity with Megatron-LM: recorded runs, layouts, parameter names, and the runner."""
