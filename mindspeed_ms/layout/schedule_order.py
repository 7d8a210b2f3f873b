"""Pipeline schedules (1F1B, interleaved) as data: ordered computations and transfers of each stage.

The order of computations is Megatron core's (0.12): no pipeline, 1F1B, interleaved 1F1B with a micro-batch group size,
and forward only. The order of transfers is derived from one clock: every transfer has one place in a single order over
all stages, and every stage's list is a part of that order. So blocking transfers cannot wait in a circle, whatever the
backend buffers, and both ends of a pair see their transfers in the same order (no tags are needed).
"""

from dataclasses import dataclass

from mindspeed_ms.layout.errors import LayoutError

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Compute:
    """Computation of one micro-batch on one chunk: `kind` is "forward" or "backward"."""

    kind: str
    micro_batch: int
    chunk: int

    def __str__(self):
        return f"{self.kind} of micro-batch {self.micro_batch} on chunk {self.chunk}"


@dataclass(frozen=True)
class Transfer:
    """One end of a transfer between two stages.

    Attributes:
        action (str): "send" or "recv".
        kind (str): "forward" (a chunk's output) or "backward" (the gradient of a chunk's input).
        micro_batch (int): the micro-batch.
        chunk (int): this stage's chunk that produced (send) or will consume (recv) the tensor.
        peer (int): the other stage.
    """

    action: str
    kind: str
    micro_batch: int
    chunk: int
    peer: int

    def __str__(self):
        towards = "to" if self.action == "send" else "from"
        return (
            f"{self.action} of the {self.kind} tensor of micro-batch {self.micro_batch}, chunk {self.chunk}, "
            f"{towards} stage {self.peer}"
        )


@dataclass(frozen=True)
class Communicate:
    """Transfers that are started together.

    Without overlap the step ends when all of them have ended. With overlap nothing waits here: a received tensor is
    waited for where it is consumed.
    """

    transfers: tuple

    def __str__(self):
        return "; ".join(map(str, self.transfers))


@dataclass(frozen=True)
class PipelinePlan:
    """Pipeline schedule: steps of every stage, in order.

    Attributes:
        pp, vpp (int): stages, chunks per stage.
        micro_batches (int): per step.
        group_size (int): micro-batches that one chunk runs in a row (interleaved schedule).
        forward_only (bool): evaluation.
        overlap (bool): transfers are started early and waited for at their use.
        steps (tuple[tuple[Compute | Communicate]]): one tuple per stage.
    """

    pp: int
    vpp: int
    micro_batches: int
    group_size: int
    forward_only: bool
    overlap: bool
    steps: tuple

    def computes(self, stage):
        """Computations of a stage, in order: list[Compute]."""
        return [step for step in self.steps[stage] if isinstance(step, Compute)]

    def transfers(self, stage):
        """Transfers of a stage, in order: list[Transfer]."""
        return [one for step in self.steps[stage] if isinstance(step, Communicate) for one in step.transfers]

    def is_first(self, stage, chunk):
        """Whether the chunk holds the embedding: nothing is received before its forward."""
        return stage == 0 and chunk == 0

    def is_last(self, stage, chunk):
        """Whether the chunk holds the loss: nothing is received before its backward."""
        return stage == self.pp - 1 and chunk == self.vpp - 1

    def last_backwards(self, stage):
        """Last backward of each chunk, `{chunk: Compute}`: its gradients are complete after it."""
        return {step.chunk: step for step in self.computes(stage) if step.kind == BACKWARD}


def forward_order(micro_batches, vpp=1, group_size=1):
    """Forward steps of every stage, `[(micro_batch, chunk), ...]`: group by group, chunk by chunk inside a group."""
    order = []
    for start in range(0, micro_batches, group_size):
        group = range(start, min(start + group_size, micro_batches))
        order += [(micro_batch, chunk) for chunk in range(vpp) for micro_batch in group]
    return order


def warm_up_steps(stage, pp, micro_batches, vpp=1, group_size=1):
    """Number of warm-up forwards of a stage, before the alternating forward/backward phase."""
    steps = pp - stage - 1
    if vpp > 1:
        steps = 2 * steps + (vpp - 1) * group_size
    return min(steps, micro_batches * vpp)


def compute_order(stage, pp, micro_batches, vpp=1, group_size=1, forward_only=False):
    """Computations of one stage, in order: list[Compute]."""
    order = forward_order(micro_batches, vpp, group_size)
    forwards = [Compute(FORWARD, micro_batch, chunk) for micro_batch, chunk in order]
    if forward_only:
        return forwards
    backwards = [Compute(BACKWARD, micro_batch, vpp - 1 - chunk) for micro_batch, chunk in order]
    warm_up = warm_up_steps(stage, pp, micro_batches, vpp, group_size)
    steady = zip(forwards[warm_up:], backwards, strict=False)
    behind = len(forwards) - warm_up
    return forwards[:warm_up] + [step for pair in steady for step in pair] + backwards[behind:]


def _checked_group_size(pp, vpp, micro_batches, group_size):
    for name, value in {"pp": pp, "vpp": vpp, "micro_batches": micro_batches}.items():
        if not isinstance(value, int) or value < 1:
            raise LayoutError(f"{name} must be a positive integer, but got {value!r}.")
    if vpp == 1:
        return 1
    if pp < 2:
        raise LayoutError(f"virtual_pipeline_model_parallel_size {vpp} needs pipeline_model_parallel_size > 1.")
    if group_size is None:
        group_size = pp
    if not isinstance(group_size, int) or group_size < pp:
        raise LayoutError(
            f"microbatch_group_size_per_virtual_pipeline_stage {group_size} must be at least pipeline_model_parallel_size {pp}."
        )
    rest = micro_batches % group_size
    if 0 < rest < pp:
        raise LayoutError(
            f"{micro_batches} micro-batches in groups of {group_size} leave a last group of {rest}, but the interleaved "
            f"schedule needs groups of at least {pp} (pipeline_model_parallel_size); use a multiple of {group_size}."
        )
    return group_size


