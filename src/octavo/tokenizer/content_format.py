"""In which form a chat template reads a message's content, found out from its source: text, a list of parts, or both.

Knows Jinja's syntax tree; imported late for that.
"""

from __future__ import annotations

from collections.abc import Set

from jinja2 import Environment, nodes

from octavo.tokenizer.chat_template import ContentForm


def form_read_by(environment: Environment, source: str) -> ContentForm:
    """PARTS if it loops over a content, directly or by a name that it gave it; EITHER if it also asks what is a string.

    Raises what Jinja's parser does.
    """
    tree = environment.parse(source)
    names = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, frozenset())
    }
    if not any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For)):
        return ContentForm.TEXT
    asks = any(test.name == "string" for test in tree.find_all(nodes.Test))
    return ContentForm.EITHER if asks else ContentForm.PARTS


def _is_content(node: nodes.Node | None, names: Set[str]) -> bool:
    match node:
        case nodes.Filter():
            return _is_content(node.node, names)
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem(arg=nodes.Slice()):
            return _is_content(node.node, names)
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        case nodes.Name():
            return node.name in names
    return False
