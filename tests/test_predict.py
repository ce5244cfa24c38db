import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from structinit_jax.augment import normalize
from structinit_jax.data.datasets import open_dataset
from structinit_jax.errors import InputError
from structinit_jax.evaluate import restore_model
from structinit_jax.predict import BATCH_SIZE, Classifier


@pytest.fixture(scope="module")
def classify(finished_run):
    return Classifier(finished_run.workdir, step=12)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Images of the test split and files of them: more than a batch."""
    source = open_dataset("digits").split(f"test[:{BATCH_SIZE + 1}]")
    images = np.stack(source.map_images(lambda image: image.decode()))
    files = [tmp_path_factory.getbasetemp() / f"digit_{i}.png" for i in range(len(images))]
    for file, image in zip(files, images, strict=True):
        Image.fromarray(image[..., 0]).save(file)
    return images, files


def test_logits_are_those_of_the_checkpoint(classify, digits, run_config, finished_run):
    images, files = digits
    model, state = restore_model(run_config, finished_run.workdir, jax.devices()[:1])
    network = nnx.merge(model.graphdef, state.params, state.model_state)
    expected, _ = network(
        normalize(jnp.asarray(images), *(tuple(run_config.data[x]) for x in ("mean", "std")))
    )
    np.testing.assert_allclose(classify(files), expected, atol=1e-5)
    np.testing.assert_allclose(classify(str(f) for f in files[3:4]), expected[3:4], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [("gone.png", r"gone\.png\): No such file"), ("text.png", r"text\.png")],
)
def test_files_that_are_no_images_are_named(classify, tmp_path, name, message):
    (tmp_path / "text.png").write_text("not an image")
    with pytest.raises(InputError, match=message) as caught:
        classify([tmp_path / name])
    assert "on_bad_image" not in str(caught.value)


def test_a_single_path_is_refused(classify):
    with pytest.raises(InputError, match=r"files='photo\.jpg'"):
        classify("photo.jpg")
