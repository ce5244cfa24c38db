"""The papers' recipes, field by field, and every row of every file in configs/."""

import itertools
import json
import re
import runpy
from pathlib import Path

import jax
import pytest
from absl import flags
from ml_collections import config_flags

from structinit_jax.attention_init import SCHEMES
from structinit_jax.config import drop_foreign_options, validate
from structinit_jax.data.info import CATALOG, split_size
from structinit_jax.errors import InputError
from structinit_jax.recipes import choose, imagenet_2024, imagenet_2025, small_2024, small_2025
from structinit_jax.train import set_up

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.py"))
PAPERS = [path for path in CONFIGS if "202" in path.stem]

RAND_AUGMENT = "rand-m9-mstd0.5-inc1"
MIXING_2025 = {
    "augment.mixup": 0.8,
    "augment.cutmix": 1.0,
    "augment.mix_group": 64,  # one λ for each process's batch
    "augment.erasing": 0.25,
    "augment.rand_augment": RAND_AUGMENT,
    "augment.crop": "resized",
    "label_smoothing": 0.1,
    "model.drop_path": 0.1,
    "data.crop_fraction": 0.875,
    "data.image_size": 224,
    "ema_decay": 0,  # the reference sets a decay, but not the switch
    "clip_norm": 0,
    "attention_init.name": "impulse_2025",
    "attention_init.kernel_size": 3,
    "model.positions": "learned",
    "model.pool": "class_token",
}
# The papers' own numbers, written out.
RECIPES = {
    "2024 small": (
        small_2024("vit_tiny_patch2_32", "cifar10"),
        {
            "num_epochs": 200,
            "batch_size": 512,
            "learning_rate": 1e-3,
            "weight_decay": 0.01,
            "final_learning_rate": 1e-6,
            "warmup_epochs": 10,
            "cooldown_epochs": 0,
            "adam_epsilon": 1e-3,
            "clip_norm": 3.0,
            "augment.rand_augment": RAND_AUGMENT,
            "augment.erasing": 0,
            "augment.crop": "none",
            "augment.mixup": 0,
            "augment.cutmix": 0,
            "data.image_size": 32,
            "data.repeats": 1,
            "model.patch_size": 2,
            "model.positions": "sincos",
            "model.pool": "mean",
            "attention_init.name": "impulse_2024",
            "attention_init.kernel_size": 3,
        },
    ),
    "2024 ConvMixer": (
        small_2024("convmixer_256_8", "cifar10"),
        {
            "num_epochs": 100,
            "batch_size": 512,
            "learning_rate": 0.01,
            "weight_decay": 0.01,
            "model.width": 256,
            "model.depth": 8,
            "model.patch_size": 2,
        },
    ),
    # ConvMixer's command: 10 processes of 64 images.
    "2024 ImageNet": (
        imagenet_2024("vit_tiny_patch16_224"),
        {
            "num_epochs": 300,
            "batch_size": 640,
            "learning_rate": 0.01,
            "warmup_epochs": 0,
            "weight_decay": 2e-5,
            "adam_epsilon": 1e-3,
            "clip_norm": 1.0,
            "augment.rand_augment": RAND_AUGMENT,
            "augment.mixup": 0.5,
            "augment.cutmix": 0.5,
            "augment.mix_group": 64,
            "augment.erasing": 0.25,
            "augment.erasing_mode": "pixel",
            "data.image_size": 224,
            "data.repeats": 1,
            "model.patch_size": 16,
            "model.width": 192,
            "model.num_heads": 3,
            "model.drop_path": 0,
            "model.positions": "sincos",
            "model.pool": "mean",
            "attention_init.name": "impulse_2024",
        },
    ),
    "2025 small": (
        small_2025("vit_tiny_patch16_224", "food101"),
        MIXING_2025
        | {
            "num_epochs": 300,
            "batch_size": 512,
            "learning_rate": 2e-3,
            "weight_decay": 0.05,
            "warmup_epochs": 50,
            "final_learning_rate": 1e-6,
            "adam_epsilon": 1e-8,
            "data.repeats": 1,
            "model.patch_size": 16,
            "model.width": 192,
        },
    ),
    "2025 ImageNet": (
        imagenet_2025("vit_base_patch16_224"),
        MIXING_2025
        | {
            "num_epochs": 310,  # 300 and 10 of cool-down
            "cooldown_epochs": 10,
            "batch_size": 1024,
            "learning_rate": 5e-4 * 1024 / 512,
            "warmup_epochs": 5,
            "warmup_learning_rate": 1e-6,
            "final_learning_rate": 1e-5,
            "weight_decay": 0.05,
            "adam_epsilon": 1e-8,
            "data.repeats": 3,
            "model.width": 768,
            "model.depth": 12,
            "model.num_heads": 12,
            "model.patch_size": 16,
        },
    ),
}
MODELS = {
    "vit_tiny_patch2_32": (192, 12, 3),
    "vit_tiny_h8_patch2_32": (192, 12, 8),
    "vit_small_patch2_32": (384, 12, 6),
    "vit_small_h16_patch2_32": (384, 12, 16),
    "vit_w64_h32_patch2_32": (64, 8, 32),
    "vit_w512_h4_patch2_32": (512, 8, 4),
    "vit_tiny_patch16_224": (192, 12, 3),
    "vit_small_patch16_224": (384, 12, 6),
    "vit_base_patch16_224": (768, 12, 12),
}
CLASSES = {
    "cifar10": 10,
    "cifar100": 100,
    "svhn_cropped": 10,
    "stl10": 10,
    "oxford_flowers102": 102,
    "oxford_iiit_pet": 37,
    "food101": 101,
}


