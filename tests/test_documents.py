"""The Markdown pages: links, fields and modules exist; examples and commands run as written.

The benchmarks, which tests do not run, import names that exist.
"""

import ast
import doctest
import functools
import importlib
import re
import shlex
from pathlib import Path

import fork_main
import jax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from PIL import Image
from test_folder import write_image

import structinit_jax as si
from structinit_jax import attention_init, command_line, models
from structinit_jax.config import base_config, scheme_options, validate

ROOT = fork_main.ROOT
FOLDERS = ("*.md", "docs/*.md", "launch/**/*.md", "structinit_jax/**/*.md")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in (*FOLDERS, "benchmarks/**/*.md")
    for path in ROOT.glob(folder)
}
WORDS = {
    word
    for folder in ("structinit_jax/**/*.py", "configs/*", "tests/*.py", "launch/*.sh")
    for path in ROOT.glob(folder)
    for word in re.findall(r"\w+", path.read_text())
}
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
FIELDS = {
    *(
        field
        for name in models.FAMILIES
        for field in flatten_dict(base_config(name).to_dict(), sep=".")
    ),
    *(f"attention_init.{x}" for name in attention_init.SCHEMES for x in scheme_options(name)),
}


def anchors(text):
    """Returns the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_modules_fields_and_names_exist(page):
    text = PAGES[page]
    for path, anchor in LINK.findall(text):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target.read_text()), (path, anchor)
    for module, words in re.findall(r"-m (structinit_jax[a-z_.]*[a-z_])\b([^`\n]*)", text):
        path = ROOT / module.replace(".", "/")
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        for flag in re.findall(r"--([a-z_]+)", words):
            assert flag in command_line.SHARED or f'"{flag}"' in path.read_text(), (module, flag)
    if not page.startswith("benchmarks"):  # results there may be from earlier versions
        fields = re.findall(r"--config\.([a-z_][\w.]*\w)", text)
        assert not [field for field in fields if field not in FIELDS]
        assert not {*re.findall(r"`(\w+_\w+)`", text)} - WORDS


EXAMPLES = {  # by the comment before them, or by page and number
    name or f"{page} {number}": code
    for page, text in PAGES.items()
    for number, (name, code) in enumerate(
        re.findall(r"(?:<!-- (\w+)\.py -->\n)?```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    )
}
IN_TEST_PLUGINS = ("mine", "early_stopping", "log_to_wandb", "class_weights")
LINEN = """
import jax
from flax import linen

class Nested(linen.Module):
    names: tuple[str, ...]

    @linen.compact
    def __call__(self, x):
        if self.names:
            return Nested(self.names[1:], name=self.names[0])(x)
        return linen.MultiHeadDotProductAttention(num_heads=2)(x, x)

model = Nested(("Transformer", "encoderblock_0"))
images = jax.numpy.ones((1, 4, 8))
params = model.init(jax.random.key(0), images)["params"]
"""
TIMM_FILE = """
from flax import nnx
from safetensors.numpy import save_file
import structinit_jax as si
from structinit_jax.models import create_model, default_config

model = create_model(default_config("vit_tiny_patch16_224"), channels=3, rngs=nnx.Rngs(1))
save_file(si.to_timm(model), "vit_tiny_patch16_224.safetensors")
"""
TIMM_MAPS = """
import timm, torch

model = timm.create_model("vit_tiny_patch16_224", depth=2)
images = torch.zeros(1, 3, 224, 224)
"""
TIMM_ROPE = """
import timm

model = timm.model_entrypoint("vit_small_patch16_rope_224")(init_values=None, depth=1)
"""
TINY_IMAGENET = """
from pathlib import Path

