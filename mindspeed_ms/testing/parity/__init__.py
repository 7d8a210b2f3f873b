"""Parity with Megatron-LM: recorded runs, layouts to try them in, names of parameters, and the runner."""
