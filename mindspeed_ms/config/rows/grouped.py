"""Rows for flags without a place in the configuration, from groups of (reason, Chinese reason, {name: default}).

The default tells the form of the flag: False ``--name``, True ``--no-name``, a list several values, anything else one.
"""

from mindspeed_ms.config.rows import ignored, refused
from mindspeed_ms.config.rows.row import IGNORED, LIST, OFF, ON, REFUSED, VALUE, Row, flag_of

# option strings that do not follow from the name
_FLAGS = {
    "use_contiguous_buffers_in_local_ddp": "--no-contiguous-buffers-in-local-ddp",
    "barrier_with_L1_time": "--no-barrier-with-level-1-timing",
    "bert_binary_head": "--bert-no-binary-head",
    "deprecated_use_mcore_models": "--use-mcore-models",
    "use_dist_ckpt_deprecated": "--use-dist-ckpt",
    "dist_ckpt_format_deprecated": "--dist-ckpt-format",
    "ckpt_fully_parallel_save_deprecated": "--ckpt-fully-parallel-save",
    "enable_gloo_process_groups": "--disable-gloo-process-groups",
    "enable_one_logger": "--no-one-logger",
    "inference_max_batch_size": "--inference-max-requests",
    "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication-warmup-flush",
    "perform_initialization": "--no-initialization",
    "retro_verify_neighbor_count": "--retro-no-verify-neighbor-count",
    "tp_comm_bulk_dgrad": "--disable-tp-comm-bulk-dgrad",
    "tp_comm_bulk_wgrad": "--disable-tp-comm-bulk-wgrad",
    "tp_comm_overlap_ag": "--disable-tp-comm-overlap-ag",
    "tp_comm_overlap_rs": "--disable-tp-comm-overlap-rs",
    "tp_comm_split_ag": "--disable-tp-comm-split-ag",
    "tp_comm_split_rs": "--disable-tp-comm-split-rs",
    "skip_bias_add": "--skip-bias-add",
    "input_jitter": "--input-jitter",
}
# further names in a Namespace
_NAMES = {"deprecated_use_mcore_models": ("use_mcore_models",), "use_dist_ckpt_deprecated": ("use_dist_ckpt",)}


def _rows(groups, status, seen):
    for reason, reason_zh, names in groups:
        for name, default in names.items():
            form = ON if default is False else OFF if default is True else LIST if isinstance(default, list) else VALUE
            usual = flag_of(name) if form != OFF else "--no-" + flag_of(name)[2:]
            flag = _FLAGS.get(name, usual)
            flags, off_flags = ((), (flag,)) if form == OFF else ((flag,), ())
            yield Row(
                name, "", flags, off_flags, form, _NAMES.get(name, ()), default, None, status, reason, reason_zh, seen=seen
            )


ROWS = (*_rows(ignored.GROUPS, IGNORED, "log"), *_rows(refused.GROUPS, REFUSED, "error"))
# what Megatron writes into the Namespace while it runs: no options
RUNTIME_NAMES = frozenset(
    (
        "rank",
        "world_size",
        "iteration",
        "curr_iteration",
        "consumed_train_samples",
        "consumed_valid_samples",
        "skipped_train_samples",
        "num_floating_point_operations_so_far",
        "model_type",
        "do_train",
        "do_valid",
        "do_test",
        "encoder_seq_length",
        "typed_options",
        "typed_flags",
        "typed_again",
        "config",
    )
)
