import json
from operator import attrgetter

import pytest

from structinit_jax import config as config_lib
from structinit_jax.errors import InputError
from structinit_jax.models import VisionTransformer
from structinit_jax.models.model import Model


def make_config(**fields):
    config = config_lib.base_config()
    config.data.name = "digits"
    for field, value in fields.items():
        config.update_from_flattened_dict({field: value})
    return config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("seed", -1), ("keep_checkpoints", 1), ("num_epochs", 1e300), ("num_steps", 10**12)),
        *(("model.depth", 0), ("data.crop_fraction", 0.0), ("augment.flip", 2.0)),
        *(("augment.crop_scale", (0.08, 1.5)), ("augment.mix_group", 3)),
        *(("augment.rand_augment", "rand-m9-x1"), ("attention_init.filters", b"1")),
        ("cooldown_epochs", 30.0),  # out of 30 epochs
        ("final_learning_rate", 1e-2),  # above the peak
        ("model.image_size", 64),  # it comes from data.image_size
        ("data.mean", (0.5,)),  # for 3 channels
        ("data.std", (0.0, 0.2, 0.2)),
        # On the scale from 0 to 255.
        *(("data.mean", (123.7, 116.3, 103.5)), ("data.std", (58.4, 57.1, 57.4))),
    ],
)
def test_bad_values_are_refused_by_field_and_value(field, value):
    *section, name = field.split(".")
    with pytest.raises(InputError) as caught:
        config_lib.validate(make_config(**{field: value}))
    assert str(caught.value).startswith(".".join(["config", *section]))
    assert f"{name}={value!r} must be " in str(caught.value)


def test_rand_augment_is_for_gray_and_color_images():
    fields = {"data.channels": 4, "data.mean": (0.5,) * 4, "data.std": (0.5,) * 4}
    config_lib.validate(make_config(**fields))
    with pytest.raises(InputError, match=r"^config\.data\.channels=4 must be 1 or 3 for "):
        config_lib.validate(make_config(**fields, **{"augment.rand_augment": "rand-m9"}))


def test_the_first_epoch_of_timms_schedule_needs_a_rate():
    with pytest.raises(InputError, match=r"^config\.warmup_learning_rate=0\.0 must be above 0"):
        config_lib.validate(make_config(schedule="timm_cosine"))
    config_lib.validate(make_config(schedule="timm_cosine", warmup_epochs=0.0))


def test_a_mixer_starts_from_its_default_weights():
    names = [config_lib.base_config(x).attention_init.name for x in ("vit", "mixer")]
    assert names == ["impulse", "default"]


def test_sections_are_neither_added_nor_replaced():
    config = config_lib.base_config()
    config.augmentation = dict(flip=0.5)
    with pytest.raises(InputError, match=r"^config\.augmentation does not exist"):
        config_lib.validate(config)
    config = config_lib.base_config()
    config.data = dict(name="digits")
    with pytest.raises(InputError, match=r"^config\.data\.\w+ is missing: .*update"):
        config_lib.validate(config)
    config.attention_init = None
    with pytest.raises(InputError, match=r"^config\.attention_init=None must be a section"):
        config_lib.validate(config)


@pytest.mark.parametrize(
    "fields",
    [
        {"cooldown_epochs": 30.0, "num_steps": 9},
        {"attention_init.name": "impulse_2025", "start_from": "model.safetensors"},
    ],
)
def test_values_need_not_fit_what_is_not_used(fields):
    config_lib.validate(make_config(**fields))


@pytest.mark.parametrize("options", [dict(kernel_size=4), dict(target_mass=1.0), dict(norm=1.0)])
def test_mistaken_options_of_a_scheme_name_the_section(options):
    config = make_config()
    config.attention_init = dict(name="impulse") | options
    with pytest.raises(InputError, match=rf"^config\.attention_init: .*{next(iter(options))}"):
        config_lib.make_attention_init(config)


