"""The parser of a command's flags: one-line errors that suggest the right name, help by group, vLLM's spellings, and
values that come from the environment or a file where the command line has none.

Knows argparse and vLLM's table of flags, and of octavo's own flags only which say the same thing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from octavo.cli.sources import CONFIG_FLAG, Given, read_config, read_environment
from octavo.cli.values import json_object
from octavo.core.errors import ConfigError, shorten
from octavo.core.vllm_flags import REFUSED, VllmFlag, vllm_flags
from octavo.server.settings import KEY_VARIABLES

# Two ways to say one thing: a source that says it hides what lesser sources say in either way.
SAME_THING = (("model_argument", "model"), ("api_key", "api_key_file"))
SWITCH_WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_UNSET: Any = object()


class Parser(argparse.ArgumentParser):
    """Errors are one line with exit code 2. The namespace that `parse_args` returns has, beside the flags:

    given: the destinations that the command line itself named; notes: lines to show at start, one sentence each.
    """

    def __init__(
        self,
        *,
        common: Sequence[str] = (),
        with_config: bool = False,
        of_vllm: Callable[[], Mapping[str, VllmFlag]] | None = None,
        environment: Mapping[str, str] | None = None,
        is_known_elsewhere: Callable[[str], bool] = lambda name: False,
        shares_file_with: Callable[[], Parser] | None = None,
        **options: Any,
    ) -> None:
        """common: names of flags that the short help shows, all if there are none; with_config: there is --config, and
        an engine's flags of vLLM are known, if not those of `of_vllm`; is_known_elsewhere: whether another command has
        a flag of this name; shares_file_with: the parser of a command whose flags the file may have too."""
        super().__init__(**options, allow_abbrev=False, add_help=False, formatter_class=_Formatter)
        self.register("action", "append", Repeated)
        self._common = common
        self._environment = os.environ if environment is None else environment
        self._is_known_elsewhere = is_known_elsewhere
        self._shares_file_with = shares_file_with
        self._with_config = with_config
        self._of_vllm = of_vllm or (vllm_flags if with_config else dict)
        self.add_argument("-h", "--help", action=_Help, nargs="?", metavar="GROUP", help="show this, a group, or all")
        if with_config:
            self.add_argument(CONFIG_FLAG, metavar="FILE", help="a YAML file of flags (names without the dashes)")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        try:
            found, notes = self._parse(list(sys.argv[1:] if args is None else args))
        except ConfigError as error:
            self.error(str(error))
        found.notes = notes
        return found

    def _parse(self, args: list[str]) -> tuple[argparse.Namespace, list[str]]:
        argv = self._rewritten(args)
        lesser, notes = self._from_elsewhere(argv)
        for value in lesser.values():
            value.action.required = False
        actions = {action.dest: action for action in self._actions if action.dest != argparse.SUPPRESS}
        blank = argparse.Namespace(**dict.fromkeys(actions, _UNSET))
        found, unknown = self.parse_known_args(argv, blank)
        self._refuse_unknown(found, unknown)
        given = {dest for dest, action in actions.items() if _is_given(action, getattr(found, dest))}
        hidden = {name for pair in SAME_THING for name in pair if given & set(pair)}
        for dest, action in actions.items():
            if dest in given:
                continue
            if dest in lesser and dest not in hidden:
                setattr(found, dest, lesser[dest].value)
            elif action.default == argparse.SUPPRESS:
                delattr(found, dest)
            else:
                setattr(found, dest, action.default)
        for flag in self._of_vllm().values():
            if hasattr(found, flag.dest):
                where = f"--{flag.name}" if flag.dest in given else lesser[flag.dest].where
                note = flag.judge(where, getattr(found, flag.dest))
                notes += [] if note is None else [note]
        found.given = frozenset(given)
        return found, notes

    def flag_names(self) -> Iterator[str]:
        """The long names of all flags, without dashes and without --no- forms."""
        for action in self._actions:
            yield from names_of(action)

    def action_of(self, name: str) -> argparse.Action | None:
        """The flag with this long name, without dashes; one of vLLM's is made when it is asked for."""
        spelling = f"--{name}"
        if spelling not in self._option_string_actions and name in self._of_vllm():
            add_vllm_flag(self, self._of_vllm()[name])
        return self._option_string_actions.get(spelling)

    def leaves_out(self, name: str) -> bool:
        """Whether a file's flag of this name is meant for the command that the file is shared with."""
        if self._shares_file_with is None:
            return False
        ours = self.action_of(name)  # a key is never ours: there it says who may ask, here whom to be
        return (ours is None or ours.dest == "api_key") and self._shares_file_with().action_of(name) is not None

    def convert(self, action: argparse.Action, texts: list[str]) -> Any:
        """What the command line would have made of `texts`. Raises ConfigError without saying where they are from."""
        try:
            if action.nargs == 0:
                (text,) = texts
                if text.lower() not in SWITCH_WORDS:
                    raise ConfigError(f"{shorten(text)!r} is neither true nor false")
                return SWITCH_WORDS[text.lower()]
            values = [self._get_value(action, text) for text in texts]
            for value in values:
                self._check_value(action, value)
        except argparse.ArgumentError as error:
            raise ConfigError(error.message) from None
        return values if self.takes_several(action) else values[0]

    @staticmethod
    def takes_several(action: argparse.Action) -> bool:
        """Whether its value is a list of what was written, one by one."""
        return action.nargs == "+" or isinstance(action, Repeated)

    def nearest(self, name: str) -> str | None:
        """The long name that is most like this one, without dashes."""
        import difflib

        known = [*self.flag_names(), *self._of_vllm()]
        return next(iter(difflib.get_close_matches(name, known, n=1)), None)

    def help_about(self, topic: str | None) -> str:
        """What --help=TOPIC shows. Raises ConfigError for what is neither a group nor a part of a flag's name."""
        groups = [group for group in self._action_groups if _shown(group._group_actions)]
        if topic == "all" or not (topic or self._common):
            return self._help(groups)
        if not topic:
            return self._short_help(groups)
        wanted = topic.lower().lstrip("-").replace("_", "-")
        for group in groups:
            if group.title == wanted.removesuffix("config"):
                return self._help([group])
        parts = [action for action in self._actions if any(wanted in name for name in names_of(action))]
        of_vllm = [flag for name, flag in self._of_vllm().items() if wanted in name]
        if not parts and not of_vllm:
            titles = ", ".join(group.title or "" for group in groups)
            raise ConfigError(f"no group and no flag is like {shorten(topic)!r}; the groups are {titles}")
        formatter = self._get_formatter()
        formatter.start_section(f"flags like {wanted!r}")
        formatter.add_arguments(parts)
        formatter.end_section()
        formatter.start_section("of vLLM, without effect here")
        for flag in of_vllm:
            verdict = "not supported: " if flag.verdict == REFUSED else ""
            formatter.add_argument(argparse.Action([f"--{flag.name}"], "flag", 0, help=f"{verdict}{flag.text}"))
        formatter.end_section()
        return formatter.format_help()

    def _rewritten(self, argv: list[str]) -> list[str]:
        """vLLM's other spellings as argparse knows them: --max_model_len, --switch=false, --hf-overrides.KEY VALUE, and
        a negative size behind its flag. Flags of vLLM's that occur are made known."""
        words = iter(argv)
        result: list[str] = []
        dotted: dict[str, dict[str, Any]] = {}
        for word in words:
            if word == "--":
                result += [word, *words]
                break
            head, equals, text = word.partition("=")
            short, dot, key = head.partition(".")
            if dot and key and (flag := self._flag_of(short)) is not None:
                _put(
                    dotted.setdefault(f"--{flag.name}", {}),
                    key.split("."),
                    _value(head, text if equals else next(words, None)),
                )
                self.action_of(flag.name)
                continue
            if not head.startswith("--"):
                result.append(word)
                if len(word) > 1 and word.startswith("-"):
                    self._make_known(head[:2] if head.startswith("-O") else head)  # -O3 is how compilers have it
                    before = self._option_string_actions.get(result[-2]) if len(result) > 1 else None
                    if before is not None and before.nargs is None and re.match(r"-\d", word):
                        result[-2:] = [f"{result[-2]}={word}"]  # such as -1G: its own error says more than argparse's
                continue
            name, dot, key = head[2:].partition(".")
            name = name.replace("_", "-")
            self.action_of(name.removeprefix("no-"))
            action = self.action_of(name)
            if dot and key and action is not None and (action.type is json_object or name in self._of_vllm()):
                value = _value(head, text if equals else next(words, None))
                _put(dotted.setdefault(f"--{name}", {}), key.split("."), value)
            elif equals and action is not None and action.nargs == 0 and text.lower() in SWITCH_WORDS:
                result += self._switched(action, name, SWITCH_WORDS[text.lower()])
            else:
                result.append(f"--{name}{dot}{key}{equals}{text}")
        return [*(f"{flag}={json.dumps(values)}" for flag, values in dotted.items()), *result]

    def _make_known(self, short: str) -> None:
        flag = self._flag_of(short)
        if flag is not None and short not in self._option_string_actions:
            add_vllm_flag(self, flag)

    def _flag_of(self, short: str) -> VllmFlag | None:
        """vLLM's flag with this short spelling, such as -cc."""
        return next((flag for flag in self._of_vllm().values() if short in flag.spellings[1:]), None)

    @staticmethod
    def _switched(action: argparse.Action, name: str, on: bool) -> list[str]:
        if on:
            return [f"--{name}"]
        return [f"--no-{name}"] if f"--no-{name}" in action.option_strings else []

    def _from_elsewhere(self, argv: Sequence[str]) -> tuple[dict[str, Given], list[str]]:
        """By destination what the environment and the config file say, and warnings."""
        given, notes = read_environment(self, self._environment, self._is_known_elsewhere)
        named = given.pop(CONFIG_FLAG[2:], None)
        path = _config_path(argv)
        if path is None and named is not None:
            path = named.value
        if path is None or not self._with_config:
            return given, notes
        told = given.keys() | ({"api_key"} if any(self._environment.get(name) for name in KEY_VARIABLES) else set())
        hidden = {name for pair in SAME_THING for name in pair if told & set(pair)}
        from_file = {dest: value for dest, value in read_config(self, path).items() if dest not in hidden}
        return {**from_file, **given}, notes

    def _refuse_unknown(self, found: argparse.Namespace, unknown: list[str]) -> None:
        if len(unknown) == 1 and not unknown[0].startswith("-") and getattr(found, "model_argument", "") is None:
            found.model_argument = unknown.pop()  # argparse looks for it right behind PROMPT only
        if not unknown:
            return
        flag = unknown[0].split("=", 1)[0]
        near = self.nearest(flag.lstrip("-")) if flag.startswith("-") else None
        everything = "--help=all" if self._common else "--help"
        hint = f"did you mean --{near}?" if near else f"'{self.prog} {everything}' lists what there is"
        self.error(f"unknown argument {shorten(flag)}: {hint}")

    def _short_help(self, groups: Sequence[argparse._ArgumentGroup]) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self._usage(), (), ())
        formatter.add_text(self.description)
        formatter.start_section("used most")
        positional = [action for action in self._actions if not action.option_strings]
        formatter.add_arguments([*positional, *filter(None, map(self.action_of, self._common))])
        formatter.end_section()
        formatter.start_section("groups (--help=GROUP shows one, --help=WORD flags like it, --help=all everything)")
        for group in groups:
            flags = [names[0] for action in _shown(group._group_actions) if (names := names_of(action))]
            if flags:
                formatter.add_argument(argparse.Action([], "group", metavar=group.title, help=", ".join(flags)))
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _help(self, groups: Sequence[argparse._ArgumentGroup]) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self._usage(), (), ())
        formatter.add_text(self.description)
        for group in groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _usage(self) -> str:
        positional = [action for action in self._actions if not action.option_strings]
        words = [f"[{action.metavar}]" if action.nargs == "?" else str(action.metavar) for action in positional]
        return " ".join([self.prog, *words, "[--flag VALUE ...]"])


