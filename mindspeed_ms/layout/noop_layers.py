"""Layers without weights: their places in lists with one entry for each layer."""

from mindspeed_ms.layout.stages import parse_noop_layers


def without_noops(entries, noops):
    """Entries of the layers with weights.

    Args:
        entries (list): one for each place.
        noops: places without weights, see `stages.parse_noop_layers`.
    """
    places = parse_noop_layers(noops)
    return [entry for place, entry in enumerate(entries) if place not in places]


def with_noops(entries, noops, filling):
    """Entries of all places, from those of the layers with weights.

    Args:
        entries (list): one for each layer with weights.
        noops: places without weights, see `stages.parse_noop_layers`.
        filling: entry of these.
    """
    places, rest = parse_noop_layers(noops), iter(entries)
    return [filling if place in places else next(rest, filling) for place in range(len(entries) + len(places))]
