import numpy as np
import pytest
import torch
from torch import Tensor

from cifar_lit.models import whitened as whitening
from cifar_lit.models.whitened import EPS, whitening_filters


def pictures(count: int = 6, channels: int = 3, height: int = 9, width: int = 11, seed: int = 0) -> Tensor:
    """Images whose neighbouring pixels and channels go together, as photographs' do, with a mean that is not zero."""
    random = torch.Generator().manual_seed(seed)
    grey = torch.rand(count, 1, height, width, generator=random)
    colour = torch.rand(count, channels, height, width, generator=random)
    mixed = grey + 0.3 * colour
    return mixed + 0.5 * mixed.roll(1, 3) + 0.25 * mixed.roll(1, 2) - 0.4


def patches_of(images: Tensor, patch: int) -> np.ndarray:
    """Every patch of every image, cut out one by one: float64 (patches, channels · patch²)."""
    cut = []
    for image in images.double().numpy():
        for top in range(image.shape[1] - patch + 1):
            for left in range(image.shape[2] - patch + 1):
                cut.append(image[:, top : top + patch, left : left + patch].reshape(-1))
    return np.stack(cut)


def reference(images: Tensor, patch: int, eps: float) -> np.ndarray:
    """The first half of the filters by numpy's eigenvectors in float64, each of either sign."""
    patches = patches_of(images, patch)
    values, vectors = np.linalg.eigh(patches.T @ patches / len(patches))
    order = np.argsort(-values)
    return (vectors[:, order] / np.sqrt(values[order] + eps)).T


@pytest.mark.parametrize(("channels", "patch", "eps"), [(3, 2, EPS), (1, 2, 0.1), (3, 3, 0.1), (2, 1, EPS)])
def test_the_filters_are_those_of_a_float64_reference_up_to_their_signs(channels: int, patch: int, eps: float) -> None:
    assert EPS == 5e-4  # airbench's
    images = pictures(channels=channels)
    size = channels * patch**2
    filters = whitening_filters(images, patch, eps)
    assert filters.shape == (2 * size, channels, patch, patch)
    assert filters.dtype == torch.float32
    expected = reference(images, patch, eps)
    values = filters[:size].reshape(size, -1).double().numpy()
    signs = np.sign((values * expected).sum(1, keepdims=True))
    np.testing.assert_allclose(values, signs * expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    assert torch.equal(filters[size:], -filters[:size])


@pytest.mark.parametrize("eps", [0.0, 0.05])
def test_whitened_patches_are_uncorrelated_and_a_variance_e_becomes_e_over_e_plus_eps(eps: float) -> None:
    images = pictures()
    filters = whitening_filters(images, 2, eps).double().reshape(24, -1)[:12]
    patches = torch.from_numpy(patches_of(images, 2))
    whitened = patches @ filters.T
    variances = torch.linalg.eigvalsh(patches.T @ patches / len(patches)).flip(0)
    expected = torch.diag(variances / (variances + eps))
    torch.testing.assert_close(whitened.T @ whitened / len(whitened), expected, rtol=0, atol=1e-5)


def test_sums_by_blocks_and_in_any_order_are_those_of_all_images_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    images = pictures(count=7)
    at_once = whitening_filters(images, 2)
    torch.testing.assert_close(whitening_filters(images.flip(0), 2), at_once, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(whitening, "BLOCK_NUMBERS", 2 * 12 * 8 * 10)  # two images' patches
    torch.testing.assert_close(whitening_filters(images, 2), at_once, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("patch", [2, 3])
def test_the_first_component_of_every_filter_of_the_first_half_is_positive_unless_it_is_zero(patch: int) -> None:
    """Mirror images make eigenvectors that are odd or even, with components of equal size and of zero."""
    images = pictures()
    images = torch.cat((images, images.flip(3), images.flip(2), images.flip((2, 3))))
    for values in whitening_filters(images, patch)[: 3 * patch**2].flatten(1):
        clear = values[values.abs() > 1e-3 * values.abs().max()]
        assert clear[0] > 0


def test_patches_without_any_variation_in_a_direction_give_finite_filters() -> None:
    grey = torch.full((3, 3, 6, 6), 0.5)
    filters = whitening_filters(grey, 2)
    assert filters.isfinite().all()
    # twelve pixels of 0.5: an eigenvalue of 3 for the flat direction, none for the others
    torch.testing.assert_close(filters[0], torch.full((3, 2, 2), float((12 * (3 + EPS)) ** -0.5)))


def test_the_precision_does_not_depend_on_autocast() -> None:
    images = pictures()
    expected = whitening_filters(images, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(whitening_filters(images, 2), expected)