class _Formatter(argparse.HelpFormatter):
    """Breaks lines at spaces only: a flag's name stays whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(f"{indent}{line}" for line in self._split_lines(text, width - len(indent)))


class Repeated(argparse.Action):
    """argparse's "append", in that the first of its values takes the place of the default."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*(before if isinstance(before, list) else []), values])


class _Help(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        try:
            print(parser.help_about(values), end="")
        except ConfigError as error:
            parser.error(str(error))
        parser.exit()


class _Switch(argparse.Action):
    """--flag and --no-flag of one that is not set unless it is named."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, not str(option_string).startswith("--no-"))


def add_vllm_flag(parser: argparse.ArgumentParser, flag: VllmFlag) -> None:
    """A flag of vLLM's that octavo does not have, so that its values are read and can be judged."""
    options: dict[str, Any] = {"dest": flag.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    match flag.kind:
        case "switch":
            long, *short = flag.spellings
            parser.add_argument(long, f"--no-{flag.name}", *short, action=_Switch, nargs=0, **options)
        case "values":
            parser.add_argument(*flag.spellings, nargs="+", **options)
        case "optional":
            parser.add_argument(*flag.spellings, nargs="?", const="true", **options)
        case "value":
            parser.add_argument(*flag.spellings, **options)


def names_of(action: argparse.Action) -> list[str]:
    """The long names of a flag, without dashes and without its --no- form; none of a positional or --help."""
    if action.dest == argparse.SUPPRESS:
        return []
    names = [spelling[2:] for spelling in action.option_strings if spelling.startswith("--")]
    return [name for name in names if not (name.startswith("no-") and name[3:] in names)]


def _shown(actions: Sequence[argparse.Action]) -> list[argparse.Action]:
    return [action for action in actions if action.help != argparse.SUPPRESS]


def _is_given(action: argparse.Action, value: Any) -> bool:
    # argparse gives a positional that is not there its default.
    return value is not _UNSET and not (not action.option_strings and value is action.default)


def _value(head: str, text: str | None) -> str:
    if text is None:
        raise ConfigError(f"argument {head}: expected one argument")
    return text


def _put(values: dict[str, Any], keys: Sequence[str], text: str) -> None:
    *outer, last = keys
    for key in outer:
        inner = values.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{'.'.join(keys)} goes into a value that is no JSON object")
        values = inner
    try:
        values[last] = json.loads(text)
    except (ValueError, RecursionError):
        values[last] = text


def _config_path(argv: Sequence[str]) -> str | None:
    path = None
    words = iter(argv)
    for word in words:
        if word == "--":
            break
        if word == CONFIG_FLAG:
            path = next(words, None)
        elif word.startswith(f"{CONFIG_FLAG}="):
            path = word.partition("=")[2]
    return path
