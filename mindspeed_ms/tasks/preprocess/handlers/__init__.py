"""Handlers: conversion of records to samples of token ids for one or several output files."""

from mindspeed_ms.tasks.preprocess.handlers.dialogue import InstructionHandler, PairwiseHandler, PromptHandler
from mindspeed_ms.tasks.preprocess.handlers.process_reward import ProcessRewardHandler
from mindspeed_ms.tasks.preprocess.handlers.text import PretrainHandler
from mindspeed_ms.tasks.preprocess.registry import HANDLER_KINDS

_BY_TASK = {
    "text": PretrainHandler,
    "instruction": InstructionHandler,
    "pairwise": PairwiseHandler,
    "prompt": PromptHandler,
    "process_reward": ProcessRewardHandler,
}


def make_handler(settings, tokenizer):
    """Build the handler (handlers.base.Handler) of Settings."""
    return _BY_TASK[HANDLER_KINDS[settings.handler_name].task](settings, tokenizer)


__all__ = ["make_handler"]
