import json
import os
import types

import fork_main
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from tiny_models import SIZES

from structinit_jax import analyse, command_line
from structinit_jax.analysis import collect, figures, measures
from structinit_jax.attention_init.targets import filter_maps, target_maps
from structinit_jax.augment import normalize
from structinit_jax.config import base_config
from structinit_jax.errors import InputError
from structinit_jax.training import build
from structinit_jax.training.sharding import make_mesh
from structinit_jax.training.state import make_initializer

pytestmark = pytest.mark.usefixtures("library_promotion")
NUM_IMAGES = 16
VIT = SIZES["vit"] | dict(width=32, depth=1, pool="class_token", positions="learned")


def make_config(family):
    config = base_config(family)
    config.model.update(num_classes=10, **(VIT if family == "vit" else SIZES[family]))
    config.data.update(name="digits", image_size=8, channels=1)
    config.data.update(mean=(0.3,), std=(0.4,))
    config.attention_init = dict(name="impulse")
    return config


def start(family):
    """Config, images and snapshot of a family's initial values."""
    config = make_config(family)
    images = collect.read_images(config, NUM_IMAGES)
    return config, images, collect.observe_start(config, images)


def forward(config, images):
    """Intermediates for all images at once."""
    model = build.make_model(config, make_mesh(devices=jax.devices()[:1]))
    weights = make_initializer(config, model)().weights
    model = nnx.merge(model.graphdef, *weights)
    images = normalize(jnp.asarray(images), config.data.mean, config.data.std)
    return jax.jit(lambda model: model(images, with_maps=True)[1])(model)


def test_images_are_a_fixed_part_of_the_training_split():
    config = make_config("vit")
    images = collect.read_images(config, NUM_IMAGES)
    assert images.shape == (NUM_IMAGES, 8, 8, 1)
    source = build.open_split(config, build.open_data(config), "train_split")
    ((last, _),) = source.read([len(source) - 1])  # images are spread over the split
    np.testing.assert_array_equal(images[-1], collect.CenterCrop(8, 1.0)(last))
    np.testing.assert_array_equal(images, collect.read_images(config, NUM_IMAGES + 7))
    config.seed = 1
    np.testing.assert_array_equal(images, collect.read_images(config, NUM_IMAGES))
    config.data.crop_fraction = 0.5  # as for test images
    assert np.any(images != collect.read_images(config, NUM_IMAGES))
    assert collect._start_name(config) == "impulse"
    config.start_from = "teacher.safetensors"
    assert collect._start_name(config) == "selected weights"
    mixer = make_config("mixer")
    mixer.attention_init = dict(name="default")
    with pytest.raises(InputError, match=r"name='mixer'"):
        collect.observe_start(mixer, images)
    config.data.train_split = "train[:5]"
    with pytest.raises(InputError, match=r"train_split=5 must be"):
        collect.read_images(config, NUM_IMAGES)


def test_a_vit_is_averaged_over_images_without_its_extra_tokens():
    config, images, snapshot = start("vit")
    out = jax.device_get(forward(config, images))
    maps = out["blocks"]["attention_maps"][0][:, :, 1:, 1:]
    maps = maps / maps.sum(axis=-1, keepdims=True)
    layer = snapshot.layers[0]
    np.testing.assert_allclose(layer.maps, maps.mean(axis=0), rtol=1e-4, atol=1e-6)
    entropy = -(maps * np.log(maps)).sum(axis=-1).mean(axis=(0, 2))
    np.testing.assert_allclose(layer.measures["entropy"], entropy, rtol=1e-4)
    outputs = out["blocks"]["output"][0][:, 1:]
    values = np.linalg.svd(outputs, compute_uv=False)
    rank = np.mean((values**2).sum(axis=-1) / values[:, 0] ** 2)
    np.testing.assert_allclose(layer.measures["stable_rank"], [rank], rtol=1e-4)


