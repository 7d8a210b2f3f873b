"""Signatures and contracts of the operators; each calls the form chosen in `forms`."""
