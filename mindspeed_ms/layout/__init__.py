"""Layout: model description, rank groups, pipeline stages, parameter shards and schedules, without tensors.

Pure Python. Nothing here imports MindSpore or another room of the package, so a layout can be checked, drawn or
resharded on any machine.
"""
