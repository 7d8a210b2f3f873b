"""One short training with everything that a person or a tool could see of it recorded; runs in a rank of a forked world."""

import collections
import gc
import hashlib
import logging
import os
import re
import signal
import threading
import time
import types
import zlib

import numpy as np

LENGTH, VOCABULARY, END = 16, 64, 3
BASE = {
    "model_config": {
        "vocab_size": VOCABULARY,
        "num_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "seq_length": LENGTH,
        "init_method_std": 0.2,
    },
    "dataset_config": {"batch_size": 1, "micro_batch_num": 2},
    "training_config": {"seed": 7, "training_iters": 3, "save_enabled": False, "eval_iters": 1},
    "optimizer_config": {"learning_rate": 0.01, "clip_grad": 1.0},
}
# numbers of a line that differ between equal runs
_TIMES = re.compile(r"(Time: |Tokens_per_second: |TFLOPs_per_device: |in )[0-9.]+( s)?")


class Recorder:
    """Patches the borders of the package and keeps what passes them."""

    def __init__(self, minutes=0):
        self.minutes = minutes
        self.lines, self.calls, self.scalars, self.tokens, self.events = [], [], [], [], collections.Counter()
        self._undo, self.writer = [], None

    def __enter__(self):
        from mindspeed_ms import ops
        from mindspeed_ms.core import autograd
        from mindspeed_ms.core.comm.interface import ProcessGroup
        from mindspeed_ms.training import evaluation, metrics, tensorboard, trainer

        self._forms = dict(ops.current_forms())
        ops.current_forms().update({name: self._watch(name, form) for name, form in self._forms.items()})
        for name in (
            "all_reduce",
            "all_reduce_in_place",
            "all_gather",
            "all_gather_into",
            "reduce_scatter",
            "reduce_scatter_into",
            "broadcast",
            "broadcast_in_place",
            "send",
            "recv",
            "isend",
            "irecv",
            "batch_isend_irecv",
        ):
            self._replace(ProcessGroup, name, self._watch(name, getattr(ProcessGroup, name)))
        self._replace(autograd, "deallocate_output", self._watch("deallocate_output", autograd.deallocate_output))
        self._replace(metrics, "draw_loss_curve", lambda *paths: None)  # half of a run's time
        self._replace(np, "memmap", self._count("memmap", np.memmap))
        self._replace(threading.Thread, "start", self._count_threads(threading.Thread.start))
        for name in ("collect", "disable"):
            self._replace(gc, name, self._count(f"gc.{name}", getattr(gc, name)))
        self._replace(tensorboard, "make_tensorboard_writer", self._make_writer)
        self._replace(tensorboard, "set_tensorboard_writer", lambda writer: None)
        for module in (tensorboard, evaluation):
            self._replace(module, "get_tensorboard_writer", lambda: self.writer)
        self._replace(trainer, "time", types.SimpleNamespace(monotonic=lambda: time.monotonic() + 60 * self.minutes))
        self._handler = logging.Handler()
        self._handler.emit = lambda record: self.lines.append(f"{record.levelname} {record.getMessage()}")
        logging.getLogger("mindspeed_ms").addHandler(self._handler)
        return self

    def __exit__(self, *exception):
        from mindspeed_ms import ops

        logging.getLogger("mindspeed_ms").removeHandler(self._handler)
        ops.current_forms().update(self._forms)
        for owner, name, value in reversed(self._undo):
            setattr(owner, name, value)

    def _replace(self, owner, name, value):
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _watch(self, name, function):
        def watched(*args, **kwargs):
            self.calls.append((name, *map(_shown, args), *((key, _shown(value)) for key, value in kwargs.items())))
            return function(*args, **kwargs)

        return watched

    def _count(self, name, function):
        def counted(*args, **kwargs):
            self.events[name] += 1
            return function(*args, **kwargs)

        return counted

    def _count_threads(self, start):
        def counted(thread):
            if thread.name.startswith("checkpoint"):  # others come and go with the libraries
                self.events[thread.name] += 1
            return start(thread)

        return counted

    def _make_writer(self, folder, queue_size):
        self.scalars.append((os.path.basename(folder), queue_size))
        self.writer = types.SimpleNamespace(
            flush=lambda: None, add_scalar=lambda name, value, step: self.scalars.append((name, step))
        )
        return self.writer


def _shown(value):
    """A call's argument as text: of tensors dtype and shape, of objects the class."""
    if isinstance(getattr(value, "shape", None), tuple):
        return f"{value.dtype}{tuple(value.shape)}"
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_shown, value))}]"
    return f"{type(value).__name__}{getattr(value, 'ranks', '')}"


class Samples:
    """`count` samples by index, from a TokenDataset over a fixed random text with ends of documents."""

    def __init__(self, all_config, count, recorder, nan=False):
        from mindspeed_ms.core.datasets.token_dataset import TokenDataset

        settings, length = all_config.dataset_config, all_config.model_config.seq_length
        text = np.random.RandomState(0).randint(0, VOCABULARY, length * count + 1).astype(np.int32)
        text[5::11] = END
        self.data = TokenDataset(
            text, length, END, settings.reset_position_ids, settings.reset_attention_mask, settings.eod_mask_loss
        )
        self.count, self.recorder, self.nan = count, recorder, nan

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        sample = self.data[index]
        self.recorder.tokens.append(zlib.crc32(np.ascontiguousarray(sample["tokens"]).tobytes()))
        if self.nan:
            sample = {**sample, "loss_mask": sample["loss_mask"] * np.float32("nan")}
        return sample


