"""Layout without tensors: model description, rank groups, pipeline stages, parameter shards and schedules.

Pure Python. Nothing here imports MindSpore or another room of the package, so a layout can be checked, drawn or
resharded on any machine.
"""
