"""Links, commands and examples of the pages in Markdown."""

import re

import fork_main
import pytest
from flax import nnx

FOLDERS = ("*.md", "docs/*.md", "benchmarks/**/*.md", "launch/**/*.md", "structinit_jax/**/*.md")
PAGES = [path for folder in FOLDERS for path in fork_main.ROOT.glob(folder)]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


def anchors(page):
    """Returns the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(fork_main.ROOT)))
def test_links_and_commands_lead_somewhere(page):
    text = page.read_text()
    for path, anchor in LINK.findall(text):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), (path, anchor)
    for module in re.findall(r"-m (structinit_jax[a-z_.]*[a-z_])\b", text):
        path = fork_main.ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


@pytest.mark.usefixtures("library_promotion")
@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("README.md", "site"),
        ("README.md", "model"),
        ("docs/extending.md", "filters"),
        ("structinit_jax/interop/README.md", "flax"),
    ],
)
def test_the_examples_run(page, name):
    readme = (fork_main.ROOT / page).read_text()
    code = re.search(rf"<!-- {name}\.py -->\n```python\n(.*?)```", readme, re.DOTALL)[1]
    values = {}
    nnx.eval_shape(lambda: exec(code, values))  # traced, which takes a tenth of the time
    if name == "site":
        assert values["weights"].query.shape == (12, 192, 3, 64)
