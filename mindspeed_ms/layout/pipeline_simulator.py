"""Simulator of pipeline schedules without tensors: waiting times, step time, live activations."""

import math
from collections import deque
from dataclasses import dataclass

from mindspeed_ms.layout.schedule_order import BACKWARD, FORWARD, Communicate, Compute


class PlanDeadlock(RuntimeError):
    """Deadlock in a plan; the text names what each stage waits for."""


@dataclass(frozen=True)
class Simulation:
    """Result of `simulate`.

    Attributes:
        plan (PipelinePlan): the simulated plan.
        spans (tuple[tuple[(Compute, start, stop)]]): computations of each stage with their times.
        total (float): time of the whole step.
    """

    plan: object
    spans: tuple
    total: float

    def busy(self, stage):
        """Compute time of a stage."""
        return sum(stop - start for _, start, stop in self.spans[stage])

    @property
    def bubble(self):
        """Bubble: idle time over compute time of the busiest stage; (pp-1)/(micro_batches*vpp) for equal costs."""
        busy = max(self.busy(stage) for stage in range(self.plan.pp))
        return (self.total - busy) / busy if busy else 0.0

    @property
    def idle_fractions(self):
        """Idle fraction of the step, per stage."""
        return [1 - self.busy(stage) / self.total if self.total else 0.0 for stage in range(self.plan.pp)]

    def summary(self):
        """Summary text: bubble, and per stage idle time and peak of live activations."""
        lines = [f"total {self.total:g}, bubble {self.bubble:.2%} of the compute time"]
        peaks = peak_live_activations(self.plan)
        for stage, (idle, peak) in enumerate(zip(self.idle_fractions, peaks, strict=True)):
            lines.append(f"stage {stage}: idle {idle:.2%}, peak live activations {peak}")
        return "\n".join(lines)


def peak_live_activations(plan):
    """Peak per stage of (micro-batch, chunk) forwards that wait for their backward: list[int].

    Without backward nothing is kept, and the peak is 1: the one being computed.
    """
    peaks = []
    for stage in range(plan.pp):
        live = peak = 0
        for step in plan.computes(stage):
            live += 1 if step.kind == FORWARD else -1
            peak = max(peak, live)
            if plan.forward_only:
                live = 0
        peaks.append(peak)
    return peaks


def _cost(value, stage, chunk):
    """Cost of a computation, from one number for all or from `[stage][chunk]`."""
    return value[stage][chunk] if isinstance(value, (list, tuple)) else value


class _Channel:
    """Transfers from one stage to another, in first-in-first-out order.

    `buffering` is how many messages fit between sender and receiver: 0 means both must meet, None means no limit.
    """

    def __init__(self, buffering, transfer_time):
        self.buffering, self.transfer_time = buffering, transfer_time
        self.sends, self.receives = [], []  # (what, time at which it was posted)
        self.arrivals = []  # time at which message i is with the receiver

    def post(self, transfer, time):
        """Post one end of a transfer; returns its number."""
        ends = self.sends if transfer.action == "send" else self.receives
        ends.append(((transfer.kind, transfer.micro_batch), time))
        return len(ends) - 1

    def accepted(self, number):
        """Time from which send `number` no longer needs its sender; None if not yet known."""
        posted = self.sends[number][1]
        if self.buffering is None:
            return posted
        if self.buffering == 0:
            return self.received(number)
        if number < self.buffering:
            return posted
        freed = self.received(number - self.buffering)
        return None if freed is None else max(posted, freed)

    def received(self, number):
        """Time at which receive `number` has its tensor; None if not yet known."""
        while len(self.arrivals) <= number:
            one = len(self.arrivals)
            if one >= len(self.sends) or one >= len(self.receives):
                return None
            self._check_same(one)
            leaves = self.sends[one][1] if self.buffering == 0 else self.accepted(one)
            if self.buffering == 0:
                leaves = max(leaves, self.receives[one][1])
            self.arrivals.append(max(self.receives[one][1], leaves + self.transfer_time))
        return self.arrivals[number]

    def _check_same(self, number):
        sent, expected = self.sends[number][0], self.receives[number][0]
        if sent != expected:
            raise PlanDeadlock(f"a stage sends {sent} where its peer expects {expected} (kind, micro-batch).")


class _Stage:
    """State of one stage during a simulation."""

    def __init__(self, number, steps):
        self.number, self.steps = number, steps
        self.position, self.time = 0, 0.0
        self.posted = []  # (channel, number, transfer) of the running Communicate
        self.awaited = {}  # Compute -> (channel, number) with overlap
        self.spans = []

    @property
    def step(self):
        return self.steps[self.position] if self.position < len(self.steps) else None


