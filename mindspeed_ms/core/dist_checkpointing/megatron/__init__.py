"""Checkpoints of Megatron-LM: read where they are as a Manifest (`manifest`), and written (`writer`).

names        table of parameter names: ours, Megatron core's (local and Transformer Engine specs), its legacy classes'
files        folders and files: which ranks are there
arguments    Megatron's `args` as our configuration, and the way back
ranks        parameters of each file, in Megatron's order
optimizer    optimizer state of a file; `buffers`: the flat buffers of the distributed optimizer
torch_dist   folders of the format torch_dist
"""
