import json

import pytest

from structinit_jax.config import base_config
from structinit_jax.errors import InputError
from structinit_jax.training import resume

PLACE = "step 400 in /runs/digits"
DIGEST = "c0ffee"


def make_config(**fields):
    config = base_config()
    config.data.name = "digits"
    for field, value in fields.items():
        config.update_from_flattened_dict({field: value})
    return config


def saved(**fields):
    """The JSON object of a checkpoint."""
    return {"config": json.loads(make_config(**fields).to_json()), "data_digest": DIGEST}


def test_fields_that_may_change_are_listed():
    fields = {"num_epochs": 90.0, "loss": "m:f", "model.remat": "full", "data.data_dir": "/moved"}
    assert resume.check_run(saved(), make_config(**fields), DIGEST, PLACE).splitlines() == [
        "  data.data_dir: '' -> '/moved'",
        "  loss: 'softmax_cross_entropy' -> 'm:f'",
        "  model.remat: 'none' -> 'full'",
        "  num_epochs: 30.0 -> 90.0",
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 1),
        ("data.train_split", "test"),
        ("model.depth", 6),
        ("start_from", "b.safetensors"),
        ("batch_size", 256),
        ("optimizer", "optax:lion"),
        ("data.repeats", 3),
        ("data.mean", (0.5,) * 3),
        ("attention_init.name", "mimetic"),
        ("attention_init.target_mass", 0.5),
    ],
)
def test_fields_that_must_not_change_are_refused_by_name(field, value):
    config = make_config(**{field: value, "learning_rate": 0.5})
    with pytest.raises(InputError, match=f"{PLACE}:\n  {field}: .* -> .*\n") as caught:
        resume.check_run(saved(), config, DIGEST, PLACE)
    assert "learning_rate" not in str(caught.value)


def test_fields_of_another_version_do_not_count():
    run = saved()
    del run["config"]["clip_norm"], run["config"]["model"]["layer_scale"]
    run["config"] |= {"gone": 1, "section": {"a": 3}}
    assert resume.check_run(run, make_config(), DIGEST, PLACE) == ""
    run["config"]["attention_init"]["gone"] = 1
    with pytest.raises(InputError, match=r"attention_init\.gone: 1 -> None"):
        resume.check_run(run, make_config(), DIGEST, PLACE)


def my_scheme(kernel_size=3):
    return lambda rng, site: kernel_size


@pytest.mark.parametrize("name", ["impulse", f"{__name__}:my_scheme"])
def test_an_option_of_the_scheme_that_is_not_set_has_its_default(name):
    default = {"attention_init.name": name}
    given = default | {"attention_init.kernel_size": 3}
    for old, new in ((default, given), (given, default)):
        assert resume.check_run(saved(**old), make_config(**new), DIGEST, PLACE) == ""


def test_other_data_are_refused():
    assert resume.check_run(saved(), make_config(), DIGEST, PLACE) == ""
    with pytest.raises(InputError, match=r"train_split='train' does not hold .* step 400 in"):
        resume.check_run(saved(), make_config(), "decaf", PLACE)