class _Simulator:
    def __init__(self, plan, forward_time, backward_time, transfer_time, buffering):
        self.plan = plan
        self.times = {FORWARD: forward_time, BACKWARD: backward_time}
        self.transfer_time, self.buffering = transfer_time, buffering
        self.channels = {}
        self.stages = [_Stage(stage, steps) for stage, steps in enumerate(plan.steps)]

    def _channel(self, sender, receiver):
        key = sender, receiver
        if key not in self.channels:
            self.channels[key] = _Channel(self.buffering, self.transfer_time)
        return self.channels[key]

    def run(self):
        """Advance the stages until all are done; a stage that advanced wakes its neighbours."""
        waiting = deque(self.stages)
        while waiting:
            stage = waiting.popleft()
            before = stage.position, len(stage.posted), len(stage.awaited)
            while stage.step is not None and self._advance(stage):
                pass
            if (stage.position, len(stage.posted), len(stage.awaited)) != before:
                count = len(self.stages)
                for neighbour in {(stage.number + 1) % count, (stage.number - 1) % count} - {stage.number}:
                    waiting.append(self.stages[neighbour])
        stuck = [stage for stage in self.stages if stage.step is not None]
        if stuck:
            raise PlanDeadlock("; ".join(f"stage {stage.number} waits in: {stage.step}" for stage in stuck))
        return Simulation(self.plan, tuple(tuple(stage.spans) for stage in self.stages), self._total())

    def _total(self):
        return max((stage.time for stage in self.stages), default=0.0)

    def _advance(self, stage):
        """Execute the stage's next step if possible; True if it was executed."""
        done = self._compute(stage) if isinstance(stage.step, Compute) else self._communicate(stage)
        if done:
            stage.position += 1
        return done

    def _compute(self, stage):
        step, start = stage.step, stage.time
        if step in stage.awaited:
            channel, number = stage.awaited[step]
            arrival = channel.received(number)
            if arrival is None:
                return False
            del stage.awaited[step]
            start = max(start, arrival)
        stop = start + _cost(self.times[step.kind], stage.number, step.chunk)
        stage.spans.append((step, start, stop))
        stage.time = stop
        return True

    def _communicate(self, stage):
        if not stage.posted:
            for transfer in stage.step.transfers:
                ends = (stage.number, transfer.peer) if transfer.action == "send" else (transfer.peer, stage.number)
                channel = self._channel(*ends)
                stage.posted.append((channel, channel.post(transfer, stage.time), transfer))
        if self.plan.overlap:
            for channel, number, transfer in stage.posted:
                if transfer.action == "recv":
                    stage.awaited[Compute(transfer.kind, transfer.micro_batch, transfer.chunk)] = channel, number
            stage.posted = []
            return True
        ends = [
            channel.accepted(number) if transfer.action == "send" else channel.received(number)
            for channel, number, transfer in stage.posted
        ]
        if any(end is None for end in ends):
            return False
        stage.time = max(stage.time, *ends)
        stage.posted = []
        return True


def _numbers_in(value):
    return [number for item in value for number in _numbers_in(item)] if isinstance(value, (list, tuple)) else [value]


def simulate(plan, forward_time=1.0, backward_time=2.0, transfer_time=0.0, buffering=None):
    """Simulate a plan.

    Args:
        plan (PipelinePlan): the plan.
        forward_time, backward_time: cost of one chunk, a number or `[stage][chunk]`.
        transfer_time (float): time a tensor travels.
        buffering (Optional[int]): messages that fit between two stages; 0 is none (both ends must meet), None is
            without limit.

    Returns:
        Simulation

    Raises:
        PlanDeadlock: stages wait for each other, or expect another tensor than is sent.
        ValueError: a time that is negative or no finite number, or a negative buffering.
    """
    for name, value in (("forward", forward_time), ("backward", backward_time), ("transfer", transfer_time)):
        for time in _numbers_in(value):
            if not 0 <= time < math.inf:
                raise ValueError(f"{name}_time must be a finite number >= 0, but got {time}.")
    if buffering is not None and buffering < 0:
        raise ValueError(f"buffering must be None or >= 0, but got {buffering}.")
    return _Simulator(plan, forward_time, backward_time, transfer_time, buffering).run()


__all__ = ["Communicate", "PlanDeadlock", "Simulation", "peak_live_activations", "simulate"]
