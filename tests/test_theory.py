import numpy as np
import pytest
import theory
from scipy.signal import correlate2d

from structinit_jax.attention_init import kernels


def random_kernels(count, seed=0, size=3):
    return np.random.default_rng(seed).standard_normal((count, size, size))


def impulses(indices):
    return kernels.impulse_kernels(3)[np.asarray(indices)]


def box(count):
    return np.repeat(kernels.box_kernels(3), count, axis=0)


def test_span_of_random_impulse_and_box_filters():
    assert theory.spans(random_kernels(47)) == (9, 5)
    assert theory.spans(random_kernels(7)) == (7, 1)
    assert theory.spans(random_kernels(100, size=5)) == (25, 4)
    # As many bases as the rarest offset is there.
    assert theory.spans(impulses([*range(9)] * 3 + [0, 1, 2, 2])) == (9, 3)
    assert theory.spans(impulses([0, 0, 1, 1, 1])) == (2, 2)
    assert theory.spans(box(6)) == (1, 6)  # corollary 3: 1-k spanned
    assert theory.spans(np.zeros((3, 3, 3))) == (0, 0)


def test_disjoint_bases_need_exchanges_and_are_counted_as_by_trying_all():
    rng = np.random.default_rng(0)
    for _ in range(30):
        # Few distinct small integers: many dependent subsets, in awkward order.
        flat = rng.integers(-1, 2, (6, 3)).astype(float)
        kernels = np.zeros((6, 3, 3))
        kernels[:, 0] = flat
        rank = np.linalg.matrix_rank(flat)
        spanning = set()
        for mask in range(1, 64):
            members = flat[[mask >> i & 1 == 1 for i in range(6)]]
            if rank and np.linalg.matrix_rank(members) == rank:
                spanning.add(mask)

        def most(free, spanning=spanning):
            inside = [mask for mask in spanning if mask & free == mask]
            return max((1 + most(free & ~mask) for mask in inside), default=0)

        assert theory.spans(kernels) == (rank, most(63))


def block(x, kernels, mixing):
    """A ConvMixer block without nonlinearity, its convolutions by SciPy."""
    images = x.T.reshape(-1, 6, 7)
    mixed = [correlate2d(image, k, mode="same") for image, k in zip(images, kernels, strict=True)]
    return np.stack(mixed).reshape(len(mixed), -1).T @ mixing


def error(kernels, rank, channels):
    """How far channel mixing behind fixed filters stays from a block with trained ones."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((42, rank)) @ rng.standard_normal((rank, channels))
    trained, mixing = rng.standard_normal((channels, 3, 3)), rng.standard_normal((channels, 4))
    found = theory.recovering_mixing(x, kernels, trained, mixing)
    wanted = block(x, trained, mixing)
    return np.abs(block(x, kernels, found) - wanted).max() / np.abs(wanted).max()


RANK = 3


@pytest.mark.parametrize("kind", ["random", "impulse"])
def test_channel_mixing_alone_recovers_trained_filters_from_k_f_squared_channels_on(kind):
    def kernels(count):
        return random_kernels(count) if kind == "random" else impulses(np.arange(count) % 9)

    enough = RANK * 9
    assert error(kernels(enough), RANK, enough) < 1e-8
    assert error(kernels(enough + 5), RANK, enough + 5) < 1e-8
    assert error(kernels(enough - 1), RANK, enough - 1) > 1e-3


def test_box_filters_do_not_recover_them_however_many():
    assert error(box(100), RANK, 100) > 0.1


def test_the_condition_on_the_filters_alone_is_not_enough():
    kernels = impulses([0, 1, 0, 1])
    assert theory.spans(kernels) == (2, 2)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((42, 2))[:, [0, 1, 0, 1]]
    trained, mixing = impulses([1, 1, 1, 1]), np.ones((4, 1))
    found = theory.recovering_mixing(x, kernels, trained, mixing)
    assert np.abs(block(x, kernels, found) - block(x, trained, mixing)).max() > 0.1


def test_stable_rank():
    assert theory.stable_rank(np.eye(5)) == pytest.approx(5)
    assert theory.stable_rank(np.diag([2.0, 1.0, 1.0])) == pytest.approx(1.5)
