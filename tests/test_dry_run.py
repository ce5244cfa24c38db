import runpy
from pathlib import Path

import jax
import pytest

from structinit_jax.config import validate
from structinit_jax.dry_run import dry_run
from structinit_jax.errors import InputError
from structinit_jax.recipes import small_2024, small_2025

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.py"))


def load(path):
    return runpy.run_path(str(path))["get_config"]()


@pytest.mark.slow
@pytest.mark.usefixtures("library_promotion")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_builds_without_data_and_memory(path, capsys, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", "/nonexistent")
    live = len(jax.live_arrays())
    config = load(path)
    dry_run(config)
    out = capsys.readouterr().out
    assert len(jax.live_arrays()) <= live + 20  # a few keys and constants, no state
    for text in (
        "head/kernel",
        "parameters",
        f"{config.batch_size} global",
        "FLOPs of a step",
        "memory per device",
        "epochs of",
    ):
        assert text in out


@pytest.mark.usefixtures("library_promotion")
def test_flops_count_every_layer(tiny_config, capsys):
    def flops():
        dry_run(tiny_config)
        out = capsys.readouterr().out
        return float(out.split("FLOPs of a step")[1].split(",")[0])

    counts = []
    for depth in (2, 4, 6):
        tiny_config.model.depth = depth
        counts.append(flops())
    two_layers = counts[1] - counts[0]
    assert counts[2] - counts[1] == pytest.approx(two_layers, rel=1e-3)  # four digits are printed
    # Forward and backward matrix products: 6 FLOPs for each of 12 D² weights and each token, and
    # 12 N D for the attention scores and the mixing of values.
    images, tokens, width = 64, 16, 16
    products = 2 * images * tokens * (6 * 12 * width**2 + 12 * tokens * width)
    assert two_layers == pytest.approx(products, rel=2e-3)


def test_the_imagenet_config_is_the_papers_vit_b():
    config = load(next(path for path in CONFIGS if path.stem == "vit_b_imagenet"))
    assert (config.model.width, config.model.depth, config.model.num_heads) == (768, 12, 12)
    assert (config.batch_size, config.learning_rate, config.num_epochs) == (1024, 1e-3, 310)
    assert (config.warmup_epochs, config.warmup_learning_rate) == (5, 1e-6)
    assert (config.final_learning_rate, config.cooldown_epochs) == (1e-5, 10)
    assert (config.weight_decay, config.adam_epsilon, config.clip_norm) == (0.05, 1e-8, 0)
    _check_mixing(config)
    assert config.data.repeats == 3


def _check_mixing(config):
    augment = config.augment
    assert (augment.mixup, augment.cutmix, augment.erasing) == (0.8, 1.0, 0.25)
    assert (augment.rand_augment, augment.crop) == ("rand-m9-mstd0.5-inc1", "resized")
    assert (config.label_smoothing, config.model.drop_path) == (0.1, 0.1)
    assert config.data.crop_fraction == 0.875


@pytest.mark.parametrize(
    ("dataset", "classes"),
    [("cifar10", 10), ("cifar100", 100), ("stl10", 10), ("oxford_flowers102", 102)],
)
def test_the_2025_papers_small_sets(dataset, classes):
    config = small_2025("vit_tiny_patch16_224", dataset)
    assert (config.model.num_classes, config.data.image_size) == (classes, 224)
    assert (config.model.width, config.model.patch_size) == (192, 16)
    assert (config.num_epochs, config.batch_size, config.learning_rate) == (300, 512, 2e-3)
    assert (config.weight_decay, config.warmup_epochs) == (0.05, 50)
    assert config.final_learning_rate == 1e-6
    _check_mixing(config)
    validate(config)


@pytest.mark.parametrize("model", ["vit_tiny_patch2_32", "vit_w256_h8_patch2_32"])
@pytest.mark.parametrize("dataset", ["cifar10", "cifar100", "svhn_cropped"])
def test_the_2024_papers_small_sets(dataset, model):
    config = small_2024(model, dataset)
    assert (config.num_epochs, config.batch_size, config.learning_rate) == (200, 512, 1e-3)
    assert (config.weight_decay, config.warmup_epochs, config.adam_epsilon) == (0.01, 10, 1e-3)
    assert (config.final_learning_rate, config.clip_norm) == (1e-6, 3)
    assert (config.data.image_size, config.model.patch_size) == (32, 2)
    assert (config.model.positions, config.model.pool) == ("sincos", "mean")
    augment = config.augment
    assert (augment.rand_augment, augment.erasing, augment.crop) == (
        "rand-m9-mstd0.5-inc1",
        0,
        "none",
    )
    validate(config)


def test_convmixer_has_the_2024_papers_rate_and_epochs():
    config = small_2024("convmixer_256_8", "cifar10")
    assert (config.num_epochs, config.learning_rate) == (100, 0.01)


def test_mistakes_are_found_without_data(tiny_config):
    tiny_config.model.num_classes = 3
    with pytest.raises(InputError, match=r"model\.num_classes=3"):
        dry_run(tiny_config)
