"""``use_checkpoint_args``: the model as the checkpoint's own configuration describes it, whatever was typed.

Which settings: those that Megatron takes (``load_args_from_checkpoint``), and the others of ours that change what the same
weights compute.
"""

from mindspeed_ms.config.errors import Problem
from mindspeed_ms.config.schema import TrainingConfig
from mindspeed_ms.layout.gpt_sizes import NORMALIZATIONS

WARNING = "warning: "  # such a notice is a warning in the log of a run
_T, _M = "training_config", "model_config"
_OUTPUT = TrainingConfig.model_fields["output_dir"].default
_TAKEN = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "max_position_embeddings",
    "position_embedding_type",
    "add_position_embedding",
    "use_rotary_position_embeddings",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "add_bias_linear",
    "qkv_has_bias",
    "out_proj_has_bias",
    "mlp_has_bias",
    "hidden_act",
    "gated_linear_unit",
    "normalization",
    "norm_epsilon",
    "apply_layernorm_1p",
    "use_sandwich_norm",
    "apply_residual_connection_post_norm",
    "use_final_norm",
    "apply_query_key_layer_scaling",
    "untie_embeddings_and_output_weights",
    "attention_dropout",
    "hidden_dropout",
)
_UNLESS_TYPED = ("seq_length",)


def ask_checkpoint(settings):
    """Take the model's settings from the checkpoint that the run starts from, if ``use_checkpoint_args`` is set.

    A setting that was typed and differs is named in a notice; the checkpoint wins. Only ``seq_length`` stays as it was
    typed, and so does a vocabulary that is given without padding (``dataset_config.vocab_size``): its padding follows
    from the tensor parallel size.

    Args:
        settings (Settings): changed in place; a checkpoint that cannot be read becomes a problem.
    """
    if not settings.is_on(f"{_T}.use_checkpoint_args"):
        return
    found = _configuration(settings)
    if found is None:
        return
    place, saved = found
    names = [*_TAKEN, *(name for name in _UNLESS_TYPED if not settings.was_set(f"{_M}.{name}"))]
    if settings.value("dataset_config.vocab_size") is None:
        names.append("vocab_size")
    for name in names:
        if name in saved:
            _take(settings, f"{_M}.{name}", saved[name], place)


def _take(settings, path, value, place):
    before = settings.by_path.get(path)
    if before is not None and settings.was_set(path):
        if _same(before.value, value):
            return
        settings.notices.append(
            f"{WARNING}{before.key} = {before.value!r} ({before.place}) is not used: the checkpoint has {value!r}, and "
            "use_checkpoint_args lets it win"
        )
    if before is not None or value is not None:
        settings.add(path, value, place=place)


def _same(typed, saved):
    forms = [NORMALIZATIONS.get(value, value) if isinstance(value, str) else value for value in (typed, saved)]
    return forms[0] == forms[1] or str(forms[0]).lower() == str(forms[1]).lower()


def _configuration(settings):
    """(where it stands, model_config as the checkpoint has it); None if there is no checkpoint, or a problem with it."""
    # the one place where the configuration needs checkpoints, which are read without MindSpore
    from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
    from mindspeed_ms.core.dist_checkpointing.folders import checkpoint_to_start_from, newest_manifest

    setting = settings.by_path[f"{_T}.use_checkpoint_args"]
    step, own = settings.value(f"{_T}.ckpt_step"), settings.value(f"{_T}.output_dir", _OUTPUT)
    load, other = settings.value(f"{_T}.load_checkpoint"), settings.value(f"{_T}.pretrained_checkpoint")
    if not all(value is None or isinstance(value, str) for value in (load, own, other)) or isinstance(step, str):
        return None  # the sections report it
    resumes = settings.is_on(f"{_T}.resume_training") and not settings.is_on(f"{_T}.finetune")
    try:
        folder, _ = checkpoint_to_start_from(load, own, other, resumes)
        if folder is None and resumes and not settings.is_on(f"{_T}.exit_on_missing_checkpoint"):
            settings.notices.append(f"{setting.key}: {own} holds no checkpoint yet, the model is the one that is given here")
            return None
        if folder is None:
            raise CheckpointError(
                f"{own} holds none"
                if resumes
                else "none is named: set load_checkpoint (--load), pretrained_checkpoint or resume_training"
            )
        place, manifest = newest_manifest(folder, step)
        if manifest is None:
            raise CheckpointError(f"{folder} holds none")
        if not manifest.args.get(_M):
            raise CheckpointError(f"{place} holds no configuration of its model: give the model's settings instead")
    except CheckpointError as error:
        message = f"takes the model's settings from a checkpoint, but {error}"
        settings.problems.append(Problem(setting.key, message, setting.value, setting.place))
        return None
    return place, manifest.args[_M]
