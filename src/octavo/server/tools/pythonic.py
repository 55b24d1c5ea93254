"""Lists of Python calls: Llama 3.2 and 4, OLMo 3, and others that were taught [f(a=1), g(b=2)]."""

from __future__ import annotations

from octavo.server.text_parser import Pausing
from octavo.server.tools.python_calls import PythonCalls


class Pythonic(PythonCalls):
    """[f(a=1), g(b=2)] at the beginning of a line."""

    def _read(self) -> Pausing[None]:
        while True:
            yield from self._skip_space()
            if (yield from self._peek()) == "[":
                self._take(1)
                yield from self._calls("]")
            self._say(self._release())
            if not (yield from self._say_until("\n")):
                return
            self._say(self._release())


class Olmo3(PythonCalls):
    """<function_calls>, one call a line, </function_calls>."""

    shows_special_tokens = True

    def _read(self) -> Pausing[None]:
        while (yield from self._say_until("<function_calls>")):
            yield from self._calls("</function_calls>")
            self._say(self._release())
