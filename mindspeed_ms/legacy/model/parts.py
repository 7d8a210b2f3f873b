"""Registry of a transformer layer's cells: each registers itself in its own file, which `transformer_layer` imports.

`layout.describers.registry` has their parameters.

    part        kind                      called with
    attention   model.attention_type      (config, layer_number, AttnType, AttnMaskType)
    mlp         model.mlp_kind(layer)     (config)

`config` is the layer's `DescribedConfig`. Each returns its output `[s, b, h]` and a bias or None, which the layer adds.
"""

from mindspeed_ms.legacy.model.module import Module

_CELLS = {"attention": {}, "mlp": {}}


class LayerCell(Module):
    """Base of attention and feed-forward cells."""

    names_are_global = False

    def set_layer_number(self, number):
        """Told the global number of the layer, from 1; a cell that has no use for it ignores it."""

    def recompute_selectively(self):
        """Recompute in the backward what takes the most memory, from the next call on (`select_recompute`).

        Raises:
            ValueError: this kind of cell has no such part.
        """
        raise ValueError(
            f"{type(self).__name__} recomputes nothing selectively: set recompute_granularity 'full', or leave "
            "select_recompute and recompute_granularity 'selective' out."
        )


def register_part(part, kind):
    """Decorator: the class, a LayerCell, is the cell of `part` of the kind `kind`.

    Raises:
        ValueError: another class, or a kind that has a cell already.
    """

    def decorate(cell):
        if not issubclass(cell, LayerCell):
            raise ValueError(f"{part} '{kind}': {cell.__name__} must be a subclass of LayerCell.")
        if _CELLS[part].setdefault(kind, cell) is not cell:
            raise ValueError(f"{part} '{kind}' has a cell already: choose another kind.")
        return cell

    return decorate


def cell_of(part, kind):
    """The class registered for `part` and `kind`. ValueError without one."""
    if kind not in _CELLS[part]:
        raise ValueError(f"{part} '{kind}' has no cell, only {list(_CELLS[part])} have: register_part('{part}', '{kind}').")
    return _CELLS[part][kind]
