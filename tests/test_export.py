import json
import pickle

import jax
import pytest
from conftest import assert_close
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file

from structinit_jax import export
from structinit_jax.config import base_config
from structinit_jax.errors import InputError
from structinit_jax.models.timm import to_timm
from structinit_jax.training import evaluation

pytestmark = pytest.mark.usefixtures("library_promotion")


def test_the_file_has_the_weights_of_the_newest_checkpoint(tiny_config, finished_run, tmp_path):
    model, state, _ = evaluation.restore_model(tiny_config, finished_run.workdir)
    expected = to_timm(nnx.merge(model.graphdef, *jax.device_get(state.weights)))
    tiny_config.batch_size = 9  # does not fit the devices
    assert export.export(tiny_config, finished_run.workdir, tmp_path) == 12
    assert_close(load_file(tmp_path / "model.safetensors"), expected, rtol=0)


# timm's ImageFolder orders these names as 1, 2, 10, apple, "cat ", Zebra; with the map, its labels
# are those of data/folder.py. Checked with timm.data.create_dataset(class_map=FILE), timm 1.0.31.
def test_a_folder_has_timms_card_and_class_map(tiny_config, finished_run, tmp_path, monkeypatch):
    names = ["1", "10", "2", "Zebra", "apple", "cat "]
    restore_model = export.restore_model
    monkeypatch.setattr(export, "restore_model", lambda *args: (*restore_model(*args)[:2], names))
    for _ in range(2):  # the second replaces the first
        export.export(tiny_config, finished_run.workdir, tmp_path)
    card = json.loads((tmp_path / "config.json").read_text())
    assert card["architecture"] == "vit_base_patch16_224"
    assert card["model_args"]["embed_dim"] == 16
    assert card["label_names"] == names
    assert card["num_classes"] == 10
    expected = dict(num_classes=10, input_size=[1, 8, 8], mean=[0.3], std=[0.4])
    assert card["pretrained_cfg"] == card["pretrained_cfg"] | expected
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert json.loads(file.metadata()["config"]) == card
    labels = pickle.loads((tmp_path / "class_map.pkl").read_bytes())
    assert labels == dict(zip(names, range(6), strict=True))


# From these arguments, timm 1.0.31 builds models with our weights' names and shapes and the same
# logits, to 1e-6 of the largest. Checked with timm.create_model("local-dir:FOLDER").
def test_timms_arguments_of_a_vit():
    sizes = dict(in_chans=3, num_classes=1000, img_size=224)
    sizes |= dict(embed_dim=192, depth=12, num_heads=3, mlp_ratio=4.0)
    config = base_config("vit")
    config.model.update(pool="class_token", layer_scale=0.1)
    card = export.timm_card(config)
    assert card["architecture"] == "vit_base_patch16_224"
    arguments = dict(patch_size=16, class_token=True, global_pool="token", init_values=0.1)
    assert card["model_args"] == sizes | arguments
    config.model.update(pool="mean", layer_scale=0.0, positions="rope", patch_size=4)
    card = export.timm_card(config)
    assert card["architecture"] == "vit_small_patch16_rope_224"
    arguments = dict(patch_size=4, class_token=False, global_pool="avg", init_values=None)
    assert card["model_args"] == sizes | arguments


def test_timms_arguments_of_a_swin():
    config = base_config("swin")
    sizes = dict(patch_size=2, window_size=4, depths=(2, 1), num_heads=(2, 4), mlp_ratio=3.0)
    config.model.update(sizes, width=16)
    config.data.crop_fraction = 0.9
    card = export.timm_card(config)
    assert card["architecture"] == "swin_tiny_patch4_window7_224"
    sizes |= dict(embed_dim=16, depths=[2, 1], num_heads=[2, 4])
    assert card["model_args"] == dict(in_chans=3, num_classes=1000, img_size=224) | sizes
    assert card["pretrained_cfg"]["classifier"] == "head.fc"
    assert card["pretrained_cfg"]["crop_pct"] == 0.9


def test_other_models_and_the_workdir_of_a_run_are_refused(tiny_config, finished_run):
    with pytest.raises(InputError, match=r"name='mixer'"):
        export.timm_card(base_config("mixer"))
    with pytest.raises(InputError, match=r"^folder="):
        export.export(tiny_config, finished_run.workdir, finished_run.workdir)
