"""Patterns of layers such as "([1]*3+[0]*1)*3" in Megatron's arguments, read as lists."""

import ast

_LONGEST_PATTERN = 10000  # more than any model has layers


def read_pattern(text):
    """List or number from "([1]*3+[0]*1)*3": lists, +, * and whole numbers only.

    Raises:
        ValueError: for anything else.
    """
    try:
        return _pattern(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError):
        raise ValueError(f"not a pattern: {text!r}") from None


def _length(part):
    return part if isinstance(part, int) else len(part)


def _pattern(node):
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _pattern(node.left), _pattern(node.right)
        if isinstance(node.op, ast.Mult) and max(_length(left), 1) * max(_length(right), 1) > _LONGEST_PATTERN:
            raise ValueError(node)
        return left + right if isinstance(node.op, ast.Add) else left * right
    if isinstance(node, ast.List):
        return [_pattern(item) for item in node.elts]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError(node)
