import pytest
import torch
from small_runs import classifier, shapes_data, trainer
from torch import Tensor, nn

from cifar_lit.training.metrics import VIEWS, view_logits


def moved(image: Tensor, down: int, right: int) -> Tensor:
    """Return the image (C, height, width) moved by whole pixels, with reflected edges."""

    def reflected(index: int, length: int) -> int:
        return -index if index < 0 else 2 * (length - 1) - index if index >= length else index

    _, height, width = image.shape
    rows = [reflected(y - down, height) for y in range(height)]
    columns = [reflected(x - right, width) for x in range(width)]
    return image[:, rows][:, :, columns]


def weighted_views(image: Tensor, views: str) -> list[tuple[float, Tensor]]:
    """Return the views of an image with their weights."""
    plain = [(1 / 2, image)]
    if views == "full":
        plain = [(1 / 4, image), (1 / 8, moved(image, 1, 1)), (1 / 8, moved(image, -1, -1))]
    return plain + [(weight, view.flip(2)) for weight, view in plain]


@pytest.mark.parametrize("views", VIEWS[1:])
@pytest.mark.parametrize("shape", [(3, 3, 6, 7), (1, 1, 2, 2)])
def test_logits_are_the_weighted_mean_over_views_in_at_least_float32(views: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    images = torch.rand(shape, dtype=torch.float64)
    net = nn.Sequential(nn.Flatten(), nn.Linear(images[0].numel(), 4), nn.Tanh()).double()
    with torch.no_grad():
        for result, image in zip(view_logits(net, images, views, net(images)), images, strict=True):
            expected = sum(weight * net(view[None])[0] for weight, view in weighted_views(image, views))
            torch.testing.assert_close(result, expected)
        net, images = net.bfloat16(), images.bfloat16()
        assert view_logits(net, images, views, net(images)).dtype == torch.float32


def test_tests_in_bfloat16_score_the_float32_net_of_the_file_and_begin_anew() -> None:
    model, data, results = classifier(tta="mirror"), shapes_data(), []
    for precision in ("32-true", "bf16-mixed", "bf16-mixed"):
        tests = trainer(precision=precision)
        tests.test(model, data, verbose=False)
        (batch,) = tests.predict(model, data)
        results.append((model.score, model.views_score, batch["probabilities"].tolist()))
        assert torch.allclose(model.predictions["probabilities"].float(), batch["probabilities"], atol=1e-6)
    assert results[0] == results[1] == results[2] and model.views_score.images == 24
