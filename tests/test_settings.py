import csv

import pytest

from structinit_jax.compare import grid, settings
from structinit_jax.errors import InputError

pytestmark = pytest.mark.usefixtures("library_promotion")
with open(settings.PAPERS) as file:
    TABLES = list(dict.fromkeys(row["table"] for row in csv.DictReader(file)))


def find_baselines(configs):
    return settings.find_baselines({name: config.to_dict() for name, config in configs.items()})


def test_settings_have_readable_names_and_the_options_of_their_scheme(tiny_config):
    axes = settings.parse_axes(["model.depth=1,2", "attention_init.dilation=2"])
    schemes = ["default", "mimetic", "impulse"]
    configs = settings.expand(tiny_config.lock(), schemes, axes)
    assert list(configs) == [
        *("default,model.depth=1", "default,model.depth=2"),
        *("mimetic,model.depth=1", "mimetic,model.depth=2"),
        *(f"impulse,attention_init.dilation=2,model.depth={depth}" for depth in (1, 2)),
    ]
    assert configs["default,model.depth=2"].model.depth == 2
    assert configs["impulse,attention_init.dilation=2,model.depth=1"].attention_init.dilation == 2
    # A baseline has the same depth.
    expected = {name: f"default,model.depth={name[-1]}" for name in configs}
    assert find_baselines(configs) == expected


def test_a_setting_is_never_compared_with_one_of_other_fields(tiny_config):
    def baselines(**fields):
        configs = {}
        for name, (scheme, depth) in fields.items():
            configs[name] = tiny_config.copy_and_resolve_references()
            configs[name].attention_init.name = scheme
            configs[name].model.depth = depth
        return find_baselines(configs)

    found = baselines(a=("default", 1), b=("default", 2), c=("impulse", 2), d=("impulse", 3))
    assert found == dict(a="a", b="b", c="b", d=None)
    # The first of several with the same scheme and fields.
    assert set(baselines(a=("default", 1), b=("default", 1), c=("impulse", 1)).values()) == {"a"}
    # Options that both schemes have are the same, if possible.
    axes = {"attention_init.value_scale": ["0.5", "2.0"]}
    for schemes, scale in ((["default", "mimetic"], "2.0"), (["default", "impulse"], "0.5")):
        found = find_baselines(settings.expand(tiny_config, schemes, axes))
        assert list(found.values())[-1] == f"default,attention_init.value_scale={scale}"
    # With a single scheme, no field has to agree.
    assert baselines(a=("default", 1), b=("default", 2)) == dict(a="a", b="a")


def test_a_setting_has_one_name_however_it_is_written(tiny_config):
    def names(*axes):
        return [*settings.expand(tiny_config.lock(), ["impulse"], settings.parse_axes(axes))]

    first = names("learning_rate=0.001,0.002", "config.data.drop_remainder=true")
    assert first == names("data.drop_remainder=True", "learning_rate=1e-3", "learning_rate=2e-3")
    assert first == [f"impulse,data.drop_remainder=True,learning_rate={r}" for r in (0.001, 0.002)]
    # Characters with a special meaning in paths are replaced.
    assert names("data.train_split=train[:64]") == ["impulse,data.train_split=train__64_"]
    with pytest.raises(InputError, match=r"the name 'impulse,data\.train_split=train__64_'"):
        names("data.train_split=train[:64]", "data.train_split=train{:64}")
    # Commas within brackets do not separate values.
    axes = settings.parse_axes(["data.mean=(0.1,),(0.2,)"])
    assert axes == {"data.mean": ["(0.1,)", "(0.2,)"]}


@pytest.mark.parametrize(
    "axis",
    [
        *("model.depth=x", "attention_init.nrm=1", "depth=1", "model.depth"),
        *("seed=1,2", "attention_init.name=default"),
        f"data.data_dir={'x' * 250}",  # a setting's name is that of its folder
    ],
)
def test_mistaken_axes_are_refused(tiny_config, axis):
    with pytest.raises(InputError, match=axis.partition("=")[0]):
        settings.expand(tiny_config.lock(), ["impulse"], settings.parse_axes([axis]))


def test_weights_that_replace_the_schemes_leave_nothing_to_compare(tiny_config):
    tiny_config.start_from = "model.safetensors"
    assert list(settings.expand(tiny_config.lock(), ["impulse"], {})) == ["selected_weights"]
    for start_from, schemes, axes in (
        ("a", ["impulse", "default"], {}),
        ("a", ["impulse"], {"attention_init.dilation": "2"}),
        ("", ["impulse", "default"], {"start_from": ["a", "b"]}),
    ):
        tiny_config.start_from = start_from
        with pytest.raises(InputError, match=r"^config.start_from"):
            settings.expand(tiny_config, schemes, axes)


@pytest.mark.parametrize("name", TABLES)
def test_every_row_has_a_config_and_a_baseline(name):
    rows = settings.read_table(name)
    assert set(settings.configs_of(rows, [])) == set(rows)
    assert {row["baseline"] for row in rows.values()} <= rows.keys()


def test_the_options_of_a_scheme_may_stand_before_its_name():
    rows = settings.read_table("2024.2")
    assert rows["cifar100,mimetic"]["baseline"] == "cifar100,truncated_normal"
    assert rows["cifar100,mimetic"]["published"] == "70.40"
    fields = [("attention_init.target_mass", "0.3"), ("attention_init.name", "impulse")]
    for config in settings.configs_of(rows, fields).values():
        assert config.attention_init.target_mass == 0.3
    row = {"config": "configs/vit_t_digits.py", "fields": "model.depth=3 model.width=96"}
    model = settings.configs_of({"a": row}, [("model.depth", "5")])["a"].model
    assert (model.depth, model.width) == (5, 96)  # the command line takes precedence


def test_tables_and_rows_that_do_not_exist_are_named(tmp_path, monkeypatch):
    for message, *arguments in (
        (r"--table=2024\.9", "2024.9"),
        ("--rows='mimetc' .* 'mimetic'", "2024.2", ["cifar100", "mimetc"]),
        ("--rows='mimetic,cifar100,3'", "2024.2", ["mimetic", "cifar100", "3"]),
    ):
        with pytest.raises(InputError, match=message):
            settings.read_table(*arguments)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"--table='2024.2' must be given in a clone"):
        settings.read_table("2024.2")


def test_a_setting_that_cannot_be_trained_is_refused_before_the_first_run(tiny_config, tmp_path):
    for fields, message in (
        (dict(loss="hinge"), r"config\.loss="),
        (dict(model=dict(num_heads=3)), ".*num_heads"),
        (dict(attention_init=dict(name="impulse_2025")), r"config\.model\.positions='sincos'"),
    ):
        tiny_config.update(fields)
        with pytest.raises(InputError, match=f"^setting x: {message}"):
            grid.run_grid({"x": tiny_config}, [0], tmp_path)
