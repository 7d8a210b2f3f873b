"""The operators of upstream's public API under their names, on the forms of this package, so that they also run on CPU."""
