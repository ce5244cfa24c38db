import runpy
from pathlib import Path

import jax
import pytest

from structinit_jax.dry_run import dry_run
from structinit_jax.errors import InputError

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.py"))
# Where a file's first row takes minutes to compile, a smaller one of it.
ROWS = {
    "swin_mixer_2025_small": ["cifar10,mixer_s16_224"],
    "vit_2025_imagenet": ["vit_tiny_patch16_224"],
}


@pytest.mark.slow
@pytest.mark.usefixtures("library_promotion")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_builds_without_data_and_memory(path, capsys, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", "/nonexistent")
    live = len(jax.live_arrays())
    config = runpy.run_path(str(path))["get_config"](*ROWS.get(path.stem, []))
    dry_run(config)
    out = capsys.readouterr().out
    assert len(jax.live_arrays()) <= live + 20  # a few keys and constants, no state
    for text in (
        "head/kernel",
        "parameters",
        f"{config.batch_size} global",
        "FLOPs per step",
        "memory per device",
        "epochs of",
    ):
        assert text in out


@pytest.mark.usefixtures("library_promotion")
def test_flops_count_every_layer(tiny_config, capsys):
    def flops():
        dry_run(tiny_config)
        out = capsys.readouterr().out
        return float(out.split("FLOPs per step")[1].split(",")[0])

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


@pytest.mark.usefixtures("library_promotion")
def test_another_test_set_is_counted(tiny_config, capsys):
    tiny_config.model.update(num_classes=1000, depth=1)
    tiny_config.data.update(
        name="imagenet2012",
        eval_split="validation",
        eval_name="imagenet_v2/topimages",
        channels=3,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )
    dry_run(tiny_config)
    out = capsys.readouterr().out
    assert (
        "384 training examples (train[:384]), 10,000 test examples (imagenet_v2/topimages " in out
    )


def test_mistakes_are_found_without_data(tiny_config):
    tiny_config.model.num_classes = 3
    with pytest.raises(InputError, match=r"model\.num_classes=3"):
        dry_run(tiny_config)