@pytest.mark.parametrize(
    "former",
    [{"name": "impulse"}, {"name": "kaiming_uniform"}, {}],  # the second no longer exists
)
def test_a_new_scheme_keeps_the_options_that_it_takes(former, capsys):
    config = make_config()
    config.attention_init = dict(former, kernel_size=5, dilation=2, norm=1.0)
    config_lib.set_field(config.lock(), "attention_init.name", "impulse_2024")
    assert config.attention_init.to_dict() == dict(name="impulse_2024", kernel_size=5)
    assert "'impulse_2024' does not use dilation\n" in capsys.readouterr().out


def my_scheme(strength=1.0):
    return lambda rng, site: strength


class Required(Model):
    """A custom model with a required argument, and others of any type."""

    def __init__(self, *, channels, num_classes, depth=2, sizes=(1,), options=None, rngs): ...


class Extended(VisionTransformer):
    """A custom model with a field that its family does not have."""

    @classmethod
    def default_config(cls):
        return super().default_config() | {"extra": 3}


def test_a_model_of_the_users_own_may_add_fields_to_a_family():
    config_lib.validate(config_lib.base_config(f"{__name__}:Extended"))
    with pytest.raises(InputError, match=r"^config\.model\.num_classes=None"):
        config_lib.validate(config_lib.base_config(f"{__name__}:Required"))


def test_a_scheme_of_the_users_own_needs_no_edit_in_the_package():
    config = make_config()
    config_lib.set_scheme(config, f"{__name__}:my_scheme")
    config_lib.set_field(config, "attention_init.strength", "2.0")
    assert config_lib.make_attention_init(config)(None, None) == 2.0
    config.attention_init.weight = 2.0
    with pytest.raises(InputError, match=r"^config\.attention_init: .*'weight'.* \(rng, site\)"):
        config_lib.make_attention_init(config)
    with pytest.raises(InputError, match=r"^config\.attention_init.*no_such_scheme"):
        config_lib.set_scheme(config, f"{__name__}:no_such_scheme")


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("seed", "3", 3),
        ("learning_rate", "1", 1.0),
        ("data.drop_remainder", "true", True),
        ("data.name", "3", "3"),
        ("data.std", "0.3", (0.3,)),
        ("data.mean", "(0.3, 0.4, 0.5)", (0.3, 0.4, 0.5)),
        ("attention_init.target_mass", "0.9", 0.9),  # an option that the config does not set
    ],
)
def test_fields_are_set_from_text(path, text, value):
    config = config_lib.base_config().lock()
    config_lib.set_field(config, path, text)
    found = attrgetter(path)(config)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("path", "text", "word"),
    [
        ("seed", "1.5", "int"),
        ("learning_rate", "1e-3.5", "float"),
        ("data.drop_remainder", "maybe", "bool"),
        ("attention_init.kernel", "5", "'attention_init.kernel_size'"),
        ("attention_init.target_mass", "abc", "float"),
        ("augment.flip", "True", "float"),
    ],
)
def test_other_text_and_fields_are_refused(path, text, word):
    with pytest.raises(InputError, match=rf"^config\.{path}.* {word}"):
        config_lib.set_field(config_lib.base_config(), path, text)


BASE = "from structinit_jax.config import base_config\n"
FILE = f"""{BASE}
from typing import Literal

def get_config(dataset: Literal["cifar10", "stl10"] = "cifar10", depth: Literal["6", "12"] = "6"):
    config = base_config()
    config.data.name = dataset
    config.model.depth = int(depth)
    return config
"""


