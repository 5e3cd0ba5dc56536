"""Chapter 1: expressions, how the key of a numeric question is written down: never as a number.

Owns a small evaluator. An expression may call the public functions of `zerolab.sim.estimate`
and calculate with what they return: `model_state_bytes(7.5e9, 64, stage=1)`. Nothing else has a
name in it, so a bank from somewhere else can do no harm.
"""

import ast
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any

from ..errors import UsageError

LONGEST = 400  # characters
LARGEST_EXPONENT = 64
OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def functions() -> dict[str, Callable[..., Any]]:
    """Return what an expression may call: the public functions of `zerolab.sim.estimate`."""
    from ..sim import estimate  # a notebook without numbers to calculate does not wait for it

    home = estimate.__name__.rpartition(".")[0]
    return {
        name: value
        for name, value in vars(estimate).items()
        if inspect.isfunction(value)
        and not name.startswith("_")
        and value.__module__.startswith(home)
    }


def check(expression: str) -> None:
    """Refuse an expression that is not made of known functions, numbers and arithmetic.

    Raises:
        UsageError: it names the part that is not allowed.
    """
    _parse(expression)


def calls(expression: str) -> bool:
    """Tell whether an expression calls anything: one that does not is a typed number."""
    return any(isinstance(node, ast.Call) for node in ast.walk(_parse(expression)))


def evaluate(expression: str) -> float:
    """Return the value of an expression.

    Raises:
        UsageError: it is not allowed, fails, or is no finite number.
    """
    try:
        value = _value(_parse(expression).body)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"expression {expression!r} fails: {error}; mend it") from None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and math.isfinite(value)):
        raise UsageError(f"expression {expression!r} gives {value!r}; it must give one number")
    return float(value)


def _parse(expression: str) -> ast.Expression:
    """Return the checked tree."""
    if len(expression) > LONGEST:
        raise UsageError(f"expression of {len(expression)} characters; at most {LONGEST}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UsageError(f"expression {expression!r} is no Python: {error}; mend it") from None
    _check_node(tree.body, expression)
    return tree


def _check_node(node: ast.AST, expression: str) -> None:
    """Refuse a tree with anything in it that is not on the list."""
    if isinstance(node, ast.Call):
        _check_call(node, expression)
        parts: list[ast.AST] = [*node.args, *(keyword.value for keyword in node.keywords)]
    elif (isinstance(node, ast.BinOp) and type(node.op) is ast.Pow) or (
        isinstance(node, ast.BinOp) and type(node.op) in OPERATORS
    ):
        parts = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        parts = [node.operand]
    elif isinstance(node, ast.Subscript):
        parts = [node.value, node.slice]
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str)):
        parts = []
    else:
        raise UsageError(
            f"{ast.unparse(node)!r} is not allowed in expression {expression!r}; use functions of "
            "zerolab.sim.estimate, numbers, + - * / // **"
        )
    for part in parts:
        _check_node(part, expression)


def _check_call(node: ast.Call, expression: str) -> None:
    """Refuse a call of anything but a function of the estimate."""
    name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
    if name not in functions():
        known = ", ".join(sorted(functions()))
        raise UsageError(
            f"{name!r} in expression {expression!r} is no function of zerolab.sim.estimate; "
            f"known: {known}"
        )
    if any(keyword.arg is None for keyword in node.keywords):
        raise UsageError(f"'**' in a call is not allowed in expression {expression!r}; name it")


def _value(node: ast.AST) -> Any:
    """Calculate a checked tree."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp):
        return OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.Subscript):
        return _value(node.value)[_value(node.slice)]
    if isinstance(node, ast.BinOp):
        return _calculated(node, _value(node.left), _value(node.right))
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    arguments = [_value(argument) for argument in node.args]
    named = {keyword.arg or "": _value(keyword.value) for keyword in node.keywords}
    return functions()[node.func.id](*arguments, **named)


def _calculated(node: ast.BinOp, left: Any, right: Any) -> Any:
    """Apply an operator to numbers; texts and lists are not calculated with."""
    if not (isinstance(left, (int, float)) and isinstance(right, (int, float))):
        raise UsageError(f"{ast.unparse(node)!r} calculates with what is no number; mend it")
    if type(node.op) is ast.Pow and abs(right) > LARGEST_EXPONENT:
        raise UsageError(f"exponent {right} is above {LARGEST_EXPONENT}; write it otherwise")
    return OPERATORS[type(node.op)](left, right)
