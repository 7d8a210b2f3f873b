"""What all datasets raise for data that they cannot use."""


class DatasetError(ValueError):
    """Data that is damaged, too short, or asked for in a way that cannot be; the message says what to do."""
