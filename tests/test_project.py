"""What the README and the build files say of the project is so."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
LISTED = ("src/octavo/**/*.py", "csrc/**/*.*", "bench/*.py", "docs/*.md")
SOURCES = {".py", ".cpp", ".h", ".inl", ".md"}
LINE = re.compile(r"(?P<indent> *)(?P<name>\S+?)(?P<folder>/?)(?: +\S.*)?")


def files_in_the_readme() -> set[str]:
    """The paths in the code block below "The tree"; two spaces a level, folders end with a slash."""
    block = (ROOT / "README.md").read_text().split("## The tree")[1].split("```")[1]
    folders: list[str] = []
    files = set()
    for line in filter(None, block.splitlines()):
        found = LINE.fullmatch(line)
        assert found, line
        del folders[len(found["indent"]) // 2 :]
        if found["folder"]:
            folders.append(found["name"])
        else:
            files.add("/".join([*folders, found["name"]]))
    return files


def test_the_readme_lists_every_source_file_and_no_other() -> None:
    there = {path.relative_to(ROOT) for pattern in LISTED for path in ROOT.glob(pattern) if path.suffix in SOURCES}
    packages = {path for path in there if path.name == "__init__.py" and len(path.parts) > 3}  # a docstring at most
    assert files_in_the_readme() == {path.as_posix() for path in there - packages}


def test_an_unlisted_package_file_holds_no_code() -> None:
    for path in ROOT.glob("src/octavo/*/**/__init__.py"):
        assert len(path.read_text().splitlines()) <= 1, path


def test_every_line_of_the_tree_says_what_a_file_is_for() -> None:
    block = (ROOT / "README.md").read_text().split("## The tree")[1].split("```")[1]
    for line in filter(None, block.splitlines()):
        name, _, purpose = line.strip().partition(" ")
        assert name.endswith("/") or purpose.strip(), line


def test_links_between_documents_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)  # a lambda in code is no link
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_make_installs_the_torch_that_the_test_extra_names() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    (torch,) = (requirement for requirement in extra if requirement.startswith("torch"))
    assert f"install {torch}\n" in (ROOT / "Makefile").read_text()
