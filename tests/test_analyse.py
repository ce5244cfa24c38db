import functools
import json
import types

import fork_main
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from structinit_jax import analyse
from structinit_jax.analysis import collect, figures
from structinit_jax.attention_init.kernels import convolution_maps, impulse_kernels
from structinit_jax.augment import normalize
from structinit_jax.config import base_config, load_run_config, make_attention_init
from structinit_jax.errors import InputError
from structinit_jax.evaluate import restore_model
from structinit_jax.training.state import abstract_model, find_targets, initialize_model

pytestmark = pytest.mark.usefixtures("library_promotion")
NUM_IMAGES = 16
MODELS = {
    "vit": dict(width=32, depth=1, num_heads=2, patch_size=2, num_registers=1, pool="class_token"),
    "swin": dict(width=8, depths=(2, 1), num_heads=(1, 2), patch_size=1, window_size=4),
    "mixer": dict(width=16, depth=2, patch_size=1, token_mlp_ratio=2.0, base_init="pytorch"),
    "convmixer": dict(width=16, depth=2, patch_size=1, kernel_size=3),
}


def make_config(family, data_dir):
    config = base_config(family)
    config.model.update(num_classes=10, **MODELS[family])
    config.data.update(name="digits", data_dir=data_dir, image_size=8, channels=1)
    config.data.update(mean=(0.3,), std=(0.4,))
    config.attention_init = dict(name="impulse")
    return config


@functools.cache
def start(family, data_dir):
    """Config, images and snapshot of a family's start values; the tests share the compilation."""
    config = make_config(family, data_dir)
    images = collect.read_images(config, NUM_IMAGES)
    return config, images, collect.observe_start(config, images)


@pytest.fixture(scope="module")
def snapshots(finished_run):
    """The shared run before and after training."""
    config = load_run_config(finished_run.workdir)
    restored = restore_model(config, finished_run.workdir, jax.local_devices()[:1])
    return collect.observe_run(config, restored, collect.read_images(config, NUM_IMAGES))


def forward(config, images):
    """Intermediates for all images at once."""
    model = abstract_model(config.model, config.data, collect.one_device())
    *weights, _ = initialize_model(model, make_attention_init(config), config.seed)
    model = nnx.merge(model.graphdef, *weights)
    images = normalize(jnp.asarray(images), tuple(config.data.mean), tuple(config.data.std))
    return jax.jit(lambda model: model(images, with_maps=True)[1])(model)


def check_figures(out, names):
    assert {path.stem for path in out.glob("*.png")} == names
    for name in names:
        picture = np.asarray(Image.open(out / f"{name}.png").convert("L"), np.float32)
        assert picture.shape[1] > 500
        assert picture.std() > 10  # something is drawn


def test_images_are_a_fixed_part_of_the_training_split(data_dir):
    config, images, _ = start("vit", data_dir)
    np.testing.assert_array_equal(images, collect.read_images(config, NUM_IMAGES + 7))
    assert images.shape == (NUM_IMAGES, 8, 8, 1)
    config = make_config("vit", data_dir)
    config.seed = 1
    assert np.any(images != collect.read_images(config, NUM_IMAGES))
    config.data.train_split = "train[:7]"
    with pytest.raises(InputError, match=r"config\.data\.train_split='train\[:7\]'"):
        collect.read_images(config, NUM_IMAGES)


def test_a_vit_is_averaged_over_images_without_its_extra_tokens(data_dir):
    config, images, snapshot = start("vit", data_dir)
    out = jax.device_get(forward(config, images))
    maps = out["blocks"]["attention_maps"][0][:, :, 2:, 2:]
    maps = maps / maps.sum(axis=-1, keepdims=True)
    layer = snapshot.layers[0]
    np.testing.assert_allclose(layer.maps, maps.mean(axis=0), rtol=1e-4, atol=1e-6)
    entropy = -(maps * np.log(maps)).sum(axis=-1).mean(axis=(0, 2))
    np.testing.assert_allclose(layer.measures["entropy"], entropy, rtol=1e-4)
    values = np.linalg.svd(out["blocks"]["output"][0][:, 2:], compute_uv=False)
    rank = np.mean((values**2).sum(axis=-1) / values[:, 0] ** 2)
    np.testing.assert_allclose(layer.measures["stable_rank"], [rank], rtol=1e-4)
    assert layer.measures["shift_distance"] > 0.1  # positions do not move with the image


