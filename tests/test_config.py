import dataclasses
import sys

import pytest

from structinit_jax import command_line
from structinit_jax import config as config_lib
from structinit_jax.augment import AugmentOptions
from structinit_jax.errors import InputError
from structinit_jax.models import fields as model_fields


def changed(field, value):
    config = config_lib.base_config()
    config.data.name = "digits"
    config.update_from_flattened_dict({field: value})
    return config


def test_base_config_needs_nothing_but_a_data_set():
    config_lib.validate(changed("seed", 1))
    with pytest.raises(InputError, match=r"config\.data\.name=''"):
        config_lib.validate(config_lib.base_config())


@pytest.mark.parametrize("model", ["vit", "swin", "mixer", "convmixer", "vit_base_patch16_224"])
def test_every_field_has_a_requirement_or_is_free_text(model):
    config = config_lib.base_config(model)
    config.data.name = "digits"
    config_lib.validate(config)
    free = {"start_from", "data.data_dir", "data.manual_dir"}
    free |= {"data.train_split", "data.eval_split", "data.train_eval_split"}
    fields = {name for name in config if name not in ("model", "augment", "attention_init", "data")}
    fields |= {f"data.{name}" for name in config.data}
    needs = {field for _, _, fields in config_lib.NEEDS for field in fields.split()}
    assert fields == needs | free
    of_models = {name for _, _, names in model_fields.NEEDS for name in names.split()}
    untyped = {k for k, v in config.model.items() if not isinstance(v, bool) and k != "name"}
    assert untyped <= of_models


def test_augment_section_agrees_with_augment_options():
    elsewhere = ("num_classes", "mean", "std", "image_size", "label_smoothing")
    defaults = {f.name: f.default for f in dataclasses.fields(AugmentOptions)}
    section = config_lib.base_config().augment.to_dict()
    assert section == {k: v for k, v in defaults.items() if k not in elsewhere}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", -1),
        ("batch_size", 0),
        ("batch_size", -8),
        ("num_epochs", 0.0),
        ("num_epochs", -1.0),
        ("num_steps", -5),
        ("loss", ""),
        ("learning_rate", 0.0),
        ("weight_decay", -0.1),
        ("warmup_epochs", -1.0),
        ("clip_norm", -1.0),
        ("label_smoothing", 1.0),
        ("layer_decay", 0.0),
        ("layer_decay", 1.1),
        ("log_every_steps", 0),
        ("eval_every_epochs", float("inf")),
        ("checkpoint_every_steps", 0),
        ("cooldown_epochs", 30.0),  # of 30
        ("keep_checkpoints", 1),
        ("on_nonfinite", "ignore"),
        ("schedule", "linear"),
        ("model.depth", 0),
        ("model.width", -64),
        ("model.num_heads", 0),
        ("model.num_classes", 0),
        ("model.patch_size", 0),
        ("model.unroll", -1),
        ("model.mlp_ratio", 0.0),
        ("model.drop_path", 1.0),
        ("model.dropout", -0.1),
        ("model.attention_implementation", "flash"),
        ("data.image_size", 0),
        ("data.channels", 0),
        ("data.mean", (0.5,)),
        ("data.mean", (0.5, 0.5, "0.5")),
        ("data.std", (0.0, 0.2, 0.2)),
        ("data.crop_fraction", 1.1),
        ("data.on_bad_image", "ignore"),
        ("data.eval_name", "imagenet_x"),
        ("data.eval_name", "imagenet_v2"),  # with num_classes=10
        ("augment.flip", 2.0),
    ],
)
def test_bad_values_are_refused_by_field_and_value(field, value):
    config = changed(field, value)
    if field != "model.num_classes":
        config.model.num_classes = 10
    with pytest.raises(InputError) as caught:
        config_lib.validate(config)
    message = str(caught.value)
    assert field in message
    assert repr(value) in message