def dependency(pp, vpp, stage, step):
    """Step whose result `step` needs: `(stage, Compute)` of the previous (forward) or next chunk; None for the model's input.

    The last chunk's backward waits for its own forward.
    """
    place = step.chunk * pp + stage
    if step.kind == FORWARD:
        place -= 1
        if place < 0:
            return None
    else:
        place += 1
        if place == pp * vpp:
            return stage, Compute(FORWARD, step.micro_batch, step.chunk)
    return place % pp, Compute(step.kind, step.micro_batch, place // pp)


def _in_pairs(order, warm_up):
    """`order` as units of one tick: single computations, and forward-backward pairs in the steady phase.

    All stages of the interleaved schedule can keep this beat, with transfers between the pairs only. Blocking transfers
    inside a pair would make a stage wait for a neighbour that is in its longer backward.
    """
    paired = 2 * (len(order) // 2 - warm_up)
    steady = range(warm_up, warm_up + paired, 2)
    singles = [(step,) for step in order]
    return singles[:warm_up] + [tuple(order[at : at + 2]) for at in steady] + singles[warm_up + paired :]


def _clock(pp, vpp, units):
    """Tick of each computation, `{(stage, Compute): tick}`, if a unit takes one tick and a transfer none.

    Raises:
        LayoutError: an order in which two stages wait for each other.
    """
    ticks, position, now = {}, [0] * pp, [0] * pp
    waiting = list(range(pp))
    while waiting:
        stage = waiting.pop()
        while position[stage] < len(units[stage]):
            unit = units[stage][position[stage]]
            sources = _sources(pp, vpp, stage, unit)
            if any(source not in ticks for source in sources):
                break
            tick = max([now[stage]] + [ticks[source] + 1 for source in sources])
            ticks.update({(stage, step): tick for step in unit})
            now[stage] = tick + 1
            position[stage] += 1
            # only the stages next to this one wait for its results
            waiting += {(stage + 1) % pp, (stage - 1) % pp} - {stage, *waiting}
    if any(position[stage] < len(units[stage]) for stage in range(pp)):
        raise LayoutError("the order of computations makes stages wait for each other.")
    return ticks


def _sources(pp, vpp, stage, unit):
    """Computations outside a unit that it depends on."""
    sources = [dependency(pp, vpp, stage, step) for step in unit]
    return [source for source in sources if source is not None and not (source[0] == stage and source[1] in unit)]


def _events(pp, vpp, ticks, overlap):
    """Events of each stage in order, `[(moment, step)]`: computations, and both ends of each transfer at one moment."""
    events = [[] for _ in range(pp)]
    for (stage, step), tick in ticks.items():
        events[stage].append(((tick, 1, step.kind == BACKWARD), step))
        source = dependency(pp, vpp, stage, step)
        if source is None or source[0] == stage:
            continue
        sender, produced = source
        # early: as soon as it exists, so that it travels while the receiver computes; late: when it is needed
        meeting = ticks[source] + 1 if overlap else tick
        moment = (meeting, 0, step.kind, step.micro_batch, produced.chunk, sender)
        events[sender].append((moment, Transfer("send", step.kind, step.micro_batch, produced.chunk, stage)))
        events[stage].append((moment, Transfer("recv", step.kind, step.micro_batch, step.chunk, sender)))
    return [sorted(of_stage, key=lambda event: event[0]) for of_stage in events]


def _steps(events):
    """Steps from ordered events: transfers between two computations become one `Communicate`."""
    steps, transfers = [], []
    for _, event in events:
        if isinstance(event, Transfer):
            transfers.append(event)
            continue
        if transfers:
            steps.append(Communicate(tuple(transfers)))
            transfers = []
        steps.append(event)
    if transfers:
        steps.append(Communicate(tuple(transfers)))
    return tuple(steps)


def build_plan(pp, micro_batches, vpp=1, group_size=None, forward_only=False, overlap=False):
    """Build the PipelinePlan of one training (or evaluation) step.

    Args:
        pp (int): pipeline stages; 1 is no pipeline.
        micro_batches (int): micro-batches per step.
        vpp (int): chunks per stage; above 1 is the interleaved schedule.
        group_size (Optional[int]): micro-batches that one chunk runs in a row; None is `pp`. Interleaved only.
        forward_only (bool): no backward.
        overlap (bool): place transfers early, for asynchronous execution.

    Returns:
        PipelinePlan

    Raises:
        LayoutError: vpp without pp, a group size below pp, or micro-batches that leave too small a last group.
    """
    group_size = _checked_group_size(pp, vpp, micro_batches, group_size)
    units = []
    for stage in range(pp):
        order = compute_order(stage, pp, micro_batches, vpp, group_size, forward_only)
        in_pairs = vpp > 1 and not forward_only and not overlap
        warm_up = warm_up_steps(stage, pp, micro_batches, vpp, group_size)
        units.append(_in_pairs(order, warm_up) if in_pairs else [(step,) for step in order])
    events = _events(pp, vpp, _clock(pp, vpp, units), overlap)
    return PipelinePlan(
        pp, vpp, micro_batches, group_size, forward_only, overlap, tuple(_steps(of_stage) for of_stage in events)
    )
