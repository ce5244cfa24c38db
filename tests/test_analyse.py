import functools
import itertools
import json
import re
import shutil
import subprocess
import sys

import fork_main
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from structinit_jax import analyse
from structinit_jax.analysis import collect, drawing, figures
from structinit_jax.attention_init import TokenMixingSite, WindowSite
from structinit_jax.attention_init.kernels import convolution_maps, impulse_kernels
from structinit_jax.augment import normalize
from structinit_jax.config import base_config, load_run_config
from structinit_jax.errors import InputError
from structinit_jax.evaluate import restore_model
from structinit_jax.training.mesh import make_mesh
from structinit_jax.training.state import abstract_model, find_targets, initialize_model

pytestmark = pytest.mark.usefixtures("library_promotion")
NUM_IMAGES = 16
MODELS = {
    "vit": dict(width=32, depth=1, num_heads=2, patch_size=2, num_registers=1, pool="class_token"),
    "swin": dict(width=8, depths=(2, 1), num_heads=(1, 2), patch_size=1, window_size=4),
    "mixer": dict(width=16, depth=2, patch_size=2, token_mlp_ratio=2.0, base_init="pytorch"),
    "convmixer": dict(width=16, depth=2, patch_size=2, kernel_size=3),
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
    model = abstract_model(config, make_mesh(devices=jax.local_devices()[:1]))
    model = nnx.merge(model.graphdef, *initialize_model(config, model))
    images = normalize(jnp.asarray(images), tuple(config.data.mean), tuple(config.data.std))
    return jax.jit(lambda model: model(images, with_maps=True)[1])(model)


def check_figures(out, names):
    assert {path.name for path in out.glob("*.png")} == names
    for name in names:
        picture = np.asarray(Image.open(out / name).convert("L"), np.float32)
        assert picture.shape[1] > 500
        assert picture.std() > 10  # something is drawn


@pytest.fixture
def drawn(monkeypatch):
    """The figures that have been drawn."""
    found = []
    monkeypatch.setattr(drawing.import_pyplot(), "close", found.append)
    return found


def extents(figure, texts):
    """Returns where texts are, from left to right."""
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in texts if text.get_text() and text.get_visible()]
    return sorted(boxes, key=lambda box: box.x0)


def test_the_config_of_a_run_is_read_from_its_workdir(run_config, finished_run, tmp_path):
    config = load_run_config(finished_run.workdir)
    assert config.to_dict() == run_config.to_dict()
    assert isinstance(config.data.mean, tuple)
    with pytest.raises(InputError, match=r"--workdir=.*config\.json"):
        load_run_config(tmp_path)


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
    np.testing.assert_allclose(layer.stable_rank, rank, rtol=1e-4)
    assert snapshot.grams.shape == (2, NUM_IMAGES, NUM_IMAGES)
    assert layer.token_size == 2


