"""Pipeline stages: the layers of each stage and virtual chunk.

Layers are numbered chunk-major, stage inner: chunk c of stage s starts behind all layers of earlier chunks (of all
stages) and of earlier stages of its own chunk.
"""

from dataclasses import dataclass
from itertools import accumulate

from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.layer_lists import RecomputeLists, fitted_rows, transposed


def split_evenly(total, parts):
    """Split `total` into `parts` counts; the parts before the last get the remainder, from the back: 62/4 is 15,16,16,15."""
    base, rest = divmod(total, parts)
    first = parts - 1 - rest
    return [base + (1 if first <= part < parts - 1 else 0) for part in range(parts)]


@dataclass(frozen=True)
class StageLayout:
    """Layers of each stage and chunk.

    Attributes:
        counts (tuple[tuple[int]]): `[pp][vpp]` number of layers, noop layers included.
        noop_layers (frozenset[int]): positions of layers that only pass their input on; they hold no weights and the
            real layers are numbered around them.
        standalone_embedding (bool): the first stage holds the embedding and no layer.

    Raises:
        LayoutError: rows of different length, a negative count, or a noop layer outside the model.
    """

    counts: tuple
    noop_layers: frozenset = frozenset()
    standalone_embedding: bool = False

    def __post_init__(self):
        counts = tuple(tuple(row) for row in self.counts)
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "noop_layers", frozenset(self.noop_layers))
        if not counts or not counts[0] or any(len(row) != len(counts[0]) for row in counts):
            raise LayoutError(f"layers per stage and chunk {list(counts)} must be rows of one length.")
        if any(count < 0 for row in counts for count in row):
            raise LayoutError(f"layers per stage and chunk {list(counts)} cannot be negative.")
        outside = sorted(layer for layer in self.noop_layers if not 0 <= layer < self.num_positions)
        if outside:
            raise LayoutError(f"noop_layers {outside} must be in [0, num_layers {self.num_positions}).")
        if len(self.noop_layers) == self.num_positions:
            raise LayoutError(f"noop_layers leave none of the {self.num_positions} layers.")
        self._number_layers()

    def _number_layers(self):
        flat = [count for column in transposed(self.counts) for count in column]
        starts = [0, *accumulate(flat)]
        real = [position for position in range(starts[-1]) if position not in self.noop_layers]
        numbers = {position: number for number, position in enumerate(real)}
        object.__setattr__(self, "_starts", starts)
        object.__setattr__(self, "_numbers", numbers)

    @property
    def pp(self):
        """Number of stages."""
        return len(self.counts)

    @property
    def vpp(self):
        """Chunks per stage."""
        return len(self.counts[0])

    @property
    def num_positions(self):
        """Number of layers with noop layers: `num_layers` of the configuration."""
        return sum(map(sum, self.counts))

    @property
    def num_layers(self):
        """Number of layers with weights."""
        return len(self._numbers)

    @property
    def stage_totals(self):
        """Number of layers of each stage, noop layers included."""
        return [sum(row) for row in self.counts]

    def _check(self, stage, chunk):
        if not 0 <= stage < self.pp or not 0 <= chunk < self.vpp:
            raise LayoutError(f"stage {stage}, chunk {chunk} is outside the {self.pp} stages of {self.vpp} chunks.")

    def offset(self, stage, chunk=0):
        """Position of the first layer of a chunk: layers of all earlier chunks and of earlier stages of this chunk."""
        self._check(stage, chunk)
        return self._starts[chunk * self.pp + stage]

    def positions(self, stage, chunk=0):
        """Positions (0..num_positions-1) of a chunk, noop layers included: range."""
        start = self.offset(stage, chunk)
        return range(start, start + self.counts[stage][chunk])

    def layer_slots(self, stage, chunk=0):
        """Global layer ids of a chunk in order, None for a noop layer."""
        return [self._numbers.get(position) for position in self.positions(stage, chunk)]

    def layers(self, stage, chunk=0):
        """Global ids (0..num_layers-1) of the layers with weights in a chunk."""
        return [layer for layer in self.layer_slots(stage, chunk) if layer is not None]

    def owner(self, layer):
        """`(stage, chunk)` that holds the layer with the global id `layer`."""
        for chunk in range(self.vpp):
            for stage in range(self.pp):
                if layer in self.layers(stage, chunk):
                    return stage, chunk
        raise LayoutError(f"layer {layer} is outside the {self.num_layers} layers.")

    def has_embedding(self, stage, chunk=0):
        """Whether a chunk holds the embedding: the first chunk of the first stage."""
        self._check(stage, chunk)
        return stage == 0 and chunk == 0

    def has_head(self, stage, chunk=0):
        """Whether a chunk holds the head (final norm, output layer, loss): the last chunk of the last stage."""
        self._check(stage, chunk)
        return stage == self.pp - 1 and chunk == self.vpp - 1

    def table(self):
        """Table as text, a line per stage: totals and the layer ids of each chunk."""
        lines = []
        for stage, total in enumerate(self.stage_totals):
            chunks = [_span(self.layers(stage, chunk)) for chunk in range(self.vpp)]
            lines.append(f"stage {stage}: {total} layers: " + " | ".join(chunks))
        return "\n".join(lines)


