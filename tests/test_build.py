from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import set_up

from structinit_jax.data.images import BadImageError
from structinit_jax.data.source import Dataset
from structinit_jax.errors import InputError
from structinit_jax.models.model import Model
from structinit_jax.models.vit import VisionTransformer
from structinit_jax.training import build, train
from structinit_jax.training.build import bytes_needed, check_memory, explain_errors
from structinit_jax.training.state import make_initializer


def test_a_split_that_overlaps_the_training_split_is_noted(tiny_config, capsys):
    build.open_splits(tiny_config, build.open_data(tiny_config))
    assert capsys.readouterr().out == ""
    tiny_config.data.eval_split = "train[300:400]"
    build.open_splits(tiny_config, build.open_data(tiny_config))
    assert capsys.readouterr().out.startswith("note: training sees 84 examples of the evaluation")


def test_a_workdir_is_not_among_the_classes(tiny_config, tmp_path):
    tiny_config.data.update(name="folder", data_dir=f"{tmp_path}")
    for workdir in (tmp_path / "cat" / "run", tmp_path / "run"):
        with pytest.raises(InputError, match=r"^workdir=.* must be outside of .* are classes"):
            build.require_outside_images(tiny_config, workdir)
    build.require_outside_images(tiny_config, tmp_path.with_name("run"))
    build.require_outside_images(tiny_config, "gs://bucket/run")
    (tmp_path / "val").mkdir()
    build.require_outside_images(tiny_config, tmp_path / "run")


def test_a_platform_whose_devices_are_missing_is_refused_at_the_start(tiny_config, tmp_path):
    former = jax.config.jax_platforms
    jax.config.update("jax_platforms", "cuda,cpu")
    try:
        with pytest.raises(InputError, match=r"^JAX_PLATFORMS='cuda,cpu' must"):
            train.train(tiny_config, tmp_path / "run")
    finally:
        jax.config.update("jax_platforms", former)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        (dict(batch_size=1000), "a step takes 2.6 epochs"),
        (dict(warmup_epochs=1.5), "9 of the 12 steps are warm-up"),
        (dict(warmup_epochs=1.0), ""),
    ],
)
def test_few_steps_are_noted(tiny_config, fields, note, capsys):
    build.make_schedule(tiny_config, 384)
    assert not capsys.readouterr().out
    tiny_config.update(fields)
    build.make_schedule(tiny_config, 384)
    assert bool(note) == (f"note: {note}" in capsys.readouterr().out)


def test_a_split_without_labels_is_refused_when_it_is_opened(tiny_config):
    records = [{"image": np.zeros((8, 8), np.uint8), "label": -1}] * 384
    dataset = Dataset.from_records("mine", {"train": records}, range(10))
    with pytest.raises(InputError, match="label -1 is not"):
        build.open_split(tiny_config, dataset, "train_split")


def test_a_scheme_without_sites_is_noted(tiny_config, capsys, monkeypatch):
    monkeypatch.setattr(VisionTransformer, "sites", Model.sites)
    model = build.make_model(tiny_config, build.make_mesh(tiny_config))
    make_initializer(tiny_config, model)
    assert capsys.readouterr().out.startswith("note: config.model.name=vit has no sites")
    tiny_config.attention_init = dict(name="default")
    make_initializer(tiny_config, model)
    assert capsys.readouterr().out == ""


class Masked(Model):
    def __init__(self, *, image_size, channels, num_classes, rngs):
        self.mask = jnp.ones(num_classes)


def test_an_array_that_flax_does_not_track_is_refused(tiny_config):
    tiny_config.model = dict(name="test_build:Masked", num_classes=10)
    with pytest.raises(InputError, match=r"Masked\.mask=.* must be an nnx\.Variable"):
        build.make_model(tiny_config, build.make_mesh(tiny_config))


def test_a_scheme_is_checked_only_if_it_is_used(tiny_config, tmp_path):
    tiny_config.model.positions = "rope"
    tiny_config.attention_init = dict(name="impulse_2024")
    model = build.make_model(tiny_config, build.make_mesh(tiny_config))
    with pytest.raises(InputError, match=r"^config\.attention_init"):
        make_initializer(tiny_config, model)
    tiny_config.start_from = f"{tmp_path}/model.safetensors"
    with pytest.raises(InputError, match=r"^config\.start_from=.* must be an existing"):
        make_initializer(tiny_config, model)
    Path(tiny_config.start_from).touch()
    initialize = make_initializer(tiny_config, model)
    with pytest.raises(InputError, match=r"^config\.start_from=.* cannot be read"):
        initialize()  # uses the file


def test_a_step_fits_what_images_leave():
    step = jax.jit(jnp.sort).lower(jnp.zeros(10**6)).compile()
    needed = bytes_needed(step)
    assert needed >= 2 * 4 * 10**6  # argument and result
    assert check_memory(step, 1000, None) == f"{needed / 2**20:,.0f} MiB"
    assert check_memory(step, 1000, needed + 1000).startswith(f"{needed / 2**20:,.0f} MiB of ")
    with pytest.raises(InputError, match=r"config\.model\.remat"):
        check_memory(step, 1001, needed + 1000)
    donated = jax.jit(lambda x: x + 1, donate_argnums=0).lower(jnp.zeros(10**6)).compile()
    assert bytes_needed(donated) < 1.5 * 4 * 10**6  # the result reuses the argument's buffer


def test_errors_name_the_fields_that_help_and_others_pass():
    with pytest.raises(InputError, match=r"^cat.*on_bad_image=skip"), explain_errors():
        raise BadImageError("cat.jpg: cannot be decoded")
    message = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nmore"
    fields = r"allocate 9 bytes\.\).*config\.accumulate_steps=2"
    with pytest.raises(InputError, match=fields), explain_errors():
        raise jax.errors.JaxRuntimeError(message)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), explain_errors():
        raise jax.errors.JaxRuntimeError("INTERNAL: something")


@pytest.mark.usefixtures("library_promotion")
def test_recomputing_saves_memory(tiny_config):
    tiny_config.attention_init = dict(name="default")
    tiny_config.model.update(depth=6, mlp_ratio=8.0, drop_path=0.0)
    needed = []
    for remat in ("none", "dots", "full"):
        tiny_config.model.remat = remat
        setup = set_up(tiny_config, jax.devices()[:1])
        needed.append(bytes_needed(setup.train_step.lower(*setup.arguments).compile()))
    assert build.data_bytes(tiny_config, 384, 90) == (384 + 90) * 8 * 8
    assert needed[0] > needed[1] > needed[2]
