"""Declarations of the operators: signature and contract of each, one file per topic; see `forms.operator`."""
