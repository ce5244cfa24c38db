import os
import re

import fork_main
import jax
import numpy as np
import pytest
from PIL import Image

from structinit_jax import show
from structinit_jax.augment import make_augment
from structinit_jax.data.datasets import open_dataset
from structinit_jax.data.images import RandomCrop
from structinit_jax.data.loader import stream_indices
from structinit_jax.errors import InputError
from structinit_jax.rngs import step_rngs

pytestmark = pytest.mark.usefixtures("library_promotion")


def test_a_batch_without_augmentation_is_the_data(tiny_config):
    tiny_config.batch_size = 66  # not divisible by the number of devices
    tiny_config.data.update(repeats=2, drop_remainder=True)
    images, targets, _ = show.training_batch(tiny_config, 7)
    assert images.shape == (66, 8, 8, 1)
    assert targets.shape == (66, 10)
    source = open_dataset("digits").split("train[:384]")
    # Steps count from 1; each epoch has five. First copies come before second ones.
    positions = 6 * 66 + np.arange(66).reshape(33, 2).T.ravel()
    indices = stream_indices(tiny_config.seed, positions, 384, repeats=2, epoch_length=5 * 66)
    expected = [image.decode() for image, _ in source.read(indices.tolist())]
    np.testing.assert_array_equal(images, expected)
    tiny_config.batch_size = 385
    with pytest.raises(InputError, match=r"^config\.batch_size=385"):
        show.training_batch(tiny_config, 1)


def test_crops_and_flips_are_those_of_the_positions_in_the_stream_and_of_the_step(tiny_config):
    tiny_config.seed = 1
    tiny_config.augment.update(crop="resized", crop_scale=(0.3, 0.6), flip=0.5)
    images, _, _ = show.training_batch(tiny_config, 2)
    source = open_dataset("digits").split("train[:384]")
    indices = stream_indices(tiny_config.seed, np.arange(64, 128), 384)
    crop = RandomCrop(8, tiny_config.seed, (0.3, 0.6))
    examples = source.read(indices.tolist())
    crops = np.stack([crop(image, position) for position, (image, _) in enumerate(examples, 64)])
    augment = make_augment(tiny_config.augment, num_classes=10, mean=(0.0,), std=(1 / 255,))
    flipped, _ = jax.jit(augment)(step_rngs(np.uint32(1), 1)[0], crops, np.zeros(64, np.int32))
    np.testing.assert_array_equal(images, flipped.round())


def test_a_step_that_the_run_does_not_reach_is_refused(tiny_config):
    with pytest.raises(InputError, match=r"^--step=13 must be at most 12, the last step"):
        show.training_batch(tiny_config, 13)


def test_a_batch_of_a_run_needs_no_config_but_a_file_that_can_be_written(finished_run, tmp_path):
    arguments = [f"--workdir={finished_run.workdir}", "--step=9", f"--out={tmp_path}/new/"]
    result = fork_main.run(*arguments, module=show.__name__)
    assert "48 of the 64 images of step 9, from digits" in result.stdout
    picture = tmp_path / "new" / "batch.png"
    with Image.open(picture) as opened:
        assert opened.format == "PNG"
    arguments[2] = f"--out={picture}/show.png"
    result = fork_main.run(*arguments, module=show.__name__, exit_code=2)
    assert re.fullmatch(r"error: --out=.*batch\.png/show\.png .*\n", result.stderr)


def test_targets_are_described_without_their_smoothing():
    mixed = 0.9 * (0.7 * np.eye(10)[3] + 0.3 * np.eye(10)[8]) + 0.01
    names = [f"class {label}" for label in range(10)]
    assert show.describe_target(mixed, 0.1, names) == "70% class 3, 30% class 8"
    assert show.describe_target(0.9 * np.eye(10)[4] + 0.01, 0.1, names) == "class 4"


def test_captions_are_no_markup_and_need_not_be_text(tmp_path):
    captions = ["$x_{$", "$x$ $", os.fsdecode(b"\xff")]
    figure = show.draw(np.zeros((3, 8, 8, 3), np.uint8), captions)
    figure.savefig(tmp_path / "batch.png")
    assert [axis.get_title() for axis in figure.axes] == [*captions[:2], r"\udcff"]


@pytest.mark.parametrize(("channels", "shown"), [(1, ()), (2, ()), (3, (3,)), (5, (3,))])
def test_at_most_three_channels_are_shown(channels, shown):
    (axis,) = show.draw(np.zeros((1, 8, 8, channels), np.uint8), ["cat"]).axes
    assert axis.images[0].get_array().shape == (8, 8, *shown)
