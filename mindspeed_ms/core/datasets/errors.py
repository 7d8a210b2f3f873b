"""Exception of all datasets for unusable data."""


class DatasetError(ValueError):
    """The data is damaged, too short, or the request is impossible; the message says what to do."""
