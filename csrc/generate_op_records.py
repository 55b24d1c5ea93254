"""Writes op_records.h: a C++ struct for each operation of graph/schema.py and the reader of encoded programs.

A program is a row of 64-bit integers: for each operation its code, its fields in order of declaration, the number of
outputs and their tensor ids. Tensors and weights are ids (-1: none), floats are bit patterns of doubles, tuples are
preceded by their length. src/octavo/backends/cpu/lowering.py writes this form.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import importlib.util
import sys
import typing
from pathlib import Path
from types import ModuleType, NoneType, UnionType

SCHEMA = Path(__file__).parent.parent / "src" / "octavo" / "graph" / "schema.py"


def load_schema() -> ModuleType:
    spec = importlib.util.spec_from_file_location("octavo_schema", SCHEMA)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["octavo_schema"] = module
    spec.loader.exec_module(module)
    return module


def cpp_type(schema: ModuleType, hint: object) -> tuple[str, str]:
    """(C++ type, reader method) of a field's Python type."""
    if isinstance(hint, UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not NoneType)
    if typing.get_origin(hint) is tuple:
        inner, method = cpp_type(schema, typing.get_args(hint)[0])
        return f"std::vector<{inner}>", f"list<{inner}>(&Reader::{method})"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint.__name__, f"choice<{hint.__name__}>"
    return {
        schema.Tensor: ("TensorId", "tensor"),
        schema.Weight: ("WeightId", "weight"),
        int: ("int64_t", "integer"),
        bool: ("bool", "boolean"),
        float: ("double", "real"),
    }[hint]


def generate() -> str:
    schema = load_schema()
    digest = int.from_bytes(hashlib.sha256(SCHEMA.read_bytes()).digest()[:7], "big")
    out = [
        "// Generated from src/octavo/graph/schema.py by csrc/generate_op_records.py.",
        "#pragma once",
        '#include "op_reader.h"',
        "#include <variant>",
        "namespace octavo {",
        f"inline constexpr int64_t kSchemaDigest = {digest};",
    ]
    out += [
        f"enum class {cls.__name__} {{ {', '.join(f'{m.name} = {m.value}' for m in cls)} }};"
        for cls in vars(schema).values()
        if isinstance(cls, type) and issubclass(cls, enum.Enum) and cls.__module__ == "octavo_schema"
    ]
    names = []
    reads = []
    for code, op in enumerate(schema.OPERATIONS):
        hints = typing.get_type_hints(op)
        members, body = [], []
        for field in dataclasses.fields(op):
            ctype, method = cpp_type(schema, hints[field.name])
            members.append(f"  {ctype} {field.name};")
            call = method if method.endswith(")") else method + "()"
            body.append(f"  op.{field.name} = r.{call};")
        name = op.__name__
        names.append(name)
        out += [f"struct {name} {{", *members, "  std::vector<TensorId> outputs;", "};"]
        reads += [f"    case {code}: {{", f"      {name} op;", *("    " + line for line in body)]
        reads += ["      op.outputs = r.list<TensorId>(&Reader::tensor);", "      return op;", "    }"]
    out += [f"#define OCTAVO_OPERATIONS(X) {' '.join(f'X({n})' for n in names)}"]
    out += [
        f"using Op = std::variant<{', '.join(names)}>;",
        "inline Op read_op(Reader &r) {",
        "  switch (r.integer()) {",
    ]
    out += [
        *reads,
        '    default: throw std::invalid_argument("unknown operation code");',
        "  }",
        "}",
        "}  // namespace octavo",
        "",
    ]
    return "\n".join(out)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(generate())