folder = Path("tiny-imagenet-200/val/images")
folder.mkdir(parents=True)
(folder / "a.jpg").touch()
(folder.parent / "val_annotations.txt").write_text("a.jpg\\tn01\\t0\\t0\\t9\\t9\\n")
"""
# Setup code of examples, by a text that the example contains.
GIVEN = {
    "intercept_methods": LINEN,
    "load_file": TIMM_FILE,
    "si.torch_maps(": TIMM_MAPS,
    "model.rope": TIMM_ROPE,
    "tiny-imagenet": TINY_IMAGENET,
}


@pytest.mark.usefixtures("library_promotion")
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in IN_TEST_PLUGINS])
def test_an_example_runs(name, request, tmp_path, monkeypatch):
    code = EXAMPLES[name]
    given = "".join(text for part, text in GIVEN.items() if part in code)
    if needs := re.search(r"^import .*\b(timm|datasets|keras_hub)\b", given + code, re.MULTILINE):
        pytest.importorskip(needs[1])
    monkeypatch.chdir(tmp_path)
    if name == "predict":
        Path("DIR").symlink_to(request.getfixturevalue("finished_run").workdir)
        Image.new("L", (8, 8)).save("image.jpg")
    values = {}
    exec(given, values)
    if given or needs or name == "predict":
        exec(code, values)
    else:
        nnx.eval_shape(lambda: exec(code, values))  # tracing takes a tenth of the time
    if name == "site":
        assert values["weights"].query.shape == (12, 192, 3, 64)
    if name == "hub":
        for label in (0, 1):
            write_image(tmp_path / "train" / f"class {label}" / "image.png", label)
        source = values["image_folder"](tmp_path).split("train")
        assert [(x.decode()[0, 0, 0], n) for x, n in source.read([0, 1])] == [(0, 0), (1, 1)]
    if name == "my_config":
        validate(values["get_config"]())


@pytest.mark.usefixtures("library_promotion")
def test_the_examples_in_docstrings_run():
    sizes = dict(grid=(8, 8), width=96, num_heads=3, head_dim=32, num_layers=12)
    positions = si.sincos_positions((8, 8), 96)
    site = si.AttentionSite(**sizes, qk_scale=32**-0.5, positions=positions)
    given = dict(si=si, jax=jax, nnx=nnx, site=site)
    runner = doctest.DocTestRunner()
    for name in sorted({*dir(si)} - {*vars(si)}):  # public names
        for test in doctest.DocTestFinder(recurse=False).find(getattr(si, name), globs=given):
            run = functools.partial(runner.run, test)
            if name in ("from_timm", "select_weights"):  # need concrete values
                run()
            else:
                jax.eval_shape(run)
    assert runner.failures == 0
    assert runner.tries > 25


# Commands that download data, train for hours, or are covered by test_analyse.py.
LEFT_OUT = ("pip", "ruff", "pytest", "#!", "exec", "cifar10", "--table=", "analyse")
# For commands of `main`, so that they take seconds.
QUICK = [*fork_main.TINY[1:], "--config.data.image_size=8", "--config.num_steps=2"]
QUICK += ["--config.attention_init.name=default"]


def commands(page):
    """Returns the commands in a page's code blocks."""
    text = PAGES[page].replace("\\\n", " ")
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in re.split(r"\n| && ", block)]
    return [line for line in lines if line and not any(part in line for part in LEFT_OUT)]


@pytest.mark.parametrize("page", [p for p in PAGES if p[:5] != "bench" and commands(p)])
def test_the_commands_run(page, tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in ("mine", "my_config"):
        (tmp_path / f"{name}.py").write_text(EXAMPLES[name])
    if page != "docs/extending.md":  # there, DIR is the workdir
        for number in range(6):
            for path in ("train", "val"):
                write_image(tmp_path / "DIR" / path / str(number) / "image.jpg", 40 * number)
        write_image(tmp_path / "photo.jpg", 0)
    for command in commands(page):
        python, option, module, *words = shlex.split(command.replace("/tmp", str(tmp_path)))
        assert python == "python"
        if option == "-c":
            script = tmp_path / "script.py"
            script.write_text(module)
            module = script
        if module == "structinit_jax.main":
            words = QUICK + words
        fork_main.run(*words, module=str(module), folder=tmp_path)


@pytest.mark.parametrize("path", sorted(ROOT.glob("benchmarks/**/*.py")), ids=lambda p: p.name)
def test_what_benchmarks_import_from_the_package_exists(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("structinit_jax"):
            module = importlib.import_module(node.module)
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")