# Schemes of the papers that say nothing about a family's token mixing.
WITHOUT_A_FORM = {
    "swin": ("impulse_2024", "impulse_2025"),
    "mixer": ("impulse_2024", "impulse_2025"),
    "convmixer": ("mimetic", "impulse_2025"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_have_the_papers_numbers(name):
    config, fields = RECIPES[name]
    got = {field: get(config, field) for field in fields}
    assert got == fields
    validate(config)


def get(config, field):
    for name in field.split("."):
        config = config[name]
    return config


def load_rows(path):
    """Every row that a config file names, and its config."""
    module = runpy.run_path(str(path))
    if "COLUMNS" not in module:
        return {"": module["get_config"]()}
    rows = [",".join(words) for words in itertools.product(*module["COLUMNS"].values())]
    return {row: module["get_config"](row) for row in rows}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_row_is_a_valid_config(path):
    for row, config in load_rows(path).items():
        validate(config)
        name = config.data.name
        for field in ("train_split", "eval_split"):
            assert split_size(name, config.data[field], CATALOG[name], f"data.{field}") > 0
        for word in row.split(","):
            if word in CLASSES:
                assert (name, config.model.num_classes) == (word, CLASSES[word])
            if word in MODELS:
                model = config.model
                assert (model.width, model.depth, model.num_heads) == MODELS[word]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_files_say_what_they_are(path):
    text = runpy.run_path(str(path))["__doc__"]
    assert f"--config=configs/{path.name}" in text
    assert "Hardware:" in text
    rows = load_rows(path)
    for row in re.findall(rf"configs/{path.name}:(\S+)", text):
        assert any(name == row or name.startswith(f"{row},") for name in rows)
    if path in PAPERS:
        assert re.search(r"202[45]\W", text)
        assert re.search(r"\btables? \d", text)
        assert "Not run here" in text


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_flags_that_config_files_name_work(path):
    module = runpy.run_path(str(path))
    pattern = r"--config\.([\w.]+)=(?:[\"'](.+)[\"']|([\w./]*\w))"
    for field, quoted, plain in re.findall(pattern, module["__doc__"]):
        argv = ["main", f"--config.{field}={quoted or plain}"]
        config, values = module["get_config"](), flags.FlagValues()
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
        values(argv)
        drop_foreign_options(config)
        validate(config)
        if plain:
            assert str(get(config, field)) == plain


@pytest.mark.usefixtures("library_promotion")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_row_builds(path, monkeypatch):
    """Model, scheme, optimizer and state by their shapes: each model and scheme, without memory.

    The steps likewise, augmentation included, of the first row.
    """
    monkeypatch.setenv("TFDS_DATA_DIR", "/nonexistent")
    live = len(jax.live_arrays())
    built, first = set(), None
    for config in load_rows(path).values():
        model = config.model.to_dict() | {"num_classes": 0}
        parts = {json.dumps(model), json.dumps(config.attention_init.to_dict())}
        if not parts <= built:
            built |= parts
            program = build(config)
            first = first or program
            assert {leaf.dtype.name for leaf in jax.tree.leaves(program.abstract_state.params)} == {
                "float32"
            }
    state, metrics = jax.eval_shape(first.train_step, first.abstract_state, first.abstract_batch)
    assert metrics["loss"].shape == ()
    assert jax.tree.structure(state) == jax.tree.structure(first.abstract_state)
    assert len(jax.live_arrays()) <= live + 20  # a few keys and constants, no state


@pytest.mark.usefixtures("library_promotion")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_another_scheme_needs_its_name_only(path, scheme):
    config = runpy.run_path(str(path))["get_config"]()
    config.attention_init.name = scheme
    drop_foreign_options(config)
    if scheme in WITHOUT_A_FORM.get(config.model.name, ()):
        with pytest.raises(InputError, match=r"use 'impulse'"):
            build(config)
    else:
        build(config)


def build(config):
    validate(config)
    return set_up(config, CATALOG[config.data.name], 1000)


def test_a_word_that_is_no_choice_is_refused_with_the_choices():
    columns = {"data set": ("cifar10", "stl10"), "model": ("small", "large")}
    assert choose("", columns) == ["cifar10", "small"]
    assert choose("stl10", columns) == ["stl10", "small"]
    assert choose("stl10,large", columns) == ["stl10", "large"]
    for row, message in (
        ("mnist", "'mnist' is no data set: choose one of cifar10, stl10; behind the colon stand "),
        ("stl10,tiny", "'tiny' is no model: choose one of small, large"),
        ("stl10,", "'' is no model"),
        ("stl10,small,1", "3 words are too many: behind the colon stand data set,model"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            choose(row, columns)
