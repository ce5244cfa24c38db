import json
import resource

import numpy as np
import pytest
import tensorflow_datasets as tfds
from tfds_sets import write_small_set

from structinit_jax.data.datasets import CATALOG, open_dataset
from structinit_jax.data.source import DatasetInfo, digest
from structinit_jax.errors import InputError


def test_catalog_agrees_with_the_stock_builders(tmp_path):
    def features(name):
        return tfds.builder(name, data_dir=tmp_path).info.features

    for name, info in CATALOG.items():
        if name == "digits":  # not in TFDS
            continue
        found = features(name)
        assert found["image"].shape[-1] == info.channels, name
        assert found["label"].num_classes == info.num_classes, name
    # Models trained on imagenet2012 are evaluated on these.
    for name in ("imagenet_v2", "imagenet_sketch"):
        assert features(name)["label"].names == features("imagenet2012")["label"].names


def test_a_prepared_set_is_read(tmp_path):
    write_small_set(tmp_path)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    dataset = open_dataset("imagenet_sketch", tmp_path)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 10_000)
    assert dataset.info == DatasetInfo(1000, 3, {"test": 2})
    assert len(dataset.class_names) == 1000
    for image, label in dataset.split("test").read([1, 0]):
        pixels = np.broadcast_to(np.uint8([label, 0, 9]), (2, 3, 3))
        np.testing.assert_array_equal(image.decode(), pixels)
    gray, _ = open_dataset("imagenet_sketch", tmp_path, channels=1).split("test")[0]
    assert gray.decode().shape == (2, 3, 1)
    write_small_set(tmp_path / "gray", channels=1)
    assert open_dataset("imagenet_sketch", tmp_path / "gray").info.channels == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cifr10", "did you mean 'cifar10'"),
        ("xyzzy", "did you mean '[^ ]*' or '[^ ]*' or '[^ ]*'\\?$"),  # not all 300
        ("digits:9.9.9", "did you mean 'digits'"),
        ("my images", r"^TFDS cannot open [^\n]* has the name 'folder'$"),
        ("imagenet2012", r"structinit_jax\.prepare --name=imagenet2012 --data_dir="),
    ],
)
def test_sets_that_cannot_be_opened_are_named(tmp_path, name, reason):
    with pytest.raises(InputError, match=reason) as caught:
        open_dataset(name, tmp_path)
    assert f"data set '{name}'" in str(caught.value)


def test_channels_that_a_set_does_not_have_are_refused():
    with pytest.raises(InputError, match=r"^channels=5 must be 1, as in the data set"):
        open_dataset("digits", channels=5)


def test_functions_that_return_no_data_set_are_named():
    with pytest.raises(InputError, match=r"^name='builtins:print' must be a function that"):
        open_dataset("builtins:print")
    with pytest.raises(InputError, match=r"^name=getcwd must be a function of \(data_dir\)"):
        open_dataset("os:getcwd")


def test_damaged_sets_and_those_prepared_as_tfrecord_are_named(tmp_path):
    write_small_set(tmp_path)
    info = tmp_path / "imagenet_sketch" / "1.0.0" / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(InputError, match=rf"tfds convert_format --dataset_version_dir={tmp_path}"):
        open_dataset("imagenet_sketch", tmp_path)
    for path in (info, info.with_name("features.json")):
        text = path.read_text()
        for damaged in ("{", "[]", "[" * 100_000):
            path.write_text(damaged)
            with pytest.raises(InputError, match=rf"open data set 'imagenet_sketch'.*{tmp_path}"):
                open_dataset("imagenet_sketch", tmp_path)
        path.write_text(text)


def test_the_digest_covers_the_images(tmp_path):
    def of_set(folder, blue):
        write_small_set(tmp_path / folder, blue=blue)
        dataset = open_dataset("imagenet_sketch", tmp_path / folder)
        return digest(dataset.split("test"), dataset.class_names)

    assert of_set("here", 9) == of_set("there", 9) != of_set("changed", 10)


@pytest.mark.parametrize("name", ["imagenet_sketch", "not_of_tfds"])
@pytest.mark.parametrize("key", ["pythonClassName", "python_class_name", "type"])
def test_classes_that_a_set_names_are_not_imported(tmp_path, monkeypatch, name, key):
    write_small_set(tmp_path)
    (tmp_path / "imagenet_sketch").rename(tmp_path / name)
    folder = tmp_path / name / "1.0.0"
    info = folder / "dataset_info.json"
    info.write_text(info.read_text().replace("imagenet_sketch", name))
    features = folder / "features.json"
    content = json.loads(features.read_text())
    if key == "type":
        content = {"type": "payload.Text", "content": {}}
    else:
        del content["featuresDict"]["features"]["file_name"]["pythonClassName"]
        content["featuresDict"]["features"]["file_name"][key] = "payload.Text"
    features.write_text(json.dumps(content))
    (tmp_path / "payload.py").write_text("raise KeyboardInterrupt('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"payload\.Text"):
        open_dataset(name, tmp_path)
