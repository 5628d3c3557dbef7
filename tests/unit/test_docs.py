"""The documentation: links lead somewhere, pages that are named exist, each begins with its question, all are short."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
MOST_WORDS = 30_000
FOLDERS = ("specactor_ray", "conf", "scripts", "tests", "docs", "jobs")


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = (re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", prose, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def test_links_lead_to_files_and_headings() -> None:
    dead = list[str]()
    for page in PAGES:
        for link in re.findall(r"]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
                dead.append(f"{page.relative_to(REPOSITORY)}: {link}")
    assert not dead


def test_named_pages_exist() -> None:
    files = [one for folder in FOLDERS for one in (REPOSITORY / folder).rglob("*") if one.is_file()]
    gone = list[str]()
    for file in (one for one in [*PAGES, *files] if one.suffix in {".py", ".md", ".yaml", ".json", ""}):
        for name in re.findall(r"\bdocs/[\w/.-]+\.md\b", file.read_text(encoding="utf-8", errors="ignore")):
            if not (REPOSITORY / name).exists():
                gone.append(f"{file.relative_to(REPOSITORY)}: {name}")
    assert not gone


def test_pages_begin_with_the_question_that_they_answer() -> None:
    """In the first line below the title."""
    beginnings = {
        page: page.read_text(encoding="utf-8").split("\n\n")[:2] for page in PAGES if page.parent != REPOSITORY
    }
    assert not [
        str(page.relative_to(REPOSITORY))
        for page, (title, first) in beginnings.items()
        if not (title.startswith("# ") and "?" in first)
    ]


def test_the_documentation_is_short() -> None:
    pages = (REPOSITORY / "docs").rglob("*.md")
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= MOST_WORDS
