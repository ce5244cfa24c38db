import shutil

import jax
import pytest
from PIL import Image

from structinit_jax.data.datasets import open_dataset
from structinit_jax.data.folder import display_name
from structinit_jax.data.images import BadImageError, CenterCrop
from structinit_jax.data.loader import HostLoader
from structinit_jax.data.source import DatasetInfo
from structinit_jax.errors import InputError

CLASSES = ["apple", "Birch", "cat"]


def write_image(path, value, size=(9, 7)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 255 - value, 0)).save(path)


def values(source):
    """The red value of every example."""
    return [int(image.decode()[0, 0, 0]) for image, _ in source.read(range(len(source)))]


@pytest.fixture
def root(tmp_path):
    """Ten training and two val images per class; the red value identifies training images."""
    for label, name in enumerate(CLASSES):
        for number in range(10):
            suffix = ["png", "PNG", "bmp"][number % 3]
            write_image(tmp_path / "train" / name / f"{number}.{suffix}", 10 * label + number)
        for number in range(2):
            write_image(tmp_path / "val" / name / "deeper" / f"{number}.png", 100 + label)
    return tmp_path


def test_examples_of_a_folder(root, monkeypatch):
    monkeypatch.setenv("HOME", str(root.parent))
    dataset = open_dataset("folder", f"~/{root.name}")
    assert dataset.info == DatasetInfo(3, 3, {"train": 30, "val": 6})
    source = dataset.split("train")
    # Sorted in Python's order: capitals first.
    assert dataset.class_names == ["Birch", "apple", "cat"]
    expected = {value: [1, 0, 2][value // 10] for value in range(30)}
    assert dict(zip(values(source), source.labels().tolist(), strict=True)) == expected
    image, label = source[7]
    assert image.decode().shape == (7, 9, 3)
    assert label == source.labels()[7]


def test_slices_hold_some_of_every_class_and_partition_the_split(root, tmp_path_factory):
    dataset = open_dataset("folder", root)
    first, rest = values(dataset.split("train[:80%]")), values(dataset.split("train[80%:]"))
    assert (len(first), len(rest)) == (24, 6)
    assert first + rest == values(dataset.split("train"))
    assert {value // 10 for value in first} == {0, 1, 2}
    assert first[:8] == [2, 20, 19, 10, 5, 11, 17, 14]  # A change here would change every slice.
    other = shutil.copytree(root, tmp_path_factory.mktemp("elsewhere") / "copy")
    assert values(open_dataset("folder", other).split("train")) == first + rest


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda root: root.rename(root.with_name("gone")), "there is no such folder"),
        (lambda root: (root / "val" / "cat" / "loop").symlink_to(".."), "loop.* cannot be read"),
        (lambda root: (root / "val" / "dog").symlink_to("/gone"), r"dog cannot be .*broken link"),
        (lambda root: (root / "val" / "cat").rename(root / "val" / "cats"), r"have: \['cats'\]"),
        (lambda root: [p.unlink() for p in (root / "train" / "cat").iterdir()], "train/cat has"),
        (lambda root: [(root / "train" / n).rename(root / n) for n in CLASSES], "in train/, val/"),
    ],
)
def test_broken_folders_are_refused_by_name(root, change, reason):
    change(root)
    with pytest.raises(InputError, match=reason) as caught:
        open_dataset("folder", root).split("train+val")
    assert str(caught.value).startswith(f"data_dir={str(root)!r}: ")


def test_a_class_may_lack_images_to_evaluate_on(root):
    shutil.rmtree(root / "val" / "apple")
    [path.unlink() for path in (root / "val" / "Birch").rglob("*.png")]
    source = open_dataset("folder", root).split("val")
    assert source.labels().tolist() == [2, 2]  # the label of cat, as in train


def test_only_images_are_read(root):
    cat = root / "train" / "cat"
    for hidden in ("cat/.ipynb_checkpoints", "cat/@eaDir", ".ipynb_checkpoints", "@eaDir"):
        write_image(root / "train" / hidden / "0.png", 50)
    for name in ("1.heic", ".4.png", "new.avif"):
        (cat / name).touch()
    (cat / "link.png").symlink_to(cat / "0.bmp")
    (root / "test").mkdir()
    (root / "valid").mkdir()
    write_image(root / "val" / "0.png", 50)
    dataset = open_dataset("folder", root)
    assert dataset.class_names == sorted(CLASSES)
    assert len(dataset.split("train")) == 32
    assert len(dataset.split("val")) == 6
    left_out = {kind: count for kind, count in dataset.left_out.items() if count}
    outside = {"images outside of class folders": 1, "folder valid/": 1}
    assert left_out == {"hidden": 5, ".heic": 1} | outside
    with pytest.raises(InputError):  # has no classes, an error only if it is used
        dataset.split("test")


def test_bad_images_stop_or_are_left_out(root, capsys):
    bad = root / "train" / "cat" / "3.png"
    bad.write_bytes(bad.read_bytes()[:50])
    (root / "train" / "apple" / "1.PNG").write_bytes(b"<html>404</html>")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    loader = HostLoader(open_dataset("folder", root).split("train"), mesh, CenterCrop(8))
    batches = loader.train_batches(batch_size=8, seed=0, start_step=0, num_steps=4)
    message = rf"^{root.name} 'train', example \d+ \(.*(cat/3|apple)"
    with pytest.raises(BadImageError, match=message):
        list(batches)

    (root / "train" / "cat" / "gone.png").symlink_to(root / "nothing")
    source = open_dataset("folder", root).split("train", on_bad_image="skip")
    output = capsys.readouterr().out
    assert output.startswith(f"{root.name} 'train': left out 3 bad images of 31:")
    assert all(name in output for name in ("cat/gone.png", "cat/3.png", "apple/1.PNG"))
    assert sorted(values(source)) == sorted(set(range(30)) - {1, 23})

    for path in (root / "train").glob("*/*"):
        path.unlink()
        path.with_suffix(".png").write_bytes(b"")
    with pytest.raises(InputError, match="'train' has no images that can be decoded"):
        open_dataset("folder", root).split("train", on_bad_image="skip")


def test_a_folder_of_classes_is_the_split_train(root, tmp_path_factory):
    whole = open_dataset("folder", root).split("train")
    flat = (root / "train").rename(tmp_path_factory.mktemp("flat") / "fruit")
    dataset = open_dataset("folder", f"{flat}/")
    assert dataset.name == display_name("folder", f"{flat}/") == "fruit"
    assert dataset.info == DatasetInfo(3, 3, {"train": 30})
    first, rest = dataset.split("train[:90%]"), dataset.split("train[90%:]")
    assert values(first) + values(rest) == values(dataset.split("train"))
    assert dataset.split("train").labels().tolist() == whole.labels().tolist()
    for name in ("validation", "test"):
        next(root.glob("[vt]*")).rename(root / name)  # the only split that is left
        assert open_dataset("folder", root).info == DatasetInfo(3, 3, {name: 6})
    # Splits under other names are not taken for classes.
    for name in ("training", "valid"):
        shutil.copytree(flat, flat.parent / "other" / name)
    with pytest.raises(InputError, match="no class folders with images"):
        open_dataset("folder", flat.parent / "other")