def test_targets_are_those_that_the_solve_reaches():
    config = make_config("vit")
    config.model.depth = 2
    config.attention_init = dict(name="impulse_mimetic", target_mass=0.5)
    images = collect.read_images(config, NUM_IMAGES)
    model = build.make_model(config, make_mesh(devices=jax.devices()[:1]))
    initial = make_initializer(config, model)()
    index, kernels = initial.filters["blocks"]
    targets = target_maps((4, 4))
    np.testing.assert_array_equal(filter_maps(np.asarray(kernels), (4, 4)), targets)
    params, state = initial.weights
    # Without content, only the position encoding is left, for which the heads were solved.
    params["patch_embedding"] = jax.tree.map(lambda x: 0 * x, params["patch_embedding"])
    weights = {"": (params, state)}
    (snapshot,) = collect.observe(config, model, {"blocks": (index, targets)}, weights, images)
    layer, last = snapshot.layers
    assert "target_mass" not in last.measures  # its heads attend to similar tokens
    assert np.all(layer.measures["hit_rate"] > 0.9)
    assert np.all(layer.measures["target_mass"] > 2 / 16)  # twice that of a uniform map
    for head, wanted in enumerate(index[0]):
        kernel = measures.attention_by_offset(layer.maps[head], (4, 4))
        place = np.unravel_index(np.argmax(kernel), kernel.shape)
        assert np.subtract(place, 3).tolist() == [wanted // 3 - 1, wanted % 3 - 1]


def test_swin_is_measured_within_windows():
    layers = start("swin")[2].layers
    assert [layer.name for layer in layers] == ["1.1", "1.2", "2.1"]
    assert [layer.maps.shape for layer in layers] == [(2, 16, 16)] * 2 + [(4, 16, 16)]
    # The first block of a stage is not shifted, so it has the default target mass.
    for layer in (layers[0], layers[2]):
        np.testing.assert_allclose(layer.measures["target_mass"], 0.3, atol=0.05)
        np.testing.assert_allclose(layer.measures["hit_rate"], 1, atol=0.05)


def test_the_inputs_of_a_convmixer_have_a_stable_rank(tmp_path):
    config, images, snapshot = start("convmixer")
    out = forward(config, images)
    inputs = np.stack([out["stem"], out["blocks"]["output"][0]]).reshape(2, NUM_IMAGES, 16, 16)
    values = np.linalg.svd(inputs, compute_uv=False)
    ranks = ((values**2).sum(axis=-1) / values[..., 0] ** 2).mean(axis=-1)
    found = [layer.measures["input_rank"] for layer in snapshot.layers]
    np.testing.assert_allclose(found, ranks[:, None], rtol=1e-4)
    (tmp_path / "maps.png").touch()  # left by another model
    analyse.write([snapshot], "ConvMixer", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"analysis.json", "by_layer.png"}


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    found = []
    save = figures._save
    monkeypatch.setattr(figures, "_save", lambda *args: (found.append(args[0]), save(*args)))
    return found


def test_maps_their_corners_and_kernels_are_drawn_as_they_are(tmp_path, drawn):
    maps = target_maps((4, 5))[:6].reshape(2, 3, 20, 20)
    title = os.fsdecode(b"$x_{$ \xff")  # invalid as mathtext and as UTF-8
    figures.draw_maps({"$x_{$": maps}, (4, 5), title, tmp_path / "maps.png")
    images = drawn[0].axes[0].images
    assert {image.get_clim() for image in images} == {(0, 1)}
    _, _, bottom, top = images[0].get_extent()
    low, high = drawn[0].axes[0].get_ylim()
    assert (bottom - top) * (low - high) > 0  # the first query is at the top
    drawn = [image.get_array() for image in images]
    assert len(drawn) == 3 * 2 + 6
    for head in range(3):
        np.testing.assert_array_equal(drawn[2 * head], maps[0, head])
        np.testing.assert_array_equal(drawn[2 * head + 1], maps[0, head, :10, :10])
    for kernel, (dy, dx) in zip(drawn[6:], np.ndindex(3, 3), strict=False):
        assert np.argwhere(kernel == 1).tolist() == [[2 + dy, 3 + dx]]


def test_measures_are_drawn_by_layer(tmp_path, drawn):
    values = [dict(distance=np.float32([1, 3])), dict(distance=np.float32([5, 9]))]
    values[1]["target_mass"] = np.float32([0.5])
    layers = [collect.Layer(str(i), None, None, each) for i, each in enumerate(values, 1)]
    figures.draw_by_layer([collect.Snapshot("$x_{$", layers)], "", tmp_path / "by_layer.png")
    lines = [
        [(*line.get_xdata(), *line.get_ydata()) for line in axis.get_lines()[:-1]]
        for axis in drawn[0].axes
    ]
    # The heads of each layer, and the line through their means.
    assert lines[0] == [(1, 1, 1, 3), (2, 2, 5, 9), (1, 2, 2, 7)]
    assert lines[1] == [(2, 0.5), (2, 0.5)]


def test_schemes_are_compared(tiny_config, finished_run, tmp_path, monkeypatch):
    schemes = ["default", "impulse"]
    flags = dict(workdir=finished_run.workdir, schemes=schemes, num_images=8, step=None)
    monkeypatch.setattr(analyse, "FLAGS", types.SimpleNamespace(**flags))
    monkeypatch.setattr(command_line, "read_config", lambda overrides: tiny_config)
    monkeypatch.setattr(command_line, "out_folder", lambda default: tmp_path)
    snapshots = []
    monkeypatch.setattr(analyse, "write", lambda found, *_: snapshots.extend(found))
    analyse.main([])
    assert [snapshot.name for snapshot in snapshots] == schemes
    masses = [snapshot.layers[0].measures["neighbor_mass"] for snapshot in snapshots]
    assert max(masses[0]) < 0.1 < min(masses[1])
    analyse.FLAGS.step = "5"
    with pytest.raises(InputError, match=r"^--step='5' must be left out with --schemes"):
        analyse.main([])
    vars(analyse.FLAGS).update(schemes=[], step=None)
    tiny_config.seed = 9
    with pytest.raises(InputError, match=r"\n  seed: 0 -> 9\n"):
        analyse.main([])


def test_the_command_compares_a_run_with_its_start(finished_run, tmp_path):
    out = tmp_path / "out"
    arguments = (f"--workdir={finished_run.workdir}", f"--out={out}", "--num_images=8")
    # With the flags of this process, programs that it has compiled need not be compiled again.
    fork_main.run(*arguments, module=analyse.__name__, XLA_FLAGS=os.environ["XLA_FLAGS"])
    analysis = json.loads((out / "analysis.json").read_text())
    assert analysis["subject"] == "vit, 8 training images of digits"
    models = analysis["models"]
    assert [model["name"] for model in models] == ["impulse, step 0", "impulse, step 12"]
    before, after = [model["layers"][1]["measures"] for model in models]
    assert len(after["target_mass"]) == 2
    assert sum(before["target_mass"]) > sum(after["target_mass"])  # training moves off the targets
    for name in ("by_layer", "maps"):
        picture = np.asarray(Image.open(out / f"{name}.png").convert("L"), np.float32)
        assert picture.shape[1] > 500
        assert picture.std() > 10  # not blank
    with np.load(out / "maps.npz") as maps:
        assert maps["impulse, step 12/layer 2"].shape == (2, 16, 16)
