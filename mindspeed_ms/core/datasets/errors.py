"""Exception of all datasets for unusable data."""


class DatasetError(ValueError):
    """Damaged or too short data, or an impossible request; the message says what to do."""
