"""Every relative link of every page leads to a file that is there, and to a heading that it has."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def pages() -> list[Path]:
    """The pages that are part of the project, shared material and installed packages left aside."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    found = [ROOT / name for name in listed] or [p for p in ROOT.rglob("*.md") if ".venv" not in p.parts]
    return sorted(p for p in found if p.exists() and "shared" not in p.relative_to(ROOT).parts)


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    found = []
    for link in _LINK.findall(_CODE.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_link_that_leads_nowhere_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Here\n[a](#here) [b](#there) [c](missing.md) ![d](x.png) [e](https://x.test/y) `[f](code.md)`\n")

    assert broken(page) == ["#there", "missing.md", "x.png"]


def test_every_page_of_docs_is_linked_from_the_readme() -> None:
    linked = set(_LINK.findall((ROOT / "README.md").read_text()))

    assert {f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")} <= linked


@pytest.mark.parametrize("page", pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_table_has_as_many_cells_in_each_row(page: Path) -> None:
    rows = [(n, line) for n, line in enumerate(page.read_text().splitlines(), 1) if line.startswith("|")]
    cells = {n: len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line))) for n, line in rows}

    assert [n for n in cells if n - 1 in cells and cells[n] != cells[n - 1]] == []
