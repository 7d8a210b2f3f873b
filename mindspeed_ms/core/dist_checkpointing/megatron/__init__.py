"""Checkpoints of Megatron-LM: read where they are as a Manifest (`manifest`), and written (`writer`).

names        table of parameter names: ours, Megatron core's (local and Transformer Engine specs), its legacy classes'
files        folders and files: which ranks are there
arguments    Megatron's `args` as our configuration; `written_arguments`: the way back
ranks        parameters of each file, in Megatron's order
optimizer    optimizer state of a file; `buffers`: flat buffers of the distributed optimizer; `written_optimizer`: the way back
torch_dist   folders of the format torch_dist; `torch_dist_buffers`: optimizers in flat buffers; `torch_dist_writer`: written
kept         what a checkpoint of ours keeps of Megatron's, for the way back
"""