@pytest.mark.parametrize(("option", "value"), [("kernel_size", 2), ("name", "impulze")])
def test_the_message_of_a_scheme_gets_the_name_of_its_section(option, value):
    with pytest.raises(InputError, match=rf"^config\.attention_init.*{option}={value!r}"):
        config_lib.validate(changed(f"attention_init.{option}", value))


def test_options_of_other_schemes_are_dropped_and_returned():
    config = changed("attention_init.name", "mimetic")
    assert config_lib.drop_foreign_options(config) == ["kernel_size"]
    assert config.attention_init.to_dict() == {"name": "mimetic"}
    config_lib.validate(config)


def test_a_new_scheme_drops_the_options_of_the_former_but_not_its_own(capsys):
    config = changed("seed", 0)
    command_line.set_field(config, "attention_init.name", "mimetic")
    assert capsys.readouterr().out == (
        "note: attention_init.kernel_size is not an option of 'mimetic' and is left out\n"
    )
    command_line.set_field(config, "attention_init", "{'name': 'mimetic', 'kernel_size': 5}")
    with pytest.raises(InputError, match="kernel_size=5: not an option of 'mimetic'"):
        config_lib.validate(config)


def test_options_that_no_scheme_knows_stay_and_are_refused():
    config = changed("seed", 0)
    config.attention_init = dict(name="impulse", kernel_sise=3)
    assert config_lib.drop_foreign_options(config) == []
    with pytest.raises(InputError, match=r"kernel_sise.*'kernel_size'"):
        config_lib.validate(config)


@pytest.mark.parametrize("model", ["vit", "convmixer"])
def test_kaiming_uniform_is_pytorchs_initialization_of_the_whole_model(model):
    config = config_lib.base_config(model)
    config.data.name = "digits"
    config.attention_init = dict(name="kaiming_uniform")
    with pytest.raises(InputError, match=r"model\.base_init='timm': set it to 'pytorch'"):
        config_lib.validate(config)
    assert config_lib.set_base_init(config)
    config_lib.validate(config)
    assert not config_lib.set_base_init(config)


SCHEME = """
def keep(strength=1.0):
    return lambda rng, site: strength


def keep_all(**options):
    return lambda rng, site: options
"""


def test_a_scheme_of_the_users_own_needs_no_edit_in_the_package(tmp_path, monkeypatch):
    (tmp_path / "users_schemes.py").write_text(SCHEME)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_schemes", raising=False)
    config = changed("attention_init.name", "users_schemes:keep")
    assert config_lib.drop_foreign_options(config) == ["kernel_size"]
    config_lib.validate(config)
    config.attention_init = dict(name="users_schemes:keep", strength=2.0)
    assert config_lib.drop_foreign_options(config) == []
    assert config_lib.make_attention_init(config)(None, None) == 2.0
    command_line.set_field(
        config, "attention_init", "{'name': 'users_schemes:keep_all', 'kernel_size': 5}"
    )
    assert config_lib.make_attention_init(config)(None, None) == {"kernel_size": 5}
    config.attention_init = dict(name="users_schemes:no_such_scheme")
    with pytest.raises(InputError, match=r"^config\.attention_init.*no_such_scheme"):
        config_lib.validate(config)


def test_parse_row_takes_one_choice_of_each_column():
    columns = {"data set": ("cifar10", "stl10"), "model": ("small", "large")}
    assert config_lib.parse_row("", columns) == ["cifar10", "small"]
    assert config_lib.parse_row("stl10", columns) == ["stl10", "small"]
    assert config_lib.parse_row("stl10,large", columns) == ["stl10", "large"]
    for row, words in (
        ("mnist", "data set 'mnist'.*cifar10, stl10"),
        ("stl10,tiny", "model 'tiny'.*small, large"),
        ("stl10,", "model ''"),
        ("stl10,small,1", "3 words"),
    ):
        with pytest.raises(InputError, match=words):
            config_lib.parse_row(row, columns)
