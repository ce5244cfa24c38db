import json
import shutil
import struct

import numpy as np
import pytest
from array_record.python import array_record_module
from PIL import Image

from structinit_jax.data import prepare
from structinit_jax.data.datasets import Dataset, open_dataset
from structinit_jax.errors import InputError


def write_tfrecord(path, records):
    with path.open("wb") as file:
        for record in records:
            file.write(struct.pack("<QI", len(record), 0) + record + b"\0\0\0\0")


@pytest.fixture
def tfrecord_dir(tmp_path, data_dir):
    """Digits as TFDS would have prepared them in its default format."""
    shutil.copytree(f"{data_dir}/digits", tmp_path / "digits")
    folder = tmp_path / "digits" / "1.0.0"
    for path in folder.glob("*.array_record-*"):
        reader = array_record_module.ArrayRecordReader(str(path))
        records = [reader.read([number])[0] for number in range(reader.num_records())]
        write_tfrecord(path.with_name(path.name.replace("array_record", "tfrecord")), records)
        path.unlink()
    info = folder / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    return tmp_path


def test_digits_are_reported(data_dir, capsys, tmp_path):
    sheet = tmp_path / "sheet.png"
    prepare.main(["--name=digits", f"--data_dir={data_dir}", f"--samples={sheet}", "--check=0"])
    said = capsys.readouterr().out
    counts = np.bincount(open_dataset("digits", data_dir).split("train").labels())
    assert "digits: 10 classes (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), 1 channels" in said
    assert "train: 1,438 examples; checked all" in said
    assert f"train: 10 of 10 classes, {counts.min()} to {counts.max()} examples of each" in said
    assert "train: 8 to 8 pixels high, 8 to 8 wide" in said
    assert "test: 359 examples" in said
    with Image.open(sheet) as image:
        assert image.size == (8 * 116 + 4, 6 * 132 + 4)
        assert np.asarray(image).std() > 20


