"""Metrics of a training: log lines, metrics.jsonl, TensorBoard, progress bar, loss curve."""

import contextlib
import json
import math
import os
import sys
import time
from dataclasses import dataclass, replace

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core import comm
from mindspeed_ms.core.launch_environment import launch_environment
from mindspeed_ms.core.logging import logger, set_progress_bar
from mindspeed_ms.layout.flops import flops_per_token
from mindspeed_ms.training.tensorboard import TensorboardEvents
from mindspeed_ms.training.timers import get_timers

METRICS_FILE = "metrics.jsonl"
LOSS_CURVE_FILE = "loss_curve.png"


@dataclass
class StepReport:
    """Reported numbers of one step.

    Attributes:
        losses (dict[str, float]): reported losses; the first is the main one.
        tokens (float): tokens of the step over all ranks.
        finite_grads (bool): False: nothing was updated.
        loss_scale, learning_rate, grad_norm (float): as used by the step.
        num_zeros (Optional[int]): zero gradients, if they are counted.
        params_norm (Optional[float]): norm of the weights, if it is asked for.
        seconds (float): duration.
        samples_without_tokens (int): samples whose labels are all masked.
        has_tokens (bool): False: all samples of the step are such.
    """

    losses: dict
    tokens: float
    finite_grads: bool
    loss_scale: float
    learning_rate: float
    grad_norm: float
    num_zeros: int = None
    params_norm: float = None
    seconds: float = 0.0
    samples_without_tokens: int = 0
    has_tokens: bool = True

    @property
    def loss(self):
        """Main loss, the first of the losses; NaN for a step without a token."""
        return next(iter(self.losses.values()), math.nan)


class IntervalLosses:
    """Mean losses of the steps between two log lines. Source: Megatron, `training_log`.

    Steps that updated nothing, and those without a token, are left out, unless all are.
    """

    def __init__(self):
        self.start()

    def start(self):
        """Begin an interval."""
        self._sums, self._last = {}, {}

    def add(self, report):
        """Add the losses of a StepReport."""
        self._last = report.losses
        if report.finite_grads:
            for name, loss in report.losses.items():
                if not math.isnan(loss):
                    total, count = self._sums.get(name, (0.0, 0))
                    self._sums[name] = total + loss, count + 1

    def means(self):
        """Mean loss by name (dict[str, float]), the main loss first."""
        means = {name: total / count for name, (total, count) in self._sums.items()}
        # where no step counts: the last one's
        return {name: means.get(name, loss) for name, loss in {**self._last, **means}.items()}


def format_log_line(report, train_state, total_iterations, milliseconds, tokens_per_second, tflops=None):
    """Log line of a step: upstream's fields in upstream's order, then ours. The losses are those of the report."""
    line = (
        f"Epoch: {train_state.epoch}, Step: {train_state.step_in_epoch}, Loss: {report.loss:.16f}, "
        f"Finite_grads: {report.finite_grads}, Loss_scale: {report.loss_scale}, "
        f"Learning_rate: {report.learning_rate:.16f}, Grad_norm: {report.grad_norm}, "
        f"Time: {milliseconds:.2f} ms, Iteration: {train_state.iteration}/{total_iterations}, "
        f"Consumed_samples: {train_state.consumed_train_samples}, "
        f"Tokens_per_second: {tokens_per_second:.1f}"
    )
    if tflops is not None:
        line += f", TFLOPs_per_device: {tflops:.4g}"
    for name, value in list(report.losses.items())[1:]:
        line += f", {name}: {value:.6g}"
    if report.num_zeros is not None:
        line += f", Num_zeros: {report.num_zeros}"
    if report.params_norm is not None:
        line += f", Params_norm: {report.params_norm:.6g}"
    if train_state.skipped_iterations:
        line += f", Skipped_iterations: {train_state.skipped_iterations}"
    return line


