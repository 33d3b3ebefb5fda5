"""User-defined linear constraints on the weights, written as inequalities between objectives."""

import ast
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from firm.solvers.programs import is_feasible

Term = dict[str | None, float]
"""A linear expression: coefficients by objective, and the constant under None."""


def linear_constraints(
    texts: Sequence[str], objectives: Sequence[str]
) -> tuple[tuple[float, ...], ...]:
    """Parses constraints on the weights into rows (a₁, ..., a_M, b): a₁λ₁ + ... + a_Mλ_M ≤ b.

    Args:
        texts: Inequalities or equations, linear in the objectives' names, which denote their
            weights: "harmless >= 0.3", "helpful <= 2 * harmless", "0.1 <= helpful <= 0.6".
        objectives: Names of the M objectives.

    Returns:
        Rows of M + 1 numbers, (a₁, ..., a_M, b), for ``firm_weights``.

    Raises:
        ValueError: When a text is not such an inequality, or no weights satisfy all of them.

    >>> linear_constraints(["harmless >= 0.3", "helpful <= 2 * harmless"], ["helpful", "harmless"])
    ((0.0, -1.0, -0.3), (1.0, -2.0, 0.0))
    """
    rows: list[tuple[float, ...]] = []
    for text in texts:
        for difference in _differences(text, objectives):  # difference ≤ 0
            bound = 0.0 - difference.get(None, 0.0)
            rows.append((*(difference.get(name, 0.0) for name in objectives), bound))
    check_feasible(rows, texts)
    return tuple(rows)


def check_feasible(rows: Sequence[Sequence[float]], texts: Sequence[str] = ()) -> None:
    """Raises ``ValueError`` if no weights on the simplex satisfy the rows (a₁, ..., a_M, b)."""
    if rows and not _are_feasible(tuple(map(tuple, rows))):
        shown = "; ".join(texts) or f"rows {[list(row) for row in rows]}"
        raise ValueError(f"No non-negative weights with sum 1 satisfy all constraints: {shown}.")


@lru_cache(maxsize=64)  # checked at every solve, mostly for the same rows
def _are_feasible(rows: tuple[tuple[float, ...], ...]) -> bool:
    table = np.array(rows)
    return is_feasible(table[:, :-1], table[:, -1])


def _differences(text: str, objectives: Sequence[str]) -> list[Term]:
    """Returns the expressions that a comparison, or a chain of them, requires to be at most 0."""
    remedy = "write a linear inequality such as 'harmless >= 0.3' or 'helpful <= 2 * harmless'"
    # names such as reward-1 are not identifiers, so each gets an alias
    aliases = {f"objective_{index}_": name for index, name in enumerate(objectives)}
    alias_by_name = {name: alias for alias, name in aliases.items()}
    longest_first = "|".join(map(re.escape, sorted(objectives, key=len, reverse=True)))
    pattern = rf"(?<![\w.])(?:{longest_first})(?![\w.])"
    plain = re.sub(pattern, lambda match: alias_by_name[match.group()], text)
    try:
        tree = ast.parse(plain.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(f"The constraint {text!r} is not an inequality; {remedy}.") from None
    if not isinstance(tree, ast.Compare):
        raise ValueError(f"The constraint {text!r} is not an inequality; {remedy}.")
    bounds = []
    sides = [tree.left, *tree.comparators]
    for operator, left, right in zip(tree.ops, sides, sides[1:], strict=False):
        try:
            low, high = _term(left, aliases), _term(right, aliases)
        except ValueError as error:
            raise ValueError(f"The constraint {text!r} {error}; {remedy}.") from None
        if isinstance(operator, ast.LtE | ast.Eq):
            bounds.append(_sum(low, high, factor=-1.0))
        if isinstance(operator, ast.GtE | ast.Eq):
            bounds.append(_sum(high, low, factor=-1.0))
        if not isinstance(operator, ast.LtE | ast.GtE | ast.Eq):
            raise ValueError(f"The constraint {text!r} needs <=, >= or ==; {remedy}.")
    return bounds


def _term(node: ast.expr, aliases: Mapping[str, str]) -> Term:
    """Returns a linear expression; raises ``ValueError`` if it is anything else."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return {None: float(number)}
        case ast.Name(id=alias):
            if alias not in aliases:
                known = ", ".join(aliases.values())
                raise ValueError(f"names {alias!r}, but the objectives are {known}")
            return {aliases[alias]: 1.0}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _sum({}, _term(operand, aliases), factor=-1.0)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _sum(_term(left, aliases), _term(right, aliases), factor=1.0)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _sum(_term(left, aliases), _term(right, aliases), factor=-1.0)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() as operator, right=right):
            first, second = _term(left, aliases), _term(right, aliases)
            if isinstance(operator, ast.Mult) and first.keys() <= {None}:
                first, second = second, first
            number = second.get(None, 0.0)
            if not second.keys() <= {None} or (isinstance(operator, ast.Div) and number == 0):
                raise ValueError("is not linear")
            factor = number if isinstance(operator, ast.Mult) else 1.0 / number
            return _sum({}, first, factor=factor)
    raise ValueError("is not linear")


def _sum(first: Term, second: Term, *, factor: float) -> Term:
    """Returns first + factor · second."""
    return {
        key: first.get(key, 0.0) + factor * second.get(key, 0.0) + 0.0
        for key in [*first, *(key for key in second if key not in first)]
    }
