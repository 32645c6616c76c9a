"""Computes a tree."""

import operator

from calc.parser import parse
from calc.tokens import CalcError

OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "%": operator.mod,
    "**": operator.pow,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "&&": lambda a, b: a and b,
    "||": lambda a, b: a or b,
}
FUNCTIONS = {"min": min, "max": max, "len": len, "abs": abs, "sum": lambda *values: sum(values)}


def evaluate(source, names=None):
    """Value of an expression. Raises CalcError for whatever cannot be read or computed."""
    return compute(parse(source), names or {})


def compute(tree, names):
    operation, *operands = tree
    if operation in ("number", "text"):
        return operands[0]
    if operation == "name":
        return names[operands[0]]
    if operation == "call":
        return FUNCTIONS[operands[0]](*[compute(operand, names) for operand in operands[1:]])
    values = [compute(operand, names) for operand in operands]
    if operation == "?":
        return values[1] if values[0] else values[2]
    if operation == "unary-":
        return -values[0]
    if operation == "unary!":
        return not values[0]
    return OPERATIONS[operation](*values)
