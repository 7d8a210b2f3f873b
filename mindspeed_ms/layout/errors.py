"""LayoutError."""


class LayoutError(ValueError, RuntimeError):
    """A layout that cannot be built. Both parents, since Megatron raises RuntimeError where others expect ValueError."""
