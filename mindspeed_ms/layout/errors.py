"""LayoutError: exception of impossible layouts."""


class LayoutError(ValueError, RuntimeError):
    """Layout that cannot be built. Subclass of RuntimeError (which Megatron raises) and ValueError (which others expect)."""
