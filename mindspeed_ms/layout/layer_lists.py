"""Lists of layer counts per stage and chunk (`num_layer_list`) and recompute lists: parsing and checks.

A list has one row per pipeline stage, `[pp]` or `[pp][vpp]`. Upstream reads `[vpp][pp]`: `order="vpp_pp"` says so.
"""

import ast
from dataclasses import dataclass

from mindspeed_ms.layout.errors import LayoutError

ORDERS = ("pp_vpp", "vpp_pp")


def parse_layer_list(value, name="num_layer_list"):
    """A list of counts from a list, a tuple or its text ("[[4,4],[4,2]]", "4,4,4,2").

    Args:
        value: list, tuple or text.
        name (str): the option, for errors.

    Returns:
        list[int] | list[list[int]]

    Raises:
        LayoutError: no list, an element that is no integer, or rows of different length.
    """
    values = value
    if isinstance(value, str):
        try:
            values = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise LayoutError(f"{name} '{value}' cannot be read; write it like '[[4,4],[4,2]]'.") from None
        if isinstance(values, int) and not isinstance(values, bool):
            values = [values]
    if not isinstance(values, (list, tuple)) or not values:
        raise LayoutError(f"{name} must be a list of layer counts such as [[4,4],[4,2]], but got {value!r}.")
    if not any(isinstance(row, (list, tuple)) for row in values):
        return [_count(item, name) for item in values]
    for row in values:
        if not isinstance(row, (list, tuple)) or not row:
            raise LayoutError(f"{name} {list(values)} mixes counts and lists: {row!r} is not a list of counts.")
        if len(row) != len(values[0]):
            raise LayoutError(f"{name} {list(values)} has rows of different length ({len(values[0])} and {len(row)}).")
    return [[_count(item, name) for item in row] for row in values]


def _count(item, name):
    if isinstance(item, bool) or not isinstance(item, int):
        raise LayoutError(f"{name} holds {item!r}, but every element must be an integer.")
    return item


def transposed(rows):
    """Transposed list: rows and columns exchanged."""
    return [list(column) for column in zip(*rows, strict=True)]


def stage_rows(value, name, order="pp_vpp"):
    """The list as `[stages][chunks]`; a flat one has one chunk per stage. Arguments and errors: `parse_layer_list`."""
    if order not in ORDERS:
        raise LayoutError(f"num_layer_list_order '{order}' is unknown, choose one of {list(ORDERS)}.")
    rows = parse_layer_list(value, name)
    if not isinstance(rows[0], list):
        return [[count] for count in rows]
    return transposed(rows) if order == "vpp_pp" else rows


def fitted_rows(value, name, pp, vpp, order="pp_vpp", standalone_embedding=False):
    """`stage_rows` checked to be `[pp][vpp]`; zeros are added for a standalone embedding stage that was left out.

    Args:
        vpp (Optional[int]): number of columns wanted; None takes what the list has.

    Raises:
        LayoutError: another shape; names both shapes, and the order when the transpose would fit.
    """
    rows = stage_rows(value, name, order)
    if standalone_embedding and len(rows) == pp - 1:
        rows = [[0] * len(rows[0]), *rows]
    columns = len(rows[0])
    if len(rows) == pp and vpp in (None, columns):
        return rows
    given, wanted = parse_layer_list(value, name), f"[{pp}][{vpp if vpp is not None else 'vpp'}]"
    hint = ""
    if columns == pp and vpp in (None, len(rows)):
        other = "pp_vpp" if order == "vpp_pp" else "vpp_pp"
        hint = f" Its transpose fits: set num_layer_list_order to {other}."
    elif standalone_embedding:
        hint = f" With standalone_embedding_stage the first stage may be left out: [{pp - 1}][..]."
    raise LayoutError(
        f"{name} {given} has the shape [{len(rows)}][{columns}] (stages, chunks), but the pipeline has {wanted} "
        f"(pipeline_model_parallel_size {pp}, virtual_pipeline_model_parallel_size {vpp})." + hint
    )


@dataclass(frozen=True)
class LayerRecompute:
    """Recomputation in one layer's backward.

    Attributes:
        full (bool): everything, from the layer's input.
        select (bool): the core attention, or the MLP activation under flash attention.
        select_comm (bool): the sequence-parallel all-gather in front of column-parallel linears.
    """

    full: bool = False
    select: bool = False
    select_comm: bool = False


def recompute_of_layers(layers, full=0, select=0, select_comm=0):
    """LayerRecompute of each of the `layers` layers of one chunk, in order.

    The first `full` layers are recomputed whole. Behind them `min(select, select_comm)` layers get both other kinds,
    and then the rest of the larger count its own.

    Returns:
        list[LayerRecompute]
    """
    kinds = []
    for index in range(layers):
        behind = index - full
        kinds.append(LayerRecompute(behind < 0, 0 <= behind < select, 0 <= behind < select_comm))
    return kinds


class RecomputeLists:
    """Recompute lists (full, select, select_comm), checked against the layers of each stage and chunk.

    Args:
        stages (StageLayout): the layers.
        recompute, select_recompute, select_comm_recompute: lists of the shape of the stages, their text, or None.
        order (str): "pp_vpp" (rows are stages) or "vpp_pp".

    Raises:
        LayoutError: a negative count, another shape, or more layers than the chunk has.
    """

    def __init__(self, stages, recompute=None, select_recompute=None, select_comm_recompute=None, order="pp_vpp"):
        self.stages = stages
        self.full = self._rows("recompute", recompute, order)
        self.select = self._rows("select_recompute", select_recompute, order)
        self.select_comm = self._rows("select_comm_recompute", select_comm_recompute, order)
        self._check("select_recompute", self.select)
        self._check("select_comm_recompute", self.select_comm)

    def _rows(self, name, value, order):
        stages = self.stages
        if not value:
            return [[0] * stages.vpp for _ in range(stages.pp)]
        rows = fitted_rows(value, name, stages.pp, stages.vpp, order, stages.standalone_embedding)
        for row in rows:
            for count in row:
                if count < 0:
                    raise LayoutError(f"{name} {value} holds {count}, but a number of layers cannot be negative.")
        return rows

    def _check(self, name, rows):
        for stage, row in enumerate(rows):
            for chunk, count in enumerate(row):
                layers, full = self.stages.counts[stage][chunk], self.full[stage][chunk]
                if full + count > layers:
                    raise LayoutError(
                        f"recompute {full} + {name} {count} on stage {stage}, chunk {chunk} exceeds its {layers} "
                        "layers; a layer that is recomputed whole needs no other kind."
                    )

    @property
    def active(self):
        """True when any layer is recomputed."""
        return any(count for rows in (self.full, self.select, self.select_comm) for row in rows for count in row)

    def of_chunk(self, stage, chunk=0):
        """LayerRecompute of the real layers of a chunk, in order: list."""
        counts = (rows[stage][chunk] for rows in (self.full, self.select, self.select_comm))
        return recompute_of_layers(len(self.stages.layers(stage, chunk)), *counts)
