"""Safe parsing of YAML from untrusted sources."""

import json
import re
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from typing import Any, NoReturn

import yaml

from firm.base.sanitize import printable
from firm.run.errors import UserError

MAX_NODES = 100_000
"""Maximum number of values in a YAML text, with aliases expanded."""


_TAG = "tag:yaml.org,2002:"
_AMBIGUOUS = "tag:firm,ambiguous"
_PLAIN = {
    f"{_TAG}bool": re.compile("true|True|TRUE|false|False|FALSE"),
    f"{_TAG}int": re.compile(r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+"),
    f"{_TAG}float": re.compile(
        r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+"
        r"|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
    ),
}
"""Accepted notation of booleans and numbers."""
_NUMBERS = (f"{_TAG}int", f"{_TAG}float")
_OF_YAML_1_2 = re.compile(r"[-+]?0[0-9]+|0o[0-7]+")
"""Integers in YAML 1.2 that PyYAML, which follows YAML 1.1, reads as another value or a string."""


class AmbiguousYaml(UserError):
    """Raised on an unquoted text that YAML parsers interpret differently.

    Args:
        line: Line number of the text.
        reason: Possible interpretations, and how to write the text instead.
        source: Name of the file or key, empty if it is not known.
    """

    def __init__(self, line: int, reason: str, source: str = "") -> None:
        super().__init__(f"{source and f'{source}, '}line {line}: {reason}")
        self.line, self.reason = line, reason


def read_yaml(text: str, source: str = "") -> Any:
    """Parses a YAML text to plain data.

    Numbers are decimal or hexadecimal, and booleans are true and false. Other unquoted texts that
    YAML 1.1 and 1.2 interpret differently, such as 010, 1:30, 1_000, yes or 2024-01-01, are
    refused. PyYAML silently keeps the last of several equal keys, and a few lines of aliases can
    expand to more values than fit into memory: both are refused before any value is built. Messages
    name the source, a file or key.

    Raises:
        AmbiguousYaml: The text contains an ambiguous value.
        UserError: The text is malformed, contains a duplicate key or half a surrogate pair, or is
            too deep or too large.
    """
    try:
        return deepcopy(_data(text))
    except AmbiguousYaml as error:
        raise AmbiguousYaml(error.line, error.reason, source) from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", error)
        line = f", line {mark.line + 1}" if mark else ""
    except RecursionError:
        line, problem = "", "it is nested too deeply"
    except (ValueError, OverflowError) as error:  # an impossible date or number
        line, problem = "", error
    except (LookupError, AttributeError, TypeError):  # raised by PyYAML on `!!bool x`, for example
        line, problem = "", "a value does not fit its tag"
    where = f"{source} is " if source else ""
    raise UserError(f"{where}malformed YAML{line}: {problem}; correct it.")


@lru_cache(maxsize=16)
def _data(text: str) -> Any:
    """Parses a text; cached, since each page of a run reads the run's settings."""
    loader = _Loader("")  # `_Loader(text)` raises on invalid characters
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_node(loader, node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


class _Resolver(yaml.resolver.BaseResolver):
    """Resolves the type of an unquoted text, and detects texts that YAML parsers disagree on."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        """Returns the tag of a node; ``_AMBIGUOUS`` if YAML parsers disagree."""
        earlier = super().resolve(kind, value, implicit)
        if kind is not yaml.ScalarNode or not implicit[0]:
            return earlier
        for tag, pattern in _PLAIN.items():
            if pattern.fullmatch(value):
                return tag
        is_other = earlier in (*_PLAIN, f"{_TAG}timestamp") or _OF_YAML_1_2.fullmatch(value)
        return _AMBIGUOUS if is_other else earlier


class _Loader(_Resolver, yaml.SafeLoader):
    """Loads plain data; refuses ambiguous texts."""

    def construct_ambiguous(self, node: yaml.ScalarNode) -> NoReturn:
        """Raises `AmbiguousYaml`."""
        raise AmbiguousYaml(node.start_mark.line + 1, _in_words(node.value))


_Loader.add_constructor(_AMBIGUOUS, _Loader.construct_ambiguous)


class Dumper(_Resolver, yaml.SafeDumper):
    """Writes plain data; quotes texts that could be parsed as another type."""


def _in_words(value: str) -> str:
    """Describes the interpretations of an ambiguous text, and how to write it instead."""
    readings, value = [], printable(value, max_length=80)
    with suppress(ValueError):  # raised on an impossible date
        readings.append(yaml.safe_load(value))
    if _OF_YAML_1_2.fullmatch(value):
        readings.append(int(value, 8 if "o" in value else 10))
    numbers = [json.dumps(each) for each in readings if isinstance(each, bool | int | float)]
    others = "a string" if len(numbers) < 2 else numbers[1]
    remedy = "".join(f"{number} or " for number in numbers)
    return (
        f"{value} is {numbers[0] if numbers else 'a date'} to some YAML parsers and {others} to "
        f"others; write {remedy}'{value}' in quotes."
    )


def _check_node(loader: yaml.SafeLoader, root: yaml.Node) -> None:
    """Raises an error on content that `read_yaml` refuses before building any value."""
    num_values: dict[int, int | None] = {}  # by node; None while the node is being visited

    def refuse(problem: str, node: yaml.Node) -> NoReturn:
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    def visit(node: yaml.Node) -> int:
        if id(node) in num_values:
            if (known := num_values[id(node)]) is None:
                refuse("an alias inside of its own anchor", node)
            return known
        num_values[id(node)] = None
        if isinstance(node, yaml.MappingNode):
            check_keys(node)
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        else:
            parts = []
            is_number = any(_PLAIN[tag].fullmatch(node.value) for tag in _NUMBERS)
            if node.tag in _NUMBERS and not is_number:  # `!!int 010`
                refuse(f"{printable(node.value, max_length=80)} is not a decimal number", node)
            if any("\ud800" <= character <= "\udfff" for character in node.value):
                refuse("half a surrogate pair, which is not a character", node)
        num_values[id(node)] = total = 1 + sum(map(visit, parts))
        if total > MAX_NODES:
            refuse(f"more than {MAX_NODES} values with aliases expanded", node)
        return total

    def check_keys(node: yaml.MappingNode) -> None:
        seen: dict[Any, str] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # not used in configurations; PyYAML refuses unhashable keys
            text = key_node.value
            is_merge = key_node.tag == "tag:yaml.org,2002:merge"
            key = "<<" if is_merge else loader.construct_object(key_node)
            if key in seen and seen[key] == text:
                refuse(f"key {text!r} twice", key_node)
            if key in seen:
                problem = f"keys {seen[key]!r} and {text!r} are both read as {key!r}, so quote them"
                refuse(problem, key_node)
            seen[key] = text

    visit(root)
