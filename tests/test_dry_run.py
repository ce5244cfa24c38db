import runpy
from pathlib import Path

import jax
import pytest

from structinit_jax.dry_run import dry_run
from structinit_jax.errors import InputError

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
        "blocks/attention/query/kernel",
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
    assert counts[2] - counts[1] == pytest.approx(two_layers, rel=0.02)
    # Forward and backward matrix products: 6 FLOPs for each of 12 D² weights and each token, and
    # 12 N D for the attention scores and the mixing of values. Norms, GELU and Adam come on top.
    images, tokens, width = 64, 16, 16
    products = 2 * images * tokens * (6 * 12 * width**2 + 12 * tokens * width)
    assert products < two_layers < 1.5 * products


def test_the_imagenet_config_is_the_papers_vit_b():
    config = load(next(path for path in CONFIGS if path.stem == "vit_b_imagenet"))
    assert (config.model.width, config.model.depth, config.model.num_heads) == (768, 12, 12)
    assert (config.batch_size, config.learning_rate, config.num_epochs) == (1024, 1e-3, 310)
    assert (config.warmup_epochs, config.warmup_learning_rate) == (5, 1e-6)
    assert (config.final_learning_rate, config.cooldown_epochs) == (1e-5, 10)
    assert (config.weight_decay, config.adam_epsilon, config.clip_norm) == (0.05, 1e-8, 0)
    assert (config.label_smoothing, config.model.drop_path) == (0.1, 0.1)


def test_mistakes_are_found_without_data(tiny_config):
    tiny_config.model.num_classes = 3
    with pytest.raises(InputError, match=r"model\.num_classes=3"):
        dry_run(tiny_config)