def test_targets_are_those_that_the_solve_reaches(data_dir):
    config, images, snapshot = start("vit", data_dir)
    model = abstract_model(config, make_mesh(devices=jax.local_devices()[:1]))
    index, targets = find_targets(config, model)["blocks"]
    np.testing.assert_array_equal(targets, convolution_maps(impulse_kernels(3), (4, 4)))
    params, state = initialize_model(config, model)
    # Without content, what is left is the position encoding, for which the heads were solved.
    params["patch_embedding"] = jax.tree.map(lambda x: 0 * x, params["patch_embedding"])
    layer = collect.Observer(config, model)((params, state), images, step=0).layers[0]
    assert np.all(layer.measures["hit_rate"] > 0.9)
    assert np.all(layer.measures["target_mass"] > 2 * layer.uniform["target_mass"])
    for head, wanted in enumerate(index[0]):
        offset = [layer.measures[f"neighbor_{axis}"][head] for axis in ("row", "column")]
        assert offset == [wanted // 3 - 1, wanted % 3 - 1]
    assert np.all(snapshot.layers[0].measures["target_mass"] < layer.measures["target_mass"])
    config.attention_init = dict(name="default")
    assert find_targets(config, model) == {}


def test_a_run_is_compared_with_its_start(snapshots, tmp_path):
    before, after = snapshots
    assert (before.name, after.name) == ("impulse, step 0", "impulse, step 12")
    assert np.abs(before.layers[0].maps - after.layers[0].maps).max() > 1e-5
    analyse.write(snapshots, "tiny", tmp_path, layers=[0, 1], heads=[0, 1])
    names = {"by_layer.png", "cka.png", "maps_by_offset.png", "maps_full.png"}
    check_figures(tmp_path, names)
    numbers = json.loads((tmp_path / "analysis.json").read_text())
    first = numbers["models"][1]["layers"][0]
    assert len(first["measures"]["target_mass"]) == 2
    pixels = 2 * np.asarray(first["measures"]["distance"])
    np.testing.assert_allclose(first["measures"]["distance_in_pixels"], pixels, atol=1e-4)
    assert np.shape(numbers["cka"][0]["cka"]) == (3, 3)
    with np.load(tmp_path / "maps.npz") as maps:
        found = maps["impulse, step 12/layer 2"]
        np.testing.assert_array_equal(found, after.layers[1].maps)


def test_swin_is_measured_within_windows(data_dir, tmp_path):
    _, _, snapshot = start("swin", data_dir)
    assert [layer.name for layer in snapshot.layers] == ["1.1", "1.2", "2.1"]
    assert [layer.maps.shape for layer in snapshot.layers] == [(1, 16, 16)] * 2 + [(2, 16, 16)]
    assert [layer.token_size for layer in snapshot.layers] == [1, 1, 2]
    # The first block of a stage is not shifted, so that it has the default target mass.
    for layer in (snapshot.layers[0], snapshot.layers[2]):
        np.testing.assert_allclose(layer.measures["target_mass"], 0.5, atol=0.05)
        np.testing.assert_allclose(layer.measures["hit_rate"], 1, atol=0.05)
    analyse.write([snapshot], "tiny", tmp_path, layers=[0, 2], heads=[0, 1])
    check_figures(tmp_path, {"by_layer.png", "maps_by_offset.png", "maps_full.png"})


def test_token_mixing_is_measured_by_its_derivatives(data_dir, tmp_path, drawn):
    config, images, snapshot = start("mixer", data_dir)
    derivatives = np.abs(forward(config, images)["blocks"]["token_maps"][1])
    shares = derivatives / derivatives.sum(axis=-1, keepdims=True)
    layer = snapshot.layers[1]
    np.testing.assert_allclose(layer.maps[0], shares.mean(axis=0), rtol=1e-3, atol=1e-6)
    assert layer.measures["target_mass"] > 0.5
    assert figures.title_by_offset([snapshot], "tiny") == "Sensitivity maps by offset: tiny"
    analyse.write([snapshot], "tiny", tmp_path, layers=[0, 1], heads=[0])
    for figure in drawn:
        texts = [text.get_text() for text in figure.findobj(match=matplotlib.text.Text)]
        assert any("sensitivity" in text.lower() for text in texts)
        assert not any("attention" in text.lower() for text in texts)


def test_a_token_that_depends_on_no_other_has_a_row_of_zeros(data_dir):
    config = make_config("mixer", data_dir)
    config.model.patch_size = 1
    snapshot = collect.observe_start(config, collect.read_images(config, NUM_IMAGES))
    rows = np.concatenate([layer.maps.sum(axis=-1) for layer in snapshot.layers])
    assert rows.min() == 0
    np.testing.assert_allclose(rows.max(), 1, rtol=1e-5)
    for layer in snapshot.layers:
        assert all(np.isfinite(values).all() for values in layer.measures.values())


def test_convmixer_has_filters_and_no_maps(data_dir, tmp_path):
    snapshot = start("convmixer", data_dir)[2]
    layer = snapshot.layers[0]
    assert layer.maps is None
    assert layer.filters.shape == (3, 3, 16)
    assert snapshot.grams.shape == (3, NUM_IMAGES, NUM_IMAGES)
    same = collect.compare_filters(snapshot, snapshot)
    np.testing.assert_allclose(same.layers[1].measures["filter_cosine"], np.ones(16), rtol=1e-5)
    analyse.write([snapshot, same], "tiny", tmp_path, layers=[0], heads=[0])
    check_figures(tmp_path, {"by_layer.png", "cka.png", "maps_by_offset.png"})


def test_the_label_of_the_color_bar_is_whole_in_a_tall_figure(data_dir, tmp_path):
    snapshot = start("convmixer", data_dir)[2]
    layer = snapshot.layers[0]._replace(filters=snapshot.layers[0].filters[..., :1])
    tall = snapshot._replace(layers=[layer._replace(name=str(i + 1)) for i in range(11)])
    title = figures.title_by_offset([tall], "tiny")
    assert title == "First 16 filters of each layer: tiny"
    figures.draw_by_offset([tall], title, tmp_path / "filters.png")
    pixels = np.asarray(Image.open(tmp_path / "filters.png").convert("L"))
    assert np.all(pixels[:, -1] == 255)


def test_maps_of_any_model_are_drawn_in_the_backend_of_the_notebook(tmp_path, monkeypatch):
    maps = convolution_maps(impulse_kernels(3), (5, 5))[:4].reshape(2, 2, 25, 25)
    show = functools.partial(figures.draw_maps, title="Maps", path=tmp_path / "maps.png")
    show({"before": np.full_like(maps, 1 / 25), "after": maps}, (5, 5))
    pixels = np.asarray(Image.open(tmp_path / "maps.png").convert("RGB"))
    yellow = np.all(pixels[:, :-200] == (253, 231, 36), axis=-1)  # viridis of 1, not the color bar
    assert not yellow[:, : yellow.shape[1] // 2].any()  # before
    assert 4 * 12**2 < yellow.sum() < 4 * 20**2  # one token for each of the four heads
    with pytest.raises(InputError, match=r"maps\['after'\] has shape .* 20, 20\]: cut off"):
        show({"after": maps}, (4, 5))

    monkeypatch.setenv("MPLBACKEND", "svg")
    code = (
        "from structinit_jax.analysis.drawing import import_pyplot as f; print(f().get_backend())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "svg\n"


def test_models_of_other_depths_are_drawn_beside_each_other(tmp_path, snapshots):
    _, deep = snapshots
    layer = deep.layers[0]
    shallow = deep._replace(
        name="shallow",
        layers=[layer._replace(maps=np.tile(layer.maps, (2, 1, 1)))],  # 4 heads
        grams=deep.grams[:2],
    )
    figures.draw_by_offset([deep, shallow], "Maps", tmp_path / "by_offset.png")
    figures.draw_full([deep, shallow], [0, 1], [0, 3], "Maps", tmp_path / "full.png")
    check_figures(tmp_path, {"by_offset.png", "full.png"})


def test_models_of_two_families_are_both_named(data_dir):
    vit, swin, mixer = (start(name, data_dir)[2] for name in ("vit", "swin", "mixer"))
    assert figures.common_layer_names([swin, swin]) == ["1.1", "1.2", "2.1"]
    assert figures.common_layer_names([vit, swin]) == ["1", "2", "3"]
    assert figures.common_layer_names([vit, mixer]) == ["1", "2"]
    window, tokens = (collect.StackSize(2, 1, site) for site in (WindowSite, TokenMixingSite))
    assert analyse.name_models({"swin": [window]}) == "swin"
    both = analyse.name_models({"swin": [window], "mixer": [tokens]})
    assert both == "swin and token mixing of mixer"


def test_titles_fit_the_figure(tmp_path, snapshots, drawn):
    name = "impulse,model.num_heads=3/seed_{}: impulse, step 12"
    named = [s._replace(name=name.format(i)) for i, s in enumerate(snapshots)]
    subject = "vit, 64 training images of my_package.my_module:a_function_with_a_long_name"
    analyse.write(named, subject, tmp_path, layers=[0, 1], heads=[0])
    assert len(drawn) == 4
    for figure in drawn:
        names = [panel._suptitle for panel in figure.findobj(matplotlib.figure.SubFigure)]
        titles, panels = [figure._suptitle], [text for text in names if text]
        boxes = extents(figure, titles) + extents(figure, panels)
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width for box in boxes)
        left_to_right = extents(figure, panels)
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(left_to_right))


@pytest.mark.parametrize(("stages", "count"), [(1, 12), (4, 48)])
def test_labels_of_layers_do_not_touch_and_stand_once(tmp_path, snapshots, drawn, stages, count):
    names = [f"{i * stages // count + 1}.{i + 1}" for i in range(count)]
    names = names if stages > 1 else [str(i + 1) for i in range(count)]
    layers = [snapshots[0].layers[0]._replace(name=name) for name in names]
    figures.draw_by_layer([snapshots[0]._replace(layers=layers)], "Maps", tmp_path / "maps.png")
    (figure,) = drawn
    axes = [axis for axis in figure.axes if axis.get_visible()]
    labels = [extents(figure, axis.get_xticklabels()) for axis in axes]
    assert [len(boxes) > 0 for boxes in labels] == [False] * 3 + [True] * 4
    for boxes in labels:
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


def test_uniform_maps_do_not_look_strong(tmp_path, snapshots, drawn, recwarn):
    def flatten(layer):
        return layer._replace(maps=np.full_like(layer.maps, 1 / 16))

    uniform = snapshots[0]._replace(layers=[*map(flatten, snapshots[0].layers)])
    figures.draw_by_offset([uniform], "Maps", tmp_path / "by_offset.png")
    figures.draw_full([uniform], [0], [0], "Maps", tmp_path / "full.png")
    for figure in drawn:
        image = figure.findobj(matplotlib.image.AxesImage)[0]
        np.testing.assert_allclose(image.norm(image.get_array()), 0.5, rtol=1e-5)
        assert any("uniform: 0.062" in axis.get_ylabel() for axis in figure.axes)
    assert not recwarn.list


def test_only_heads_of_the_chosen_layers_can_be_drawn():
    sizes = [collect.StackSize(2, 1, WindowSite), collect.StackSize(1, 4, WindowSite)]
    assert analyse.head_names(sizes, [0, 1]) == ["1"]
    assert analyse.head_names(sizes, [0, 2]) == ["1", "2", "3", "4"]


def test_start_values_are_compared_without_a_run(data_dir, tmp_path):
    (tmp_path / "notes.txt").touch()
    result = fork_main.run(
        "--config=configs/convmixer_digits.py",
        f"--config.data.data_dir={data_dir}",
        "--config.model.depth=1",
        "--schemes=impulse,kaiming_uniform",
        "--num_images=8",
        f"--out={tmp_path}",
        module="structinit_jax.analyse",
    )
    assert result.returncode == 0, result.stderr
    models = json.loads((tmp_path / "analysis.json").read_text())["models"]
    assert [model["name"] for model in models] == ["impulse, step 0", "kaiming_uniform, step 0"]
    # As compare trains it.
    assert "note: kaiming_uniform uses config.model.base_init='pytorch'" in result.stdout
    check_figures(tmp_path, {"by_layer.png", "cka.png", "maps_by_offset.png"})
    names = "analysis.json, by_layer.png, cka.png, maps_by_offset.png"
    assert f"wrote {names} to {tmp_path}\n" in result.stdout


def test_two_runs_are_compared(workdir, finished_run, tmp_path):
    result = fork_main.run(
        f"--workdir={workdir}",
        f"--other_workdir={finished_run.workdir}",
        *("--num_images=8", "--layers=all", "--heads=2"),
        f"--out={tmp_path / 'out'}",
        module="structinit_jax.analyse",
    )
    assert result.returncode == 0, result.stderr
    models = json.loads((tmp_path / "out" / "analysis.json").read_text())["models"]
    names = analyse.name_runs([str(workdir), str(finished_run.workdir)])
    steps = "impulse, step 0", "impulse, step 12"
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert f"wrote {', '.join(files)} to" in result.stdout
    assert [model["name"] for model in models] == [f"{n}: {s}" for n in names for s in steps]
    assert models[0]["layers"] != models[1]["layers"] == models[3]["layers"]


def test_layers_and_heads_are_chosen_by_name():
    names = ["1.1", "1.2", "2.1"]
    assert analyse.choose("layers", ["2.1", "1.1"], names, [0]) == [2, 0]
    assert analyse.choose("layers", ["all"], names, [0]) == [0, 1, 2]
    assert analyse.choose("layers", [], names, [0]) == [0]
    with pytest.raises(InputError, match=r"--layers=1,7.*no '1'.*1\.1, 1\.2, 2\.1"):
        analyse.choose("layers", ["1", "7"], names, [0])


def test_runs_are_named_by_what_tells_them_apart(monkeypatch):
    monkeypatch.chdir("/tmp")
    name = analyse.name_runs
    assert name(["/runs/a", "/runs/b/"]) == ["a", "b"]
    assert name(["/runs/h4/seed_0", "/runs/h2/seed_0"]) == ["h4/seed_0", "h2/seed_0"]
    assert name(["gs://bucket/a/0", "../tmp/0"]) == ["a/0", "tmp/0"]
    assert name(["/0", "/runs/0"]) == ["/0", "runs/0"]
    assert name(["/runs/a"]) == ["a"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workdir=x"], "--config is required.*--workdir=x holds no run.*config.json"),
        (["--workdir=RUN", "--schemes=default"], "--schemes.*--workdir"),
        (["--config=configs/vit_t_digits.py", "--step=best"], "--step=best needs --workdir"),
        (["--workdir=RUN", "--layers=9"], "--layers=9: the model has no '9'.*1, 2"),
        (["--workdir=RUN", "--num_images=5"], "--num_images=5.*at least 8"),
        (["--workdir=RUN", "--num_images=-5"], "--num_images=-5.*at least 8"),
        (["--workdir=RUN", "--step=7"], "--step=7"),
        (["--workdir=RUN", "--other_workdir=RUN/."], "--other_workdir=.* is the same as --workdir"),
        (
            ["--config=configs/vit_t_digits.py", "--schemes=mimetic,impulse,mimetic"],
            "--schemes=mimetic,impulse,mimetic: a scheme appears twice",
        ),
        (
            ["--workdir=RUN", "--other_workdir=OTHER", "--step=8"],
            "--other_workdir=.*/run has no complete checkpoint of --step=8",
        ),
        (
            ["--config=configs/vit_t_digits.py", "--schemes=mimetic,impuls"],
            "--schemes=mimetic,impuls: .*did you mean 'impulse'",
        ),
        (["--workdir=RUN", "--other_workdir=x"], r"error: --other_workdir=x: config\.json cannot"),
    ],
)
def test_mistakes_are_refused(finished_run, workdir, tmp_path, arguments, message):
    shutil.rmtree(workdir / "checkpoints" / "8")
    places = dict(RUN=finished_run.workdir, OTHER=workdir)
    words = [re.sub("RUN|OTHER", lambda found: str(places[found[0]]), word) for word in arguments]
    result = fork_main.run(*words, f"--out={tmp_path}/out", module="structinit_jax.analyse")
    assert result.returncode == 2
    assert re.search(message, result.stderr), result.stderr
    assert "Traceback" not in result.stderr
