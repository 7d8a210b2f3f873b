"""Rules of config.json about the window of tokens that attention sees, of all layers or of some."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mindspeed_ms.models.families.rules import checked, m


def _switch(config, name):
    value = config.get(name)
    if value not in (None, False, True) or isinstance(value, int) != isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: expected true or false")
    return bool(value)


_NAMES_PATH = m("sliding_window")[0]
_NAMES = MappingProxyType(dict(zip(m("sliding_window", "window_attn_skip_freq"), ("sliding_window", "layer_types"))))


@dataclass(frozen=True)
class Window:
    """`sliding_window` of all layers; null is none.

    Attributes:
        default (Optional[int]): where it is left out.
        switch (str): field that switches it on; "" without one.
    """

    default: Any = None
    switch: str = ""
    paths: tuple = m("sliding_window", "window_attn_skip_freq")
    names = MappingProxyType({_NAMES_PATH: "sliding_window"})

    @property
    def fields(self):
        return (self.switch, "layer_types") if self.switch else ("layer_types",)

    def read(self, config):
        window = checked("sliding_window", config.get("sliding_window", self.default), self.paths[0])
        window = None if self.switch and not _switch(config, self.switch) else window
        kind = "full_attention" if window is None else "sliding_attention"
        if (config.get("layer_types") or [kind]) != [kind] * len(config.get("layer_types") or [kind]):
            raise ValueError(f"layer_types is {config['layer_types']!r}, but sliding_window says {kind} of all layers")
        return {self.paths[0]: window, self.paths[1]: None}

    def write(self, settings):
        window, pattern = (settings[path] for path in self.paths)
        if window is not None and pattern is not None:
            raise ValueError(f"has one sliding_window for all layers: it cannot say {self.paths[1]} = {pattern!r}")
        return {"sliding_window": window, **({self.switch: window is not None} if self.switch else {})}


@dataclass(frozen=True)
class LayerWindows:
    """`sliding_window` of the layers from `max_window_layers` on, or of those that `layer_types` names."""

    paths: tuple = m("sliding_window", "window_attn_skip_freq", "num_layers")
    names = _NAMES
    fields = ("use_sliding_window", "max_window_layers")

    def read(self, config):
        layers, window = config.get("num_hidden_layers"), config.get("sliding_window", 4096)
        checked("sliding_window", window, self.paths[0])
        result = {self.paths[0]: None, self.paths[1]: None, self.paths[2]: layers}
        kinds, first = config.get("layer_types"), config.get("max_window_layers", 28)
        if checked("max_window_layers", first, self.paths[2]) < 0:
            raise ValueError(f"max_window_layers is {first}: expected an integer that is not negative")
        if not _switch(config, "use_sliding_window") or window is None:
            if kinds is not None and (not isinstance(kinds, list) or set(map(str, kinds)) - {"full_attention"}):
                raise ValueError(f"layer_types is {kinds!r}, but use_sliding_window says that all layers have full_attention")
            return result
        if kinds is None:
            kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
        if not isinstance(kinds, list) or {*map(str, kinds)} - {"full_attention", "sliding_attention"} or len(kinds) != layers:
            raise ValueError(
                f"layer_types is {kinds!r}: expected full_attention or sliding_attention for each of {layers} layers"
            )
        pattern = [int(kind == "sliding_attention") for kind in kinds]
        if not any(pattern):
            return result
        return {**result, self.paths[0]: window, self.paths[1]: None if all(pattern) else pattern}

    def write(self, settings):
        window, pattern, layers = (settings[path] for path in self.paths)
        if pattern and len(pattern) == 1 and layers > 1:  # every n-th layer sees everything
            pattern = [int((layer + 1) % pattern[0] != 0) for layer in range(layers)]
        pattern = [0] * layers if window is None else pattern or [1] * layers
        return {
            "num_hidden_layers": layers,
            "use_sliding_window": any(pattern),
            "sliding_window": window,
            "max_window_layers": pattern.index(1) if any(pattern) else layers,
            "layer_types": ["sliding_attention" if one else "full_attention" for one in pattern],
        }