class MetricsLogger:
    """Reports of steps and evaluations, inside `opened`.

    Every msrun worker has a log file of its own and gets all lines; otherwise rank 0 logs alone. Files are rank 0's.

    Args:
        output_dir (str): where metrics.jsonl and the picture go.
        total_iterations (int): length of the training.
        log_interval (Optional[int]): steps between log lines, which give the means of losses and time over these steps;
            None: every step. metrics.jsonl and TensorBoard get each step.
        events (Optional[TensorboardEvents]): where TensorBoard's entries go.
        flops_per_token (Optional[float]): operations of a token, to report TFLOP/s of each device.
        has_perplexity (bool): the main loss is a cross entropy of tokens, which has a perplexity.
    """

    def __init__(self, output_dir, total_iterations, log_interval=None, events=None, flops_per_token=None, has_perplexity=True):
        self.flops_per_token = flops_per_token
        self.has_perplexity = has_perplexity
        self.output_dir = output_dir
        self.total_iterations = total_iterations
        self.log_interval = log_interval or 1
        self.events = events or TensorboardEvents()
        self.is_main = comm.get_rank() == 0
        self.speaks = self.is_main or launch_environment().launcher == "msrun"
        self._seconds, self._tokens, self._steps = 0.0, 0.0, 0
        self._losses = IntervalLosses()
        self._progress = None
        self._file = None

    @classmethod
    def of(cls, all_config, total_iterations):
        """MetricsLogger of an AllConfig."""
        settings = all_config.training_config
        flops = flops_per_token(describe_model(all_config)) if settings.log_throughput else None
        of_tokens = settings.stage in (None, "sft")
        events = TensorboardEvents(settings)
        return cls(settings.output_dir, total_iterations, settings.log_interval, events, flops, of_tokens)

    @contextlib.contextmanager
    def opened(self, start_iteration):
        """Context manager: reports are written.

        Args:
            start_iteration (int): 0 for a new run: an older metrics.jsonl is put aside; else later lines of it are dropped.
        """
        self.events.open()
        if self.is_main:
            os.makedirs(self.output_dir, exist_ok=True)
            path = os.path.join(self.output_dir, METRICS_FILE)
            _prepare_metrics_file(path, start_iteration)
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open until _close()
            self._progress = _progress_bar(self.total_iterations, start_iteration)
            set_progress_bar(self._progress)
        try:
            yield
        finally:
            self._close()

    def log_step(self, report, train_state):
        """Report a step."""
        self._seconds += report.seconds
        self._tokens += report.tokens
        self._steps += 1
        self._losses.add(report)
        if self._progress is not None:
            self._progress.set_postfix_str(f"loss {report.loss:.4f}", refresh=False)
            self._progress.update(1)
        self.events.write_step({**_step_values(report), "time_ms": report.seconds * 1000.0}, train_state.iteration)
        if train_state.iteration % self.log_interval == 0 or train_state.iteration == self.total_iterations:
            self._log_interval(report, train_state)
        self._write_step(report, train_state)

    def _log_interval(self, report, train_state):
        """Log the means over the steps since the last line, with the other numbers of the last step."""
        milliseconds = self._seconds / self._steps * 1000.0
        tokens_per_second, tflops = self._speed(self._tokens, self._seconds)
        report = replace(report, losses=self._losses.means())
        steps = self._steps
        self._seconds, self._tokens, self._steps = 0.0, 0.0, 0
        self._losses.start()
        if self.speaks:
            logger.info(
                "%s", format_log_line(report, train_state, self.total_iterations, milliseconds, tokens_per_second, tflops)
            )
        get_timers().report(steps, train_state.iteration, self.events.timers_writer)

    def _speed(self, tokens, seconds):
        """Tokens per second, and TFLOP/s of each device or None."""
        tokens_per_second, tflops = tokens / seconds if seconds else 0.0, None
        if self.flops_per_token is not None:
            tflops = tokens_per_second * self.flops_per_token / comm.get_world_size() / 1e12
        return tokens_per_second, tflops

    def _write_step(self, report, train_state):
        """Write a step to metrics.jsonl."""
        tokens_per_second, tflops = self._speed(report.tokens, report.seconds)
        speed = {} if tflops is None else {"tflops_per_device": tflops}
        self._write(
            {
                "iteration": train_state.iteration,
                "epoch": train_state.epoch,
                "step": train_state.step_in_epoch,
                **_step_values(report),
                "finite_grads": report.finite_grads,
                "time_ms": report.seconds * 1000.0,
                "tokens_per_second": tokens_per_second,
                **speed,
                "consumed_samples": train_state.consumed_train_samples,
                "skipped_iterations": train_state.skipped_iterations,
            }
        )

    def log_evaluation(self, name, losses, samples, train_state):
        """Report an evaluation of `samples` samples of the data called `name` ("valid" or "test").

        Args:
            losses (StepLosses): without a token the main loss is left out, which a warning says.
        """
        main, *others = losses.values or {"loss": math.nan}
        loss, values = losses.values.get(main, math.nan), {}
        if losses.has_tokens:
            values = {f"{name}_loss": loss}
            if self.has_perplexity:
                values[f"{name}_perplexity"] = math.exp(min(20.0, loss)) if math.isfinite(loss) else loss
        values.update({f"{name}_{key}": losses.values[key] for key in others})
        without = losses.samples_without_tokens
        if without:
            values[f"{name}_samples_without_tokens"] = without
        if without and self.is_main:
            logger.warning(
                "%s at iteration %d: %d of %d samples have no token (all labels are masked): %s. Look at the loss mask, and at "
                "samples that are cut before their answer (seq_length)",
                name,
                train_state.iteration,
                without,
                samples,
                "they are left out of the mean loss" if losses.has_tokens else "there is no loss",
            )
        if self.speaks and values:
            logger.info(
                "%s at iteration %d: %s",
                name,
                train_state.iteration,
                ", ".join(f"{key}: {value:.16g}" for key, value in values.items()),
            )
        self.events.write(values, train_state.iteration)
        self._write({"iteration": train_state.iteration, **values})

    def _write(self, values):
        if self._file is not None:
            self._file.write(json.dumps({key: _json_number(value) for key, value in values.items()}) + "\n")

    def _close(self):
        """Close the bar and the files, and draw the loss curve."""
        if self._progress is not None:
            set_progress_bar(None)
            self._progress.close()
        self.events.flush()
        if self._file is not None:
            self._file.close()
            self._file = None
            draw_loss_curve(os.path.join(self.output_dir, METRICS_FILE), os.path.join(self.output_dir, LOSS_CURVE_FILE))


