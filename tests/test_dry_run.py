import runpy
from pathlib import Path

import jax
import pytest

from structinit_jax.dry_run import dry_run
from structinit_jax.errors import InputError
from structinit_jax.training.flops import flops_per_image

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
def test_flops_are_those_of_the_batch(tiny_config, capsys):
    dry_run(tiny_config)
    text = capsys.readouterr().out.split("FLOPs per step")[1].split(",")[0]
    assert float(text) == pytest.approx(64 * flops_per_image(tiny_config), rel=1e-3)


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
