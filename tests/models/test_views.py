import pytest
import torch
from torch import Tensor, nn

from cifar_lit.errors import UsageError
from cifar_lit.models.tta import VIEWS, check_views, view_logits


class Remembering(nn.Module):
    """A net whose logits are linear in the pixels, so that its answer to a mean of images is the mean of its answers."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(pixels, 4, bias=False).double()
        self.seen: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append(images)
        return self.linear(images.flatten(1))


def moved(image: Tensor, down: int, right: int) -> Tensor:
    """One image (C, height, width) moved, pixel by pixel; a pixel from beyond an edge is that as far inside of it."""

    def inside(place: int, length: int) -> int:
        return -place if place < 0 else 2 * (length - 1) - place if place >= length else place

    _, height, width = image.shape
    rows = [inside(y - down, height) for y in range(height)]
    columns = [inside(x - right, width) for x in range(width)]
    return image[:, rows][:, :, columns]


def definition(image: Tensor, views: str) -> list[tuple[float, Tensor]]:
    """The views of one image with their weights."""
    shifts = {"none": [], "mirror": [], "full": [moved(image, 1, 1), moved(image, -1, -1)]}[views]
    plain = [(1 / 4, image)] + [(1 / 8, shifted) for shifted in shifts] if shifts else [(1 / 2, image)]
    return [(1.0, image)] if views == "none" else plain + [(weight, view.flip(2)) for weight, view in plain]


@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("shape", [(3, 3, 6, 7), (2, 1, 5, 4), (1, 3, 2, 2)])
def test_logits_are_the_weighted_mean_over_the_views_and_the_net_sees_exactly_these(
    views: str, shape: tuple[int, int, int, int]
) -> None:
    images = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    net = Remembering(shape[1] * shape[2] * shape[3])
    with torch.no_grad():
        result = view_logits(net, images, views)
        seen = sorted(view.flatten().tolist() for batch in net.seen for view in batch)
        assert seen == sorted(view.flatten().tolist() for image in images for _, view in definition(image, views))
        for row, image in enumerate(images):
            expected = sum(weight * net(view[None])[0] for weight, view in definition(image, views))
            torch.testing.assert_close(result[row], expected)


def test_with_mirrors_an_image_and_its_mirror_get_the_same_logits() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 5))
    images = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        straight, mirror = (view_logits(net, these, "mirror") for these in (images, images.flip(3)))
        assert not torch.allclose(net(images), net(images.flip(3)), atol=1e-4)
    torch.testing.assert_close(straight, mirror)


@pytest.mark.parametrize("views", ["mirror", "full"])
def test_the_mean_is_taken_in_float32_where_the_net_answers_in_less(views: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 5)).bfloat16()
    assert view_logits(net, torch.rand(2, 3, 4, 4).bfloat16(), views).dtype == torch.float32


def test_an_unknown_word_for_the_views_is_answered_with_the_nearest() -> None:
    for views in VIEWS:
        check_views(views)
    for refused in (check_views, lambda views: view_logits(nn.Identity(), torch.zeros(1, 3, 8, 8), views)):
        with pytest.raises(UsageError, match=r"model.tta must be one of none, mirror, full, not 'miror'. Did you mean mirror\?"):
            refused("miror")
