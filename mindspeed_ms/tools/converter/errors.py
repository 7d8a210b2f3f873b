"""Error of a conversion that the user can mend."""


class ConversionError(ValueError):
    """Wrong or contradicting arguments; the message names the flag, its value and what to do."""
