"""Links of the pages in Markdown."""

import re

import fork_main
import pytest

FOLDERS = ("*.md", "benchmarks/**/*.md", "launch/**/*.md", "structinit_jax/**/*.md")
PAGES = [path for folder in FOLDERS for path in fork_main.ROOT.glob(folder)]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


def anchors(page):
    """Returns the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(fork_main.ROOT)))
def test_links_within_the_repository_lead_somewhere(page):
    for path, anchor in LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), (path, anchor)