def get_batch(data_iterator):
    batch = next(data_iterator)
    return {name: batch.get(name) for name in ("tokens", "position_ids", "attention_mask", "loss_mask", "labels")}


def record(settings, folder, count=40, nan=False, terminate=False, loader=False, minutes=0, diverge=False, files=False):
    """Train with `settings` (nested dict); `{facet: value}` of this rank.

    Args:
        folder (str): output folder; "{saved}" in a setting is `folder`/../saved.
        count (int): samples of the data.
        nan (bool): the loss is NaN.
        terminate (bool): SIGTERM arrives in the second step, if anything handles it.
        loader (bool): the data is a loader instead of a provider's datasets.
        minutes (float): the clock that the training reads is so far ahead.
        files (bool): the data is what the configuration names, and the record has all that is in the batches.
        diverge (bool): rank 1's weights change behind the optimizer's back.
    """
    from mindspeed_ms.config import init_configs_from_dict
    from mindspeed_ms.core import comm, parallel_state, storage
    from mindspeed_ms.core import num_microbatches_calculator as calculator
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.training.gpt_datasets import train_valid_test_datasets_provider
    from mindspeed_ms.training.training import pretrain
    from mindspeed_ms.training.utils import set_parallel_context, set_seed

    parallel_state.destroy_model_parallel()
    calculator.destroy_num_microbatches_calculator()
    settings = {name: dict(section) for name, section in settings.items()}
    settings["training_config"].setdefault("output_dir", str(folder))
    all_config = init_configs_from_dict(settings)
    result, cells = {"error": None}, []
    with Recorder(minutes) as seen:

        def batches(data_iterator):
            if terminate and len(seen.tokens) > 4 and callable(signal.getsignal(signal.SIGTERM)):
                os.kill(os.getpid(), signal.SIGTERM)
            if diverge and comm.get_rank() == 1:
                storage.zero(next(iter(cells[0].get_parameters())))
            batch = get_batch(data_iterator)
            if files:
                seen.tokens += [
                    (name, zlib.crc32(np.ascontiguousarray(value).tobytes()), value.shape)
                    for name, value in batch.items()
                    if value is not None
                ]
            return batch

        def provider(pre_process=True, post_process=True):
            cells.append(GPTModel(all_config.model_config, pre_process=pre_process, post_process=post_process))
            return cells[-1]

        def made_up(numbers):
            del numbers
            return Samples(all_config, count, seen, nan), Samples(all_config, 8, seen), None

        run = None
        try:
            set_parallel_context(all_config.parallel_config)
            set_seed(all_config.training_config.seed)
            data = {"train_data_loader": Samples(all_config, count, seen)} if loader else {}
            datasets = train_valid_test_datasets_provider if files else made_up
            run = pretrain(None if loader else datasets, provider, None, all_config=all_config, get_batch_func=batches, **data)
        except (RuntimeError, ValueError) as error:
            result["error"] = f"{type(error).__name__}: {error}"
    result.update(_facets(run, seen, all_config.training_config.output_dir, all_config.notices))
    return result


def _facets(run, seen, output, notices):
    from mindspeed_ms.core import comm
    from mindspeed_ms.training.checkpointing import whole_parameters
    from mindspeed_ms.training.metrics import read_metrics

    path = os.path.join(output, "metrics.jsonl")
    comm.world_group().barrier()
    metrics = read_metrics(path) if os.path.exists(path) else []
    memory, weights = [sorted(seen.events.items())], ""
    if run is not None and run.model:
        with whole_parameters(run.model):
            weights = hashlib.sha1(
                b"".join(
                    np.ascontiguousarray(param.asnumpy()).tobytes() for chunk in run.model for param in chunk.get_parameters()
                )
            ).hexdigest()
        memory += [
            (str(part.tensor.dtype), part.tensor.size)
            for chunk in run.model
            for buffer in chunk.buffers
            for part in (buffer.param_buffer, buffer.grad_buffer)
        ]
        memory.append([(piece.name, _sizes(state)) for piece, state in run.optimizer.pieces_with_states()])
    return {
        "output": [(line.get("loss"), line.get("grad_norm")) for line in metrics],
        "lr": [
            [line.get("learning_rate") for line in metrics],
            [group["lr"] for group in run.optimizer.param_groups] if run is not None and run.optimizer else None,
        ],
        "optimizer": [weights, [(line.get("loss"), line.get("grad_norm")) for line in metrics]],
        "log": [
            _TIMES.sub(r"\1", line).replace(str(output), "OUT")
            for line in seen.lines
            if "the configuration, and who set it" not in line
        ]
        + list(notices),
        "file": [os.path.basename(output), sorted(_files(output)), seen.scalars],
        "data": [seen.tokens, [call for call in seen.calls if call[0] == "embedding_lookup"]],
        "operators": seen.calls,
        "memory": [memory, seen.calls],
    }


def _sizes(value):
    if isinstance(value, dict):
        return [(key, _sizes(item)) for key, item in sorted(value.items(), key=str)]
    return getattr(value, "size", None)


def _files(folder):
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            # whole kilobytes: what a checkpoint holds, not how its numbers are packed
            yield os.path.relpath(path, folder), os.path.getsize(path) // 1024 if name.endswith(".npz") else None
