"""Where flags come from beside the command line: the environment's OCTAVO_ variables, and a YAML file.

Knows no flag; a parser says which there are and what a text means.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.core.errors import ConfigError, shorten
from octavo.server.settings import KEY_VARIABLES

if TYPE_CHECKING:
    from octavo.cli.parser import Parser

PREFIX = "OCTAVO_"
NO_FLAGS = (*KEY_VARIABLES, "OCTAVO_FAULT")  # read elsewhere: keys where they are checked, the fault in csrc/fault.h
CONFIG_FLAG = "--config"
MAX_CONFIG_BYTES = 1 << 20
MAX_CONFIG_NODES = 10_000
EXPONENT = r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"  # a number of YAML 1.2, as 1e6; PyYAML knows 1.1, where it is a text


@dataclass(frozen=True, slots=True)
class Given:
    """A flag's value from elsewhere; `where` names the place in messages."""

    action: argparse.Action
    value: Any
    where: str


def read_environment(
    parser: Parser, environment: Mapping[str, str], is_known_elsewhere: Callable[[str], bool]
) -> tuple[dict[str, Given], list[str]]:
    """By destination what OCTAVO_ variables say, and a warning for each that nobody knows. Empty ones count as unset.

    Raises ConfigError for a value that does not do.
    """
    given: dict[str, Given] = {}
    warnings = []
    for variable, text in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable in NO_FLAGS or not text:
            continue
        name = variable.removeprefix(PREFIX).lower().replace("_", "-")
        action = parser.action_of(name)
        if action is None or action.dest == argparse.SUPPRESS or variable != variable_of(name):
            if not is_known_elsewhere(name):
                near = parser.nearest(name)
                hint = f": did you mean {variable_of(near)}?" if near else ""
                warnings.append(f"the environment has {variable}, which octavo does not know{hint}")
            continue
        several = parser.takes_several(action)
        texts = [part.strip() for part in text.split(",")] if several else [text]
        given[action.dest] = Given(action, _converted(parser, action, texts, variable), variable)
    return given, warnings


def variable_of(name: str) -> str:
    """The variable that sets the flag of this long name."""
    return PREFIX + name.upper().replace("-", "_")


def read_config(parser: Parser, path: str) -> dict[str, Given]:
    """By destination what a YAML file says: a mapping from names of flags, with - or _, to values.

    A value is written as on the command line, a list where a flag may have several, a mapping where it takes JSON.
    Raises ConfigError with file, line and name.
    """
    import yaml

    try:
        with open(path, "rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise ConfigError(f"{CONFIG_FLAG} {path} has more than {MAX_CONFIG_BYTES:,} bytes: name a file of flags")
        root = yaml.compose(content, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{CONFIG_FLAG} {path} cannot be read ({error.strerror}): check the path") from None
    except RecursionError:
        raise ConfigError(f"{CONFIG_FLAG} {path} is nested too deeply: flags have plain values") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{CONFIG_FLAG} {path} is not YAML: {_one_line(error)}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{CONFIG_FLAG} {path} must have lines like 'max-model-len: 4096', names of flags and values")
    given: dict[str, Given] = {}
    for key, node in root.value:
        where = f"{path}, line {key.start_mark.line + 1}: {shorten(str(key.value))}"
        name = str(key.value).replace("_", "-") if isinstance(key, yaml.ScalarNode) else ""
        if parser.leaves_out(name):
            continue
        if name == CONFIG_FLAG[2:]:
            raise ConfigError(f"{where} cannot be set here, for a file names no other file: leave it out")
        action = parser.action_of(name)
        if action is None or action.dest == argparse.SUPPRESS:
            near = parser.nearest(name)
            raise ConfigError(f"{where} is no flag{f': did you mean {near}?' if near else ''}")
        if name.startswith("no-"):
            raise ConfigError(f"{where} is no name here: write '{name[3:]}: false'")
        if action.dest in given:
            raise ConfigError(f"{where} is there twice, before as {given[action.dest].where}: keep one")
        if node.tag != "tag:yaml.org,2002:null":
            texts = _texts(parser, action, node, where)
            given[action.dest] = Given(action, _converted(parser, action, texts, where), where)
    return given


def _texts(parser: Parser, action: argparse.Action, node: Any, where: str) -> list[str]:
    """A node's value as the words of a command line."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return [node.value]
    if parser.takes_several(action) and isinstance(node, yaml.SequenceNode):
        if not node.value or not all(isinstance(item, yaml.ScalarNode) for item in node.value):
            raise ConfigError(f"{where} must be a list of plain values")
        return [item.value for item in node.value]
    kind = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
    if action.type is None or action.nargs == 0:
        raise ConfigError(f"{where} is {kind}; it must be one value")
    try:
        return [json.dumps(_plain(node, yaml.SafeLoader(""), [MAX_CONFIG_NODES]), allow_nan=False)]
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is {kind} that JSON cannot have: {_one_line(error)}") from None


def _plain(node: Any, loader: Any, budget: list[int]) -> Any:
    """What JSON has for a node. Counts nodes, for an alias can stand for many, and those for more."""
    budget[0] -= 1
    if budget[0] < 0:
        raise ValueError(f"it has more than {MAX_CONFIG_NODES:,} values")
    if node.id == "mapping":
        return {key.value: _plain(value, loader, budget) for key, value in node.value}
    if node.id == "sequence":
        return [_plain(item, loader, budget) for item in node.value]
    value = loader.construct_object(node)
    if isinstance(value, str) and node.style is None and re.fullmatch(EXPONENT, value):
        return float(value)
    return value


def _converted(parser: Parser, action: argparse.Action, texts: list[str], where: str) -> Any:
    try:
        return parser.convert(action, texts)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _one_line(error: Exception) -> str:
    return shorten(" ".join(str(error).split()), 200)
