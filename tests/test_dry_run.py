from pathlib import Path

import jax
import pytest

from structinit_jax.config import load_config
from structinit_jax.dry_run import dry_run
from structinit_jax.errors import InputError

CONFIGS = Path(__file__).parent.parent / "configs"
# `test_config_files` traces the step of the others.
FILES = ["convmixer_digits", "vit_2024_imagenet"]


@pytest.mark.slow
@pytest.mark.usefixtures("library_promotion")
@pytest.mark.parametrize("name", FILES)
def test_configs_build_without_data_and_memory(name, capsys, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", "/nonexistent")
    live = len(jax.live_arrays())
    config = load_config(str(CONFIGS / f"{name}.py"))
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
        "384 training examples (train[:384]), 10,000 test examples (imagenet_v2/topimages)" in out
    )


def test_mistakes_are_found_without_data(tiny_config):
    tiny_config.model.num_classes = 3
    with pytest.raises(InputError, match=r"model\.num_classes=3"):
        dry_run(tiny_config)
    tiny_config.model.num_classes = 10
    tiny_config.data.train_eval_split = "trian"
    with pytest.raises(InputError, match=r"data\.train_eval_split='trian'"):
        dry_run(tiny_config)
    tiny_config.label_smoothing = 1.0
    with pytest.raises(InputError, match=r"label_smoothing=1\.0"):
        dry_run(tiny_config)
