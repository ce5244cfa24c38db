import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from structinit_jax.data.examples import load_examples
from structinit_jax.data.imagenet import open_imagenet_evaluation
from structinit_jax.data.loader import eval_batches
from structinit_jax.errors import InputError

# As many classes as ImageNet-A has, spread over the thousand.
CLASSES = np.arange(200) * 5 + 2


def prepare(name, version, split, extra_features, rows, data_dir):
    """Writes a small set in the place and with the features of the stock builder `name`."""

    class SmallSet(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version(version)

        def _info(self):
            features = {"image": tfds.features.Image(), "file_name": tfds.features.Text()}
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict({**features, **extra_features}),
            )

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples()}

        def _generate_examples(self):
            for number, row in enumerate(rows):
                image = Image.new("RGB", (8, 8), (number, 0, 0))
                yield number, {"image": image, "file_name": f"{number}.JPEG", **row}

    SmallSet.name = name
    SmallSet(data_dir=data_dir).download_and_prepare(file_format="array_record")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("imagenet")
    label = tfds.features.ClassLabel(num_classes=1000)
    with tfds.core.registered.skip_registration():
        rows = [{"label": int(CLASSES[n])} for n in range(200)]
        prepare("imagenet_a", "0.1.0", "test", {"label": label}, rows, path)
        prepare("imagenet_r", "0.2.0", "test", {"label": label}, rows[:150], path)
        answers = [[3], [], [4, 7], [9]]
        rows = [{"original_label": 3, "real_label": labels} for labels in answers]
        features = {"original_label": label, "real_label": tfds.features.Sequence(label)}
        prepare("imagenet2012_real", "1.0.0", "validation", features, rows, path)
    return path


def numbers_of(source):
    """The numbers of the images, which are their red values."""
    return [int(example["image"][0, 0, 0]) for example in source.read(list(range(len(source))))]


def test_subsets_choose_among_their_own_classes(folder):
    evaluation = open_imagenet_evaluation("imagenet_a", folder)
    np.testing.assert_array_equal(evaluation.classes, CLASSES)
    labels = CLASSES[numbers_of(evaluation.source)]
    logits = np.zeros((200, 1000))
    logits[:, 0] = 9  # not among the 200
    logits[np.arange(200), labels] = 1
    assert evaluation.correct(logits).all()
    logits[50:, 7] = 2  # among them
    right = np.where(np.arange(200) < 50, True, labels == 7)
    np.testing.assert_array_equal(evaluation.correct(logits), right)
    np.testing.assert_array_equal(evaluation.correct(logits[40:60], start=40), right[40:60])


def test_real_counts_any_right_label_and_leaves_out_images_without(folder):
    evaluation = open_imagenet_evaluation("imagenet2012_real", folder)
    numbers = numbers_of(evaluation.source)
    assert sorted(numbers) == [0, 2, 3]
    for prediction, right in ((3, {0}), (4, {2}), (7, {2}), (9, {3}), (5, set())):
        logits = np.eye(1000)[[prediction] * 3]
        got = {number for number, ok in zip(numbers, evaluation.correct(logits), strict=True) if ok}
        assert got == right
    facts = tfds.builder("imagenet2012_real", data_dir=folder).info
    assert facts.splits["validation"].num_examples == 4


def test_batches_follow_the_targets(folder):
    from structinit_jax.data.datasets import open_dataset

    evaluation = open_imagenet_evaluation("imagenet2012_real", folder)
    facts = open_dataset("imagenet2012_real", folder).facts
    examples = load_examples(evaluation.source, facts, image_size=8)
    (batch,) = eval_batches(examples, batch_size=4)
    assert batch["image"][:3, 0, 0, 0].tolist() == numbers_of(evaluation.source)
    assert batch["mask"].tolist() == [1, 1, 1, 0]


def test_mistakes_are_named(folder):
    with pytest.raises(InputError, match=r"data\.name='cifar10': no evaluation set"):
        open_imagenet_evaluation("cifar10", folder)
    with pytest.raises(InputError, match=r"holds 150 classes, 200 are expected"):
        open_imagenet_evaluation("imagenet_r", folder)
    evaluation = open_imagenet_evaluation("imagenet_a", folder)
    with pytest.raises(InputError, match=r"model\.num_classes=10"):
        evaluation.correct(np.zeros((200, 10)))
