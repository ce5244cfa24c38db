import pytest

from structinit_jax import config as config_lib
from structinit_jax.errors import InputError


def changed(field, value):
    config = config_lib.base_config()
    config.data.name = "digits"
    config.update_from_flattened_dict({field: value})
    return config


def test_base_config_needs_nothing_but_a_data_set():
    config_lib.validate(changed("seed", 1))
    with pytest.raises(InputError, match=r"config\.data\.name=''"):
        config_lib.validate(config_lib.base_config())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0),
        ("batch_size", -8),
        ("num_epochs", 0.0),
        ("num_epochs", -1.0),
        ("num_steps", -5),
        ("learning_rate", 0.0),
        ("weight_decay", -0.1),
        ("warmup_epochs", -1.0),
        ("clip_norm", -1.0),
        ("label_smoothing", 1.0),
        ("log_every_steps", 0),
        ("eval_every_epochs", 0.0),
        ("checkpoint_every_steps", 0),
        ("keep_checkpoints", 0),
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
        ("data.std", (0.0, 0.2, 0.2)),
        ("attention_init.kernel_size", 2),
        ("attention_init.name", "impulze"),
    ],
)
def test_bad_values_are_refused_by_field_and_value(field, value):
    with pytest.raises(InputError) as caught:
        config_lib.validate(changed(field, value))
    message = str(caught.value)
    assert field in message
    assert repr(value) in message


def test_options_of_other_schemes_are_dropped_and_told():
    config = changed("attention_init.name", "mimetic")
    assert config_lib.drop_foreign_options(config) == ["kernel_size"]
    assert config.attention_init.to_dict() == {"name": "mimetic"}
    config_lib.validate(config)


def test_options_that_no_scheme_knows_stay_and_are_refused():
    config = changed("seed", 0)
    config.attention_init = dict(name="impulse", kernel_sise=3)
    assert config_lib.drop_foreign_options(config) == []
    with pytest.raises(InputError, match=r"attention_init\.kernel_sise.*did you mean 'kernel_s"):
        config_lib.validate(config)
