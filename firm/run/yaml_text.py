"""Reads YAML texts that may come from anywhere."""

from copy import deepcopy
from functools import lru_cache
from typing import Any, NoReturn

import yaml

from firm.run.errors import UserError

MAX_NODES = 100_000
"""Most values of a YAML text, those that an alias repeats counted each time."""


def read_yaml(text: str, source: str = "") -> Any:
    """Returns the plain data in a YAML text, in which a key stands once.

    PyYAML keeps the last of two equal keys without a word, and a few lines of aliases can stand for
    more values than fit into memory: both are refused before anything is built. Messages name the
    source, a file or key.

    Raises:
        UserError: It is malformed, has a key twice or half a surrogate pair, or is too deep or too
            large.
    """
    try:
        return deepcopy(_data(text))
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", error)
        line = f", line {mark.line + 1}" if mark else ""
    except RecursionError:
        line, problem = "", "it is nested too deeply"
    except (ValueError, OverflowError) as error:  # a date or a number that there is not
        line, problem = "", error
    except (LookupError, AttributeError, TypeError):  # what PyYAML meets in !!bool x, for one
        line, problem = "", "a value does not fit its tag"
    where = f"{source} is " if source else ""
    raise UserError(f"{where}malformed YAML{line}: {problem}; correct it.")


@lru_cache(maxsize=16)
def _data(text: str) -> Any:
    """Returns the data in a text; a run's settings are asked for with every page of it."""
    loader = yaml.SafeLoader("")  # a text with odd characters is refused as it is given, below
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_node(loader, node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_node(loader: yaml.SafeLoader, root: yaml.Node) -> None:
    """Raises a YAML error on what would not be read as it stands; `read_yaml` says what."""
    num_values: dict[int, int | None] = {}  # by node; None inside of it

    def refuse(problem: str, node: yaml.Node) -> NoReturn:
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    def visit(node: yaml.Node) -> int:
        if id(node) in num_values:
            if (known := num_values[id(node)]) is None:
                refuse("an alias inside of what it stands for", node)
            return known
        num_values[id(node)] = None
        if isinstance(node, yaml.MappingNode):
            check_keys(node)
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        else:
            parts = []
            if any("\ud800" <= character <= "\udfff" for character in node.value):
                refuse("half a surrogate pair, which is no character", node)
        num_values[id(node)] = total = 1 + sum(map(visit, parts))
        if total > MAX_NODES:
            refuse(f"more than {MAX_NODES} values, with what aliases repeat", node)
        return total

    def check_keys(node: yaml.MappingNode) -> None:
        seen: dict[Any, str] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # no configuration has such keys, and PyYAML refuses those it cannot take
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
