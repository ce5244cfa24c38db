"""Settings of a comparison, from flags to configs."""

import pytest

from structinit_jax import command_line
from structinit_jax.compare import grid
from structinit_jax.errors import InputError

pytestmark = pytest.mark.usefixtures("library_promotion")


def test_settings_have_readable_names_and_what_their_scheme_needs(tiny_config, capsys):
    axes = grid.parse_axes(["config.model.depth=1,2", "config.attention_init.norm=0.5"])
    schemes = ["default", "kaiming_uniform", "impulse_2025", "impulse"]
    settings = grid.expand(tiny_config.lock(), schemes, axes)
    assert list(settings) == [
        *("default,model.depth=1", "default,model.depth=2"),
        *("kaiming_uniform,model.depth=1", "kaiming_uniform,model.depth=2"),
        *("impulse_2025,model.depth=1", "impulse_2025,model.depth=2"),
        *(f"impulse,attention_init.norm=0.5,model.depth={depth}" for depth in (1, 2)),
    ]
    assert settings["default,model.depth=2"].model.depth == 2
    assert settings["kaiming_uniform,model.depth=1"].model.base_init == "pytorch"
    assert settings["impulse_2025,model.depth=1"].model.positions == "learned"
    assert settings["impulse,attention_init.norm=0.5,model.depth=1"].attention_init.norm == 0.5
    assert tiny_config.model.positions == "sincos"
    out = capsys.readouterr().out
    assert "impulse_2025 uses config.model.positions='learned'" in out
    assert "note: default has no attention_init.norm and does not use it" in out
    baselines = grid.find_baselines(settings, "default")
    assert baselines["impulse,attention_init.norm=0.5,model.depth=2"] == "default,model.depth=2"
    assert baselines["default,model.depth=1"] == "default,model.depth=1"
    # An option that the others do not have does not hide the baseline.
    baselines = grid.find_baselines(settings, "impulse")
    assert baselines["default,model.depth=2"] == "impulse,attention_init.norm=0.5,model.depth=2"


def test_another_scheme_keeps_the_options_that_it_takes(tiny_config):
    tiny_config.attention_init.update(name="impulse", kernel_size=5)
    config = grid.with_scheme(tiny_config.lock(), "impulse_2025")
    assert config.attention_init.to_dict() == {"name": "impulse_2025", "kernel_size": 5}
    assert config.model.positions == "learned"
    assert grid.with_scheme(config, "default").attention_init.to_dict() == {"name": "default"}


def test_a_setting_is_never_compared_with_one_of_other_fields():
    names = ["default", "default,model.depth=1", "mine_scheme,model.depth=1", "x,model.depth=2"]
    assert grid.find_baselines(names, "mine:scheme") == {
        "default": None,
        "default,model.depth=1": "mine_scheme,model.depth=1",
        "mine_scheme,model.depth=1": "mine_scheme,model.depth=1",
        "x,model.depth=2": None,
    }
    names = [*(f"impulse{option}" for option in (",attention_init.norm=1", "")), "default"]
    baselines = grid.find_baselines(names, "impulse")
    assert baselines == dict(zip(names, [*names[:2], names[1]], strict=True))


def test_settings_of_one_scheme_are_compared_with_the_first():
    names = [f"impulse,learning_rate={rate}" for rate in (0.001, 0.003)]
    assert grid.find_baselines(names, "impulse") == dict.fromkeys(names, names[0])


def test_a_setting_has_one_name_however_it_is_written(tiny_config):
    def names(*axes):
        return [*grid.expand(tiny_config.lock(), ["impulse"], grid.parse_axes(axes))]

    first, same = [
        ("config.learning_rate=0.001,0.002", "config.model.qk_norm=true"),
        ("config.model.qk_norm=True", "config.learning_rate=1e-3,2e-3"),
    ]
    wanted = [f"impulse,learning_rate={rate},model.qk_norm=true" for rate in (0.001, 0.002)]
    assert names(*first) == names(*same) == wanted
    assert names("config.num_epochs=1.0") == names("config.num_epochs=1")
    assert names("config.num_epochs=1") == ["impulse,num_epochs=1"]
    assert names("config.data.mean=(0.1, 0.2)") == names("config.data.mean=(0.1,0.2)")


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("config.model.dpth=1", r"--grid\.config\.model\.dpth: .*did you mean 'model.depth'"),
        ("config.model.depth=x", r"--grid\.config\.model\.depth=x must be of type int"),
        ("config.model.depth=1,1", r"--grid\.config\.model\.depth=1,1: 1 and 1 are the same"),
        ("config.learning_rate=1e-3,0.001", r"1e-3 and 0\.001 are the same value"),
        (
            "config.attention_init.nrm=1",
            r"--grid\.config\.attention_init\.nrm: none of --schemes=impulse .* mean 'norm'",
        ),
        (
            "config.attention_init.taps=1",
            r"none of --schemes=impulse has the option 'taps'; .*they have .*target_mass",
        ),
        ("config.seed=1,2", r"use --seeds=N"),
        ("config.attention_init.name=default", r"use --schemes"),
        ("config.attention_init={'norm': 1}", r"use --schemes=A,B and --grid\.config\.attention_i"),
        (
            "config.data.train_split=train[:100],train(:100)",
            r"train\[:100\] and train\(:100\) would both be named data\.train_split=train__100_:",
        ),
        (
            f"config.data.data_dir=/{'d' * 190}",
            r"--grid\.config\.data\.data_dir.*: the setting's name impulse,.* has 2.. bytes",
        ),
        ("model.depth=1", r"must name a field and its values"),
    ],
)
def test_mistaken_axes_are_refused(tiny_config, axis, message):
    for axes in ([axis], ["config.attention_init.norm=1,2", axis]):
        with pytest.raises(InputError, match=message):
            grid.expand(tiny_config.lock(), ["impulse"], grid.parse_axes(axes))


def test_what_is_given_twice_and_unknown_schemes_are_refused():
    with pytest.raises(InputError, match="--schemes=default,impulse,default: a scheme appears"):
        command_line.check_schemes(["default", "impulse", "default"])
    with pytest.raises(InputError, match=r"did you mean 'impulse'"):
        command_line.check_schemes(["default", "impuls"])
    with pytest.raises(InputError, match=r"model\.depth is given twice: .*\.depth=1,2$"):
        grid.parse_axes(["config.model.depth=1", "config.model.depth=2"])


def test_values_may_have_brackets_and_names_are_safe_for_files(tiny_config):
    axes = grid.parse_axes(["config.data.mean=(0.1,),(0.2,)", "config.data.train_split=train[:64]"])
    assert axes["data.mean"] == ["(0.1,)", "(0.2,)"]
    nested = grid.parse_axes(["config.attention_init={'filters': ((1, 2), 3)},{'norm': 1}"])
    assert nested["attention_init"] == ["{'filters': ((1, 2), 3)}", "{'norm': 1}"]
    names = list(grid.expand(tiny_config.lock(), ["default"], axes))
    assert names[0] == "default,data.mean=_0.1__,data.train_split=train__64_"


def test_the_command_of_a_setting_gives_its_config(tmp_path):
    location = "configs/vit_t_digits.py"
    config = grid.command_line.load_config(location).lock()
    axes = {"model.num_heads": ["2"], "attention_init.norm": ["0.5"]}
    (setting,) = grid.expand(config, ["impulse"], axes).values()
    words = grid.command(setting, location)
    again = grid.command_line.load_config(location)
    for word in words[4:]:
        grid.command_line.set_field(again, *word.removeprefix("--config.").split("=", 1))
    assert again.to_dict() == setting.to_dict()