def test_targets_are_those_that_the_solve_reaches(data_dir):
    config = make_config("vit", data_dir)
    config.attention_init.update(mimetic_layers=0.0, target_mass=0.5, patch_scale=0.3)
    images = collect.read_images(config, NUM_IMAGES)
    model = abstract_model(config.model, config.data, collect.one_device())
    index, targets = find_targets(model, make_attention_init(config), config.seed)["blocks"]
    np.testing.assert_array_equal(targets, convolution_maps(impulse_kernels(3), (4, 4)))
    params, state, _ = initialize_model(model, make_attention_init(config), config.seed)
    # Without content, what is left is the position encoding, for which the heads were solved.
    params["patch_embedding"] = jax.tree.map(lambda x: 0 * x, params["patch_embedding"])
    observer = collect.Observer(config, model)
    layer = observer((params, state), images, step=0).layers[0]
    assert np.all(layer.measures["hit_rate"] > 0.9)
    assert np.all(layer.measures["target_mass"] > 2 * layer.uniform["target_mass"])
    for head, wanted in enumerate(index[0]):
        offset = [layer.measures[f"neighbor_{axis}"][head] for axis in ("row", "column")]
        assert offset == [wanted // 3 - 1, wanted % 3 - 1]
    params["patch_embedding"] = jax.tree.map(lambda x: x / 0, params["patch_embedding"])
    with pytest.raises(InputError, match="impulse, step 7 are not finite"):
        observer((params, state), images, step=7)


def test_a_run_is_compared_with_its_start(snapshots, tmp_path):
    before, after = snapshots
    assert (before.name, after.name) == ("impulse, step 0", "impulse, step 12")
    assert np.abs(before.layers[0].maps - after.layers[0].maps).max() > 1e-5
    analyse.write(snapshots, "tiny", tmp_path)
    check_figures(tmp_path, {"by_layer", "maps_by_offset"})
    numbers = json.loads((tmp_path / "analysis.json").read_text())
    first = numbers["models"][1]["layers"][0]["measures"]
    assert len(first["target_mass"]) == 2
    with np.load(tmp_path / "maps.npz") as maps:
        np.testing.assert_array_equal(maps["impulse, step 12/layer 2"], after.layers[1].maps)


def test_swin_is_measured_within_windows(data_dir, tmp_path):
    _, _, snapshot = start("swin", data_dir)
    assert [layer.name for layer in snapshot.layers] == ["1.1", "1.2", "2.1"]
    assert [layer.maps.shape for layer in snapshot.layers] == [(1, 16, 16)] * 2 + [(2, 16, 16)]
    # The first block of a stage is not shifted, so that it has the default target mass.
    for layer in (snapshot.layers[0], snapshot.layers[2]):
        np.testing.assert_allclose(layer.measures["target_mass"], 0.5, atol=0.05)
        np.testing.assert_allclose(layer.measures["hit_rate"], 1, atol=0.05)
    analyse.write([snapshot, start("vit", data_dir)[2]], "tiny", tmp_path)
    check_figures(tmp_path, {"by_layer", "maps_by_offset"})


def test_token_mixing_is_measured_by_its_derivatives(data_dir):
    config, images, snapshot = start("mixer", data_dir)
    derivatives = np.abs(forward(config, images)["blocks"]["token_maps"][1])
    total = derivatives.sum(axis=-1, keepdims=True)
    shares = np.where(total, derivatives / np.where(total, total, 1), 0)
    layer = snapshot.layers[1]
    np.testing.assert_allclose(layer.maps[0], shares.mean(axis=0), rtol=1e-3, atol=1e-6)
    assert snapshot.quantity == "sensitivity"
    assert all(np.isfinite(values).all() for values in layer.measures.values())


def test_convmixer_has_filters_and_is_equivariant_to_shifts(data_dir, tmp_path):
    snapshot = start("convmixer", data_dir)[2]
    first, second = snapshot.layers
    assert first.maps is None
    assert first.filters.shape == (3, 3, 16)
    assert first.measures["shift_distance"] < 1e-5
    assert second.measures["shift_distance"] > 1e-3  # zeros around the image are two layers away
    analyse.write([snapshot, snapshot._replace(name="after")], "tiny", tmp_path)
    check_figures(tmp_path, {"by_layer", "maps_by_offset"})
    assert not (tmp_path / "maps.npz").exists()


def test_maps_of_any_model_are_drawn(tmp_path):
    maps = convolution_maps(impulse_kernels(3), (5, 5))[:4].reshape(2, 2, 25, 25)
    show = functools.partial(figures.draw_maps, title="Maps", path=tmp_path / "maps.png")
    show({"before": np.full_like(maps, 1 / 25), "after": maps}, (5, 5))
    pixels = np.asarray(Image.open(tmp_path / "maps.png").convert("RGB"))[:, :-200]
    yellow = np.all(pixels == (253, 231, 36), axis=-1)  # viridis of 1, not the color bar
    assert not yellow[:, : yellow.shape[1] // 2].any()  # before
    assert 4 * 5**2 < yellow.sum() < 4 * 20**2  # one token for each of the four heads
    with pytest.raises(InputError, match=r"maps\['after'\] has shape .* 20, 20\]: cut off"):
        show({"after": maps}, (4, 5))


def test_the_command_analyzes_two_runs(finished_run, workdir, tmp_path):
    arguments = (f"--workdir={finished_run.workdir}", f"--other_workdir={workdir}")
    options = ("--num_images=8", f"--out={tmp_path / 'out'}")
    result = fork_main.run(*arguments, *options, module="structinit_jax.analyse")
    assert result.returncode == 0, result.stderr
    models = json.loads((tmp_path / "out" / "analysis.json").read_text())["models"]
    names = [f"{place}: impulse, step" for place in (finished_run.workdir, workdir)]
    assert [model["name"] for model in models] == [f"{n} {s}" for n in names for s in (0, 12)]
    assert "layer 2: distance " in result.stdout


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(_SCHEMES=["default"], WORKDIR="run"), "--schemes compares start values"),
        (dict(STEP="best"), "need --workdir"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(monkeypatch, values, message):
    monkeypatch.setattr(analyse.command_line, "read_config", lambda *_: base_config())
    for name in ("_SCHEMES", "WORKDIR", "STEP", "_OTHER_WORKDIR"):
        monkeypatch.setattr(analyse, name, types.SimpleNamespace(value=values.get(name)))
    with pytest.raises(InputError, match=message):
        analyse.main([])
