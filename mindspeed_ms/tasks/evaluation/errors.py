"""Error of evaluation."""


class EvaluationError(ValueError):
    """Error: data that cannot be evaluated; the message names file, line and field."""
