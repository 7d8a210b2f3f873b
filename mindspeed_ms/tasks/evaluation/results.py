"""Results of an evaluation: means by category, as a table and as json."""

from dataclasses import dataclass, field

_ALL = "all"


@dataclass
class Table:
    """Means of figures by category.

    Args:
        figures (tuple[str, ...]): their names.

    Attributes:
        cut (int): questions whose context did not fit whole.
    """

    figures: tuple
    cut: int = 0
    _sums: dict = field(default_factory=dict)
    _counts: dict = field(default_factory=dict)

    def add(self, category, **figures):
        """Add the figures (numbers or bool) of one question."""
        for name in (category, _ALL):
            sums = self._sums.setdefault(name, dict.fromkeys(self.figures, 0.0))
            self._counts[name] = self._counts.get(name, 0) + 1
            for figure in self.figures:
                sums[figure] += float(figures[figure])

    def as_json(self):
        """{"all": {figure: mean, ..., "count": n}, "categories": {name: the same}, "cut": n}."""
        rows = {name: {**self._means(name), "count": self._counts[name]} for name in self._sums}
        total = rows.pop(_ALL, {"count": 0})
        return {_ALL: total, "categories": dict(sorted(rows.items())), "cut": self.cut}

    def as_text(self):
        """The table as lines; one row per category if there are several, and one for all."""
        names = sorted(name for name in self._sums if name != _ALL)
        names = [*(names if len(names) > 1 else ()), _ALL]
        width = max(len(name) for name in ("category", *names))
        head = f"{'category':<{width}}  {'count':>7}" + "".join(f"  {figure:>9}" for figure in self.figures)
        lines = [head, "-" * len(head)]
        for name in names:
            values = "".join(f"  {self._means(name)[figure]:>9.4f}" for figure in self.figures)
            lines.append(f"{name:<{width}}  {self._counts[name]:>7}{values}")
        if self.cut:
            lines.append(f"{self.cut} contexts were longer than the model's context: their beginnings were cut.")
        return "\n".join(lines)

    def _means(self, name):
        return {figure: self._sums[name][figure] / self._counts[name] for figure in self.figures}
