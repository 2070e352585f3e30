import pytest
import torch
from torch import Tensor, nn

from cifar_lit.errors import UsageError
from cifar_lit.models.registry import build_net
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
    _, height, width = image.shape
    result = torch.empty_like(image)
    for y in range(height):
        for x in range(width):
            from_y, from_x = y - down, x - right
            from_y = -from_y if from_y < 0 else 2 * (height - 1) - from_y if from_y >= height else from_y
            from_x = -from_x if from_x < 0 else 2 * (width - 1) - from_x if from_x >= width else from_x
            result[:, y, x] = image[:, from_y, from_x]
    return result


def mirrored(image: Tensor) -> Tensor:
    return torch.stack([image[:, :, x] for x in reversed(range(image.shape[2]))], 2)


def definition(image: Tensor, views: str) -> list[tuple[float, Tensor]]:
    """The views of one image with their weights."""
    if views == "none":
        return [(1.0, image)]
    if views == "mirror":
        return [(1 / 2, image), (1 / 2, mirrored(image))]
    down_right, up_left = moved(image, 1, 1), moved(image, -1, -1)
    return [(1 / 4, image), (1 / 4, mirrored(image))] + [
        (1 / 8, view) for view in (down_right, up_left, mirrored(down_right), mirrored(up_left))
    ]


@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("shape", [(3, 3, 6, 7), (2, 1, 5, 4), (1, 3, 2, 2)])
def test_logits_are_the_weighted_mean_over_the_views_of_each_image(views: str, shape: tuple[int, int, int, int]) -> None:
    images = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    net = Remembering(shape[1] * shape[2] * shape[3])
    with torch.no_grad():
        result = view_logits(net, images, views)
        for row, image in enumerate(images):
            expected = sum(weight * net(view[None])[0] for weight, view in definition(image, views))
            torch.testing.assert_close(result[row], expected)


@pytest.mark.parametrize("views", VIEWS)
def test_the_net_sees_exactly_the_views_of_the_definition(views: str) -> None:
    image = torch.rand(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    net = Remembering(60)
    with torch.no_grad():
        view_logits(net, image[None], views)

    def names(seen: list[Tensor]) -> list[list[float]]:
        return sorted(view.flatten().tolist() for view in seen)

    assert names(net.seen) == names([view for _, view in definition(image, views)])


def test_with_mirrors_an_image_and_its_mirror_get_the_same_logits() -> None:
    torch.manual_seed(0)
    net = build_net("whitened", channels=3, image_size=16, num_classes=5, options={"widths": [8, 8]}).eval()
    images = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        straight, mirror = (view_logits(net, these, "mirror") for these in (images, images.flip(3)))
        assert not torch.allclose(net(images), net(images.flip(3)), atol=1e-4)
    torch.testing.assert_close(straight, mirror)


@pytest.mark.parametrize("views", ["mirror", "full"])
def test_the_mean_is_taken_in_float32_where_the_net_answers_in_less(views: str) -> None:
    torch.manual_seed(0)
    net = build_net("shapenet", channels=3, image_size=16, num_classes=5).eval()
    images = torch.rand(2, 3, 16, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert net(images).dtype == torch.bfloat16
        assert view_logits(net, images, views).dtype == torch.float32


def test_memory_format_does_not_change_the_answer() -> None:
    torch.manual_seed(0)
    net = build_net("whitened", channels=3, image_size=16, num_classes=5, options={"widths": [8, 8]}).eval()
    images = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        expected = view_logits(net, images, "full")
        last = view_logits(net.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last), "full")
    torch.testing.assert_close(last, expected)


def test_an_unknown_word_for_the_views_is_answered_with_the_nearest() -> None:
    for views in VIEWS:
        check_views(views)
    for refused in (check_views, lambda views: view_logits(nn.Identity(), torch.zeros(1, 3, 8, 8), views)):
        with pytest.raises(UsageError, match=r"model.tta must be one of none, mirror, full, not 'miror'. Did you mean mirror\?"):
            refused("miror")