def _span(layers):
    if not layers:
        return "-"
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def split_layers(
    num_layers,
    pp=1,
    vpp=None,
    num_layer_list=None,
    order="pp_vpp",
    noop_layers=None,
    standalone_embedding=False,
    first_stage=None,
    last_stage=None,
    account_for_embedding=False,
    account_for_loss=False,
):
    """Split `num_layers` layers into a `StageLayout`.

    Args:
        num_layers (int): layers of the model, noop layers included.
        pp (int): pipeline stages.
        vpp (Optional[int]): chunks per stage; None is 1, or the columns of a list.
        num_layer_list: counts `[pp]` or `[pp][vpp]`, or their text; None splits evenly, first over chunks, then stages.
        order (str): "pp_vpp" (rows of the list are stages) or "vpp_pp".
        noop_layers: list, or comma text, of positions without weights.
        standalone_embedding (bool): the first stage holds no layer.
        first_stage, last_stage (Optional[int]): layers of the first and last stage; the others share the rest.
        account_for_embedding, account_for_loss (bool): count the embedding (the loss) as one layer of the split.

    Raises:
        LayoutError: too few layers, a list of another shape or sum, options that exclude each other.
    """
    if standalone_embedding and pp < 2:
        raise LayoutError(f"standalone_embedding_stage needs pipeline_model_parallel_size > 1, but it is {pp}.")
    noops = parse_noop_layers(noop_layers)
    _check_exclusive(num_layer_list, first_stage, last_stage, account_for_embedding, account_for_loss, standalone_embedding)
    if num_layer_list is not None:
        rows = _explicit(num_layers, pp, vpp, num_layer_list, order, standalone_embedding)
        return StageLayout(rows, noops, standalone_embedding)
    vpp = 1 if vpp is None else vpp
    if vpp > 1 and pp < 2:
        raise LayoutError(f"virtual_pipeline_model_parallel_size {vpp} needs pipeline_model_parallel_size > 1, but it is {pp}.")
    if first_stage is not None or last_stage is not None:
        rows = _with_given_ends(num_layers, pp, vpp, first_stage, last_stage)
    elif account_for_embedding or account_for_loss:
        rows = _with_counted_ends(num_layers, pp, vpp, account_for_embedding, account_for_loss)
    else:
        rows = _even_rows(num_layers, pp - 1 if standalone_embedding else pp, vpp)
        rows = [[0] * vpp, *rows] if standalone_embedding else rows
    return StageLayout(rows, noops, standalone_embedding)


def _check_exclusive(num_layer_list, first_stage, last_stage, embedding, loss, standalone):
    ways = {
        "num_layer_list": num_layer_list is not None,
        "num_layers_in_first/last_pipeline_stage": first_stage is not None or last_stage is not None,
        "account_for_embedding/loss_in_pipeline_split": bool(embedding or loss),
    }
    used = [way for way, is_used in ways.items() if is_used]
    if standalone and not ways["num_layer_list"]:
        used.append("standalone_embedding_stage")
    if len(used) > 1:
        raise LayoutError(f"{' and '.join(used)} exclude each other; keep one of them.")


def _even_rows(num_layers, pp, vpp):
    if num_layers < pp * vpp:
        raise LayoutError(
            f"num_layers {num_layers} is less than the {pp} x {vpp} = {pp * vpp} stages and chunks that need a layer; "
            "use fewer stages or chunks."
        )
    return transposed([split_evenly(of_chunk, pp) for of_chunk in split_evenly(num_layers, vpp)])


def _explicit(num_layers, pp, vpp, num_layer_list, order, standalone):
    rows = fitted_rows(num_layer_list, "num_layer_list", pp, vpp, order, standalone)
    if pp == 1 and len(rows[0]) > 1:
        raise LayoutError(f"num_layer_list {num_layer_list} has {len(rows[0])} chunks, which needs more than one stage.")
    total = sum(map(sum, rows))
    if total != num_layers:
        raise LayoutError(f"num_layers is {num_layers}, but num_layer_list {num_layer_list} adds up to {total}.")
    if standalone and any(rows[0]):
        raise LayoutError(f"num_layer_list {num_layer_list} gives layers to the standalone embedding stage (the first).")
    if any(count <= 0 for row in rows[1 if standalone else 0 :] for count in row):
        raise LayoutError(f"num_layer_list {num_layer_list} must hold positive numbers only.")
    return rows