def _step_values(report):
    values = {
        "loss": report.loss,
        "learning_rate": report.learning_rate,
        "grad_norm": report.grad_norm,
        "loss_scale": report.loss_scale,
    }
    values.update(list(report.losses.items())[1:])
    for name in ("num_zeros", "params_norm"):
        if getattr(report, name) is not None:
            values[name] = getattr(report, name)
    return values


def _json_number(value):
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _prepare_metrics_file(path, start_iteration):
    """Remove lines behind the start iteration from an existing file; rename a finished run's file."""
    if not os.path.exists(path):
        return
    if start_iteration == 0:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(os.path.getmtime(path)))
        os.replace(path, f"{path[: -len('.jsonl')]}.{stamp}.jsonl")
        return
    kept = [line for line in read_metrics(path) if line["iteration"] <= start_iteration]
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in kept)
    os.replace(f"{path}.tmp", path)


def read_metrics(path):
    """Complete lines of a metrics.jsonl (list[dict])."""
    lines = []
    with open(path, encoding="utf-8") as file:
        for text in file:
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                continue  # a process that was killed leaves half a line
    return [line for line in lines if isinstance(line, dict) and "iteration" in line]


def _progress_bar(total_iterations, start_iteration):
    if not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    return tqdm(total=total_iterations, initial=start_iteration, unit="step", dynamic_ncols=True)


def draw_loss_curve(metrics_path, picture_path):
    """Draw the losses of a metrics.jsonl as a PNG, below them rewards, accuracies, ... where they were reported; nothing if it
    has no losses, a warning without matplotlib."""
    lines = read_metrics(metrics_path)
    names = ["loss", "valid_loss", "test_loss", *sorted({name for line in lines for name in line if _panel_of(name)})]
    curves = {
        name: [(line["iteration"], line[name]) for line in lines if isinstance(line.get(name), (int, float))] for name in names
    }
    if not any(curves[name] for name in names[:3]):
        return
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning(
            "the loss curve was not drawn: matplotlib is not installed (pip install matplotlib). The numbers are in %s.",
            metrics_path,
        )
        return
    panels = {}
    for name in names:
        panels.setdefault(_panel_of(name) or ("loss per token (nat)" if len(names) == 3 else "loss"), []).append(name)
    figure = Figure(figsize=(8, 5 + 2.5 * (len(panels) - 1)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("Training")
    for axes, (label, shown) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items()):
        axes.set(xlabel="iteration", ylabel=label)
        for name in shown:
            if points := curves[name]:
                axes.plot(
                    *zip(*points),
                    label=name.replace("_", " "),
                    marker="o" if len(points) < 30 else None,
                    markersize=3,
                    linewidth=1.2,
                )
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(picture_path)
    logger.info("loss curve: %s", picture_path)


def _panel_of(name):
    """Label of the axes (str) of a reported value of post-training; "" for what is not drawn, or a loss."""
    kind, slash, _ = name.removeprefix("valid_").removeprefix("test_").partition("/")
    if "accurac" in name:
        return "accuracy"
    return kind.replace("_", " ") if slash else ""
