"""Settings of a comparison, from flags to configs."""

import pytest

from structinit_jax.compare import train_grid
from structinit_jax.errors import InputError

pytestmark = pytest.mark.usefixtures("library_promotion")


def test_settings_have_readable_names_and_what_their_scheme_needs(tiny_config, capsys):
    axes = train_grid.parse_axes(["model.depth=1,2", "attention_init.dilation=2"])
    schemes = ["default", "impulse_2025", "impulse"]
    settings = train_grid.expand(tiny_config.lock(), schemes, axes)
    assert list(settings) == [
        *("default,model.depth=1", "default,model.depth=2"),
        *("impulse_2025,model.depth=1", "impulse_2025,model.depth=2"),
        *(f"impulse,attention_init.dilation=2,model.depth={depth}" for depth in (1, 2)),
    ]
    assert settings["default,model.depth=2"].model.depth == 2
    assert settings["impulse_2025,model.depth=1"].model.positions == "learned"
    assert settings["impulse,attention_init.dilation=2,model.depth=1"].attention_init.dilation == 2
    assert tiny_config.model.positions == "sincos"
    assert "impulse_2025 needs config.model.positions='learned'" in capsys.readouterr().out
    baselines = train_grid.find_baselines(settings)
    assert baselines["impulse,attention_init.dilation=2,model.depth=2"] == "default,model.depth=2"
    assert baselines["default,model.depth=1"] == "default,model.depth=1"


def test_a_setting_is_never_compared_with_one_of_other_fields():
    names = ["mine,model.depth=1", "default", "default,model.depth=1", "x,model.depth=2"]
    assert train_grid.find_baselines(names) == {
        "mine,model.depth=1": "mine,model.depth=1",
        "default": None,
        "default,model.depth=1": "mine,model.depth=1",
        "x,model.depth=2": None,
    }
    # Options of the scheme do not matter, nor does anything if there is one scheme.
    names = [*(f"impulse{option}" for option in (",attention_init.norm=1", "")), "default"]
    assert train_grid.find_baselines(names) == dict.fromkeys(names, names[0])
    names = [f"impulse,learning_rate={rate}" for rate in (0.001, 0.003)]
    assert train_grid.find_baselines(names) == dict.fromkeys(names, names[0])


def test_a_setting_has_one_name_however_it_is_written(tiny_config):
    def names(*axes):
        return [*train_grid.expand(tiny_config.lock(), ["impulse"], train_grid.parse_axes(axes))]

    first = names("learning_rate=0.001,0.002", "config.data.drop_remainder=true")
    assert first == names("data.drop_remainder=True", "learning_rate=1e-3,2e-3")
    assert first == [f"impulse,data.drop_remainder=True,learning_rate={r}" for r in (0.001, 0.002)]
    # Characters with a meaning in paths are replaced.
    assert names("data.train_split=train[:64]") == ["impulse,data.train_split=train__64_"]


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("model.depth=x", r"config\.model\.depth=x must be of type int"),
        ("learning_rate=1e-3,0.001", r"learning_rate=0\.001 twice"),
        ("attention_init.nrm=1", r"--grid=attention_init\.nrm"),
        ("seed=1,2", "use --seeds=N"),
        ("model.depth", "model.num_heads=3,6"),
        ("model.depth=1 model.depth=2", r"--grid=model\.depth is given twice"),
    ],
)
def test_mistaken_axes_are_refused(tiny_config, axis, message):
    with pytest.raises(InputError, match=message):
        train_grid.expand(tiny_config.lock(), ["impulse"], train_grid.parse_axes(axis.split()))


def test_weights_that_replace_the_schemes_leave_nothing_to_compare(tiny_config):
    tiny_config.start_from = "model.safetensors"
    assert list(train_grid.expand(tiny_config.lock(), ["impulse"], {})) == ["impulse"]
    for schemes, axes in (
        (["impulse", "default"], {}),
        (["impulse"], {"attention_init.norm": "1"}),
    ):
        with pytest.raises(InputError, match=r"^config.start_from replaces"):
            train_grid.expand(tiny_config, schemes, axes)


def test_commas_within_brackets_do_not_separate_values():
    assert train_grid.parse_axes(["data.mean=(0.1,),(0.2,)"])["data.mean"] == ["(0.1,)", "(0.2,)"]
