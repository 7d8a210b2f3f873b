"""Training: arguments, start-up, data loading, the training loop, checkpoints. Names are imported on first use."""

import importlib

_HOMES = {
    "get_args": "initialize",
    "get_all_config": "initialize",
    "get_tensorboard_writer": "tensorboard",
    "get_timers": "timers",
    "initialize_megatron": "initialize",
    "parse_args": "initialize",
    "pretrain": "training",
    "build_trainer": "training",
    "training_run": "training",
    "Trainer": "trainer",
    "TrainOneStep": "train_step",
    "evaluate": "evaluation",
    "get_model": "model_setup",
    "get_optimizer_param_scheduler": "model_setup",
    "get_train_valid_test_num_samples": "data",
    "build_pretraining_data_loader": "data",
    "set_parallel_context": "utils",
    "set_seed": "utils",
    "print_rank_0": "utils",
    "is_last_rank": "utils",
}

__all__ = sorted(_HOMES)


def __getattr__(name):
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
