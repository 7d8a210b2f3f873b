"""What lives where: rank groups, pipeline stages, parameter shards and schedules, from the configuration alone.

Pure Python. Nothing here imports MindSpore or another room of the package, so a layout can be checked, drawn or
resharded on any machine.
"""