def _with_given_ends(num_layers, pp, vpp, first, last):
    given = [count for count in (first, last) if count is not None]
    middle_stages, middle = pp - len(given), num_layers - sum(given)
    text = f"num_layers_in_first_pipeline_stage {first}, num_layers_in_last_pipeline_stage {last}"
    if pp == 1 or middle < 0 or (middle_stages == 0 and middle):
        raise LayoutError(f"{text} do not fit num_layers {num_layers} on {pp} stages.")
    for count in given:
        if count < 1 or count % vpp:
            raise LayoutError(f"{text}: each must be positive and divisible by the {vpp} chunks of a stage.")
    rows = _even_rows(middle, middle_stages, vpp) if middle_stages else []
    if first is not None:
        rows = [[first // vpp] * vpp, *rows]
    if last is not None:
        rows = [*rows, [last // vpp] * vpp]
    return rows


def _with_counted_ends(num_layers, pp, vpp, embedding, loss):
    rows = _even_rows(num_layers + bool(embedding) + bool(loss), pp, vpp)
    rows[0][0] -= bool(embedding)
    rows[-1][-1] -= bool(loss)
    if rows[0][0] < 0 or rows[-1][-1] < 0:
        raise LayoutError(f"num_layers {num_layers} on {pp} stages leaves no room for embedding and loss.")
    return rows


def parse_noop_layers(value):
    """Positions of noop layers from a list, a comma string ("22,23") or None: frozenset[int]. Else LayoutError."""
    if value is None or value == "":
        return frozenset()
    items = value.split(",") if isinstance(value, str) else value
    try:
        positions = [int(item) for item in items]
    except (TypeError, ValueError):
        raise LayoutError(f"noop_layers {value!r} must be a list of layer numbers such as 22,23.") from None
    if len(set(positions)) != len(positions):
        raise LayoutError(f"noop_layers {value!r} names a layer twice.")
    return frozenset(positions)


def spread_layers(num_layers, parallel):
    """(stages that hold layers, layers to spread over them with embedding and loss if those count)."""
    total = num_layers
    total += bool(parallel.account_for_embedding_in_pipeline_split) + bool(parallel.account_for_loss_in_pipeline_split)
    return parallel.pipeline_model_parallel_size - bool(parallel.standalone_embedding_stage), total


def _virtual_size(num_layers, parallel):
    """Number of chunks per stage in the configuration; None if a list decides."""
    vpp = parallel.virtual_pipeline_model_parallel_size
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    if per_chunk is None or parallel.num_layer_list is not None:
        return vpp
    stages, total = spread_layers(num_layers, parallel)
    if stages < 1 or total % (stages * per_chunk):
        raise LayoutError(
            f"{_layers_text(num_layers, total)} is not divisible by {stages} stages x num_layers_per_virtual_pipeline_stage "
            f"{per_chunk}; set num_layer_list for an uneven split."
        )
    if vpp is not None and vpp * stages * per_chunk != total:
        raise LayoutError(
            f"virtual_pipeline_model_parallel_size {vpp} contradicts num_layers_per_virtual_pipeline_stage {per_chunk}: "
            f"{total} layers on {stages} stages make {total // (stages * per_chunk)} chunks."
        )
    return total // (stages * per_chunk)


def _layers_text(num_layers, total):
    text = f"num_layers {num_layers}"
    return text if total == num_layers else f"{text} ({total} with embedding and loss)"


def stages_of(num_layers, parallel):
    """`StageLayout` of `num_layers` layers cut by a ParallelDescription. LayoutError as `split_layers`."""
    return split_layers(
        num_layers,
        pp=parallel.pipeline_model_parallel_size,
        vpp=_virtual_size(num_layers, parallel),
        num_layer_list=parallel.num_layer_list,
        order=parallel.num_layer_list_order,
        noop_layers=parallel.noop_layers,
        standalone_embedding=parallel.standalone_embedding_stage,
        first_stage=parallel.num_layers_in_first_pipeline_stage,
        last_stage=parallel.num_layers_in_last_pipeline_stage,
        account_for_embedding=parallel.account_for_embedding_in_pipeline_split,
        account_for_loss=parallel.account_for_loss_in_pipeline_split,
    )


def recompute_of(model):
    """`RecomputeLists` of a ModelDescription. LayoutError if they do not fit the stages."""
    parallel = model.parallel
    return RecomputeLists(
        model.stages,
        parallel.recompute,
        parallel.select_recompute,
        parallel.select_comm_recompute,
        parallel.num_layer_list_order,
    )
