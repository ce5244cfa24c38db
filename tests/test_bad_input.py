"""Bad flags, fields and files, given to the public command: an error names them, exit code 2."""

import fork_main
import pytest

from structinit_jax import command_line
from structinit_jax.config import base_config
from structinit_jax.errors import InputError

CONFIG = "--config=configs/vit_t_digits.py"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.model.widht=5"], "config.model.widht did you mean 'model.width'"),
        (["--config.attention_init.kernel=5"], "'attention_init.kernel_size'"),
        (["--wrokdir=x"], "'wrokdir' Did you mean: workdir --config.FIELD=VALUE"),
        (["train"], "unrecognized argument 'train'"),
        (["--config.batch_size=many"], "config.batch_size=many int"),
        (["--config.loss=hinge"], "config.loss='hinge'"),
        (["--mode=eval"], "no complete checkpoint"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_command_names_what_is_wrong(tmp_path, data_dir, arguments, words):
    common = [CONFIG, f"--workdir={tmp_path}/run", f"--config.data.data_dir={data_dir}"]
    result = fork_main.run(*common, *arguments, timeout=60)
    assert result.returncode == 2, result.stderr
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert not [word for word in words.split() if word not in message], message
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("seed", "3", 3),
        ("learning_rate", "1", 1.0),
        ("model.qk_norm", "true", True),
        ("data.name", "3", "3"),
        ("data.std", "0.3", (0.3,)),
        ("data.mean", "(0.3, 0.4, 0.5)", (0.3, 0.4, 0.5)),
        ("attention_init.target_mass", "0.9", 0.9),  # an option that the config does not set
    ],
)
def test_fields_are_set_from_text(path, text, value):
    config = base_config().lock()
    command_line.set_field(config, path, text)
    node = config.to_dict()
    for name in path.split("."):
        node = node[name]
    assert node == value
    assert type(node) is type(value)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("seed", "1.5"),
        ("learning_rate", "1e-3.5"),
        ("model.qk_norm", "maybe"),
        ("data.mean", "(0.5"),
    ],
)
def test_text_of_another_type_is_refused(path, text):
    with pytest.raises(InputError) as caught:
        command_line.set_field(base_config(), path, text)
    assert str(caught.value).startswith(f"config.{path}={text} must be of type ")