def test_the_row_after_the_colon_gives_the_arguments_of_get_config(tmp_path):
    folder = tmp_path / "2026-11-25T12:30"  # also has colons
    folder.mkdir()
    file = folder / "c.py"
    file.write_text(FILE)
    rows = {"": ("cifar10", 6), ":stl10": ("stl10", 6), ":stl10,12": ("stl10", 12)}
    for row, expected in rows.items():
        config = config_lib.load_config(f"{file}{row}")
        assert (config.data.name, config.model.depth) == expected
    for row in ("mnist", "stl10,7", "stl10,6,1"):
        with pytest.raises(InputError, match=f":{row}"):
            config_lib.load_config(f"{file}:{row}")
    with pytest.raises(InputError, match=r"d\.py' must be an existing Python file"):
        config_lib.load_config(folder / "d.py")
    file.write_text(FILE.replace(': Literal["cifar10", "stl10"]', ""))
    assert config_lib.load_config(f"{file}:mnist").data.name == "mnist"
    file.write_text(f"{BASE}def get_config(*words): return base_config(*words)")
    assert config_lib.load_config(f"{file}:swin").model.name == "swin"
    file.write_text("def get_config(): ...")
    with pytest.raises(InputError, match="takes no row"):
        config_lib.load_config(f"{file}:stl10")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_config(row): ...", r"=.*c\.py: missing .* 'row': a row is row"),
        ("def get_config(): ...", r"=.* get_config\(\)=None must be a ConfigDict"),
        ("", "=.* get_config=None must be a function"),
        ("import functools; get_config = functools.partial(base_config)", "=.* must be a function"),
        ("a = (", r"=.*c\.py: SyntaxError: .*line 2"),
        ("def get_config():\n    base_config().agument.flip = 0.5", r'=.*c\.py:3: .*"augment"'),
        ("def get_config():\n    base_config().seed = 'a'", r"=.*c\.py:3: TypeError: "),
    ],
)
def test_what_is_no_config_file_is_described(tmp_path, text, message):
    (tmp_path / "c.py").write_text(BASE + text)
    with pytest.raises(InputError, match=f"^config{message}"):
        config_lib.load_config(tmp_path / "c.py")


def test_a_run_of_an_earlier_version_is_read_without_the_fields_that_are_gone(tmp_path, capsys):
    config = make_config(seed=3)
    config.attention_init.sizes = (1, 2)  # for a custom scheme
    model = config.model.to_dict() | {"dropout": 0.0}
    old = config.to_dict() | {"num_workers\x1b": 8, "model": model}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert config_lib.load_run_config(tmp_path).to_dict() == config.to_dict()
    assert r"model.dropout=0.0, num_workers\x1b=8" in capsys.readouterr().out


def test_required_arguments_of_a_model_of_the_users_own_are_read(tmp_path, capsys):
    config = config_lib.base_config(f"{__name__}:Required")
    config.model.update(num_classes=3, depth=5, sizes=((2, 3), (4,)), options={"scales": (0.5, 1)})
    (tmp_path / "config.json").write_text(config.to_json())
    read = config_lib.load_run_config(tmp_path, trust=True)
    assert read.model.to_dict() == config.model.to_dict()
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        '{"architecture": "vit_tiny"}',
        '{"model": {"name": "vit"}}',
        '{"model": {"name": "evil:X"}, "model.name": "vit"}',  # its flattened form hides a module
        '{"model": {"name": "vit", "width": "x"}, "attention_init": {"name": "impulse"}}',
        '{"model": {"name": "vit"}, "attention_init": {"name": "impulse"}, "loss": ["os:system"]}',
    ],
)
def test_another_config_json_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json cannot be used(.|\n)* --config "):
        config_lib.load_run_config(tmp_path)


@pytest.mark.parametrize(
    "field", ["model.name", "data.name", "attention_init.name", "loss", "optimizer"]
)
def test_modules_that_a_workdir_names_need_consent(tmp_path, field, monkeypatch):
    (tmp_path / "strangers.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    config = make_config(**{field: "strangers:thing"})
    (tmp_path / "config.json").write_text(config.to_json())
    with pytest.raises(InputError, match=rf"{field}='strangers:thing'.*--trust_workdir"):
        config_lib.load_run_config(tmp_path)
    if field == "model.name":  # the only one imported immediately
        with pytest.raises(AssertionError, match="imported"):
            config_lib.load_run_config(tmp_path, trust=True)
    else:
        config_lib.validate(config_lib.load_run_config(tmp_path, trust=True))
