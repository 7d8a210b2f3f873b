"""Distributed checkpoints, loadable in any layout.

    output_dir/latest_checkpointed_iteration.txt     number of the newest checkpoint, written last
    output_dir/saving_job.json                       the job that saves here now (`job_lock`)
    output_dir/iter_0000100/manifest.json            index of stored tensors (`manifest`); its presence makes it complete
    output_dir/iter_0000100/state_00000.safetensors  tensors that rank 0 wrote (`shard_file`)
    output_dir/iter_0000100/rank_00000.json          random states and position in the data of rank 0

Plain Python, without MindSpore: `manifest`, `slices`, `shard_file`, `reader`, `folders`, `job_lock`, for upstream's files
`ckpt_file`, `upstream_format` and `upstream_optimizer`, for those of torch `torch_file`, and for Megatron's checkpoints
`megatron`. Above them, in a running job: `state` (the tensors of a model and its optimizer), `save`, `load`.
"""