def test_folder_report_names_bad_images_and_draws_the_others(tmp_path, capsys):
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(3):
                image = Image.new("RGB", (20 + number, 10), "red")
                image.save(tmp_path / split / name / f"{number}.png")
    (tmp_path / "train" / "dog" / "1.png").write_bytes(b"nothing")
    sheet = tmp_path / "sheet.png"
    prepare.main(["--name=folder", f"--data_dir={tmp_path}", f"--samples={sheet}"])
    said = capsys.readouterr().out
    assert "folder: 2 classes (cat, dog), 3 channels" in said
    assert "train: 6 examples" in said
    assert "train: 2 of 2 classes, 2 to 3 examples of each" in said
    assert "val: 10 to 10 pixels high, 20 to 22 wide" in said
    assert said.count("bad: ") == 1
    assert "dog/1.png" in said
    with Image.open(sheet) as image:  # five tiles
        pixels = np.asarray(image)[prepare.MARGIN + prepare.TILE // 2 :: prepare.TILE]
        reds = pixels[0, prepare.MARGIN + prepare.TILE // 2 :: prepare.TILE + prepare.MARGIN]
    assert [tuple(red) == (255, 0, 0) for red in reds] == [True] * 5 + [False] * 3
    for name in ("cat", "dog"):
        for path in (tmp_path / "train" / name).iterdir():
            path.write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"--samples: none of 6 evenly spaced images"):
        prepare.main(["--name=folder", f"--data_dir={tmp_path}", f"--samples={sheet}"])


def test_pixels_of_tiny_images_are_drawn_as_squares():
    image = np.random.default_rng(0).integers(0, 256, (8, 10, 1), np.uint8)
    sheet = np.asarray(prepare.draw_tiles([image], ["an image"]))
    size = prepare.TILE // 8
    drawn = sheet[prepare.MARGIN :, prepare.MARGIN :, 0][size // 2 :: size, size // 2 :: size]
    np.testing.assert_array_equal(drawn[:8, :8], image[:, 1:-1, 0])


def test_captions_may_have_accents():
    image = np.zeros((8, 8, 3), np.uint8)
    names = ["grün", "grűn", "зелёный", "zielony żółty z kropkami"]
    sheets = [prepare.draw_tiles([image], [name]) for name in names]
    assert len({sheet.tobytes() for sheet in sheets}) == len(names)  # no two have the same boxes
    pixels = np.asarray(sheets[-1])[:, prepare.MARGIN + prepare.TILE :]
    assert np.all(pixels[:, : prepare.MARGIN] == 255)  # shortened


def test_splits_without_labels_are_described():
    records = [{"image": np.zeros((4, 6, 3), np.uint8), "label": -1}] * 3
    dataset = Dataset.from_records("unlabeled", {"test": records}, ["a", "b"])
    assert prepare.describe_split(dataset.split("test"), 2, 0) == [
        "3 examples; checked all",
        "0 of 2 classes, 0 to 0 examples of each",
        "4 to 4 pixels high, 6 to 6 wide",
        "72 bytes per image",
        "pixels: mean (0.0, 0.0, 0.0), std (0.0, 0.0, 0.0)",
    ]


def test_mean_and_deviation_are_those_of_all_pixels_by_channel():
    rng = np.random.default_rng(0)
    images = rng.integers(0, [256, 128, 64], (30, 9, 7, 3), np.uint8)
    records = [{"image": image, "label": 0} for image in images]
    source = Dataset.from_records("noise", {"train": records}, ["a"]).split("train")
    line = next(x for x in prepare.describe_split(source, 1, 0) if x.startswith("pixels"))
    pixels = images.reshape(-1, 3) / 255
    mean, std = (tuple(f(pixels, axis=0).round(3).tolist()) for f in (np.mean, np.std))
    assert line == f"pixels: mean {mean}, std {std}"


def test_labels_that_are_no_class_are_reported():
    def describe(*labels):
        records = [{"image": np.zeros((4, 6, 3), np.uint8), "label": label} for label in labels]
        dataset = Dataset.from_records("mine", {"train": records}, ["a", "b"])
        return prepare.describe_split(dataset.split("train"), 2, 0)

    lines = describe(0, 1, 1, 2, 7, 2)
    assert lines[1] == "2 of 2 classes, 1 to 2 examples of each"
    assert lines[-1] == "bad: labels [2, 7], expected 0 to 1"
    with pytest.raises(InputError, match=r"^mine 'train', example 1: its label is 'cat', expected"):
        describe(0, "cat")


def test_tfrecord_is_converted(tfrecord_dir, data_dir, capsys):
    with pytest.raises(InputError, match=r"prepare --name=digits --data_dir="):
        open_dataset("digits", tfrecord_dir)
    prepare.main(["--name=digits", f"--data_dir={tfrecord_dir}", "--check=10"])
    assert "Converting" in capsys.readouterr().out
    for split in ("train", "test"):
        ours, theirs = (open_dataset("digits", d).split(split) for d in (tfrecord_dir, data_dir))
        assert len(ours) == len(theirs)
        for index in (0, 7, len(ours) - 1):
            (image, label), (other_image, other_label) = ours[index], theirs[index]
            np.testing.assert_array_equal(image.decode(), other_image.decode())
            assert label == other_label
    prepare.prepare("digits", str(tfrecord_dir))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_damaged_tfrecord_is_named_and_not_trusted(tfrecord_dir, kept):
    (path,) = (tfrecord_dir / "digits" / "1.0.0").glob("*-test.tfrecord-*")
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(InputError, match=r"test\.tfrecord-.*: ends within a record"):
        prepare.prepare("digits", str(tfrecord_dir))
    with pytest.raises(InputError, match="is prepared as tfrecord"):
        open_dataset("digits", tfrecord_dir)
    write_tfrecord(path, list(read_all(content, path))[:-1])
    with pytest.raises(InputError, match="holds 358 examples, 359 are expected"):
        prepare.prepare("digits", str(tfrecord_dir))


def read_all(content, path):
    path.write_bytes(content)
    return list(prepare.read_tfrecord(path))


def test_stock_builder_without_tensorflow_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError) as caught:
        prepare.main(["--name=cifar10", f"--data_dir={tmp_path}"])
    assert "config.data.name='cifar10': TFDS needs TensorFlow to prepare" in str(caught.value)
    assert "pip install '.[prepare]'" in str(caught.value)
    with pytest.raises(InputError, match="Did you mean 'cifar10'"):
        prepare.main(["--name=cifr10", f"--data_dir={tmp_path}"])


def test_a_negative_number_of_checks_is_refused():
    with pytest.raises(InputError, match=r"--check=-5 must be 0"):
        prepare.main(["--name=digits", "--check=-5"])


def test_messages_name_the_flags_of_the_command():
    with pytest.raises(InputError) as caught:
        prepare.main(["--name=folder"])
    text = prepare.with_own_flags(str(caught.value))
    assert text.startswith("--data_dir='': --name='folder' needs the folder")
    assert text.endswith("with --data_dir=DIR.")


def test_archives_that_are_missing_are_explained(tmp_path, monkeypatch):
    # As the stock builder of imagenet2012 ends when its archives are not there.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: True)

    def no_archive(self, **options):
        assert options["file_format"] == "array_record"
        assert str(self.data_path).startswith(f"{tmp_path}/tf/imagenet2012")
        assert options["download_config"].manual_dir == f"{tmp_path}/archives"
        raise AssertionError("ImageNet requires manual download of the data")

    builder = type(prepare.find_builder("imagenet2012", tmp_path))
    monkeypatch.setattr(builder, "download_and_prepare", no_archive)
    with pytest.raises(InputError, match=r"requires manual download.*--manual_dir=DIR.*ILSVRC2012"):
        prepare.prepare("imagenet2012", "~/tf", "~/archives")


def test_converted_description_keeps_its_format(tfrecord_dir):
    prepare.prepare("digits", str(tfrecord_dir))
    info = json.loads((tfrecord_dir / "digits" / "1.0.0" / "dataset_info.json").read_text())
    assert info["fileFormat"] == "tfrecord"
    assert info["alternativeFileFormats"] == ["array_record"]
