"""Tally: counts of records read, written and left out, batch by batch, kept over interruptions."""

from dataclasses import asdict, dataclass, field


@dataclass
class Tally:
    """Counts of records and samples, of a part of the input or all of it.

    Attributes:
        records (int): records read.
        samples (dict[str, int]), tokens (dict[str, int]): written, by the name of the output.
        dropped (dict[str, int]): records (of a corpus with several keys: texts) that were left out, by reason.
        first (dict[str, str]): where a reason came up first.
        details (dict[str, str]): the problem at the first place, for some reasons.
        notes (dict[str, int]): other things worth knowing, such as how many samples were cut.
        packs (int): packed sequences that hold the samples; 0: nothing was packed.
        pack_length (int): tokens of a packed sequence, padding included.
    """

    records: int = 0
    samples: dict = field(default_factory=dict)
    tokens: dict = field(default_factory=dict)
    dropped: dict = field(default_factory=dict)
    first: dict = field(default_factory=dict)
    details: dict = field(default_factory=dict)
    notes: dict = field(default_factory=dict)
    packs: int = 0
    pack_length: int = 0

    def drop(self, reason, place, detail=""):
        """Count a record that is left out."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if detail and reason not in self.first:
            self.details[reason] = detail
        self.first.setdefault(reason, place)

    def note(self, text, place, count=1):
        """Count a remark that does not change the output."""
        if count:
            self.notes[text] = self.notes.get(text, 0) + count
            self.first.setdefault(text, place)

    def add(self, other):
        """Add the counts of a later part."""
        self.records += other.records
        for mine, theirs in (
            (self.samples, other.samples),
            (self.tokens, other.tokens),
            (self.dropped, other.dropped),
            (self.notes, other.notes),
        ):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0) + count
        for key, place in other.first.items():
            if key in other.details and key not in self.first:
                self.details[key] = other.details[key]
            self.first.setdefault(key, place)

    def as_dict(self):
        """Counts as plain values, for `Tally(**values)`."""
        return asdict(self)

    def lines(self):
        """Lines of the final report (list[str])."""
        lines = [f"records read      {self.records:,}"]
        for key in self.samples:
            held = f"{self.samples[key]:,} samples, {self.tokens[key]:,} tokens"
            if self.packs:
                held = f"{self.packs:,} packs of {self.pack_length:,} tokens, which hold {held}"
            lines.append(f"{key}: {held}")
        for kind, counts in (("left out", self.dropped), ("note", self.notes)):
            lines += [f"{kind:<18}{words}" for words in self.counted(counts)]
        return lines

    def counted(self, counts):
        """Texts (list[str]) of counts (`dropped` or `notes`), each with its first place."""
        return [
            f"{count:,} {text} (first: {self.first[text]})" + (f": {self.details[text]}" if text in self.details else "")
            for text, count in counts.items()
        ]
