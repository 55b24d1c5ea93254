from __future__ import annotations

from pathlib import Path

from octavo.cli.flags_table import renewed
from octavo.core.vllm_flags import WORKS, vllm_flags

PAGE = (Path(__file__).parents[2] / "docs/flags.md").read_text()


def test_the_page_about_flags_is_what_the_parser_and_the_table_say() -> None:
    assert renewed(PAGE) == PAGE, "flags have changed: python -m octavo.cli.flags_table docs/flags.md"


def test_the_page_has_every_flag_of_vllm() -> None:
    for name in (*WORKS.split(), *vllm_flags()):
        assert f"`--{name}" in PAGE, name
