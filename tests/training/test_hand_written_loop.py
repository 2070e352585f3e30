from typing import Any

import pytest
import torch
from small_runs import classifier, fitted, shapes_data
from torch.nn import functional as F

from cifar_lit.models.registry import build_net


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-6), ("64-true", 1e-14)])
def test_a_fit_ends_with_the_weights_of_a_loop_written_by_hand(precision: Any, tolerance: float, momentum: float) -> None:
    """The tutorial's net and its loop; torch's optimizer is not fused there, and memory not channels_last.

    Both see the images as the data normalised them: where a pooling window has two equal pixels, the last digit of a
    normalisation decides which of them learns, so that other digits would end in other weights.
    """
    model = classifier(net="tudui", lr=0.05, momentum=momentum)
    fitted(model, shapes_data(), max_epochs=3, precision=precision)

    torch.manual_seed(0)
    net = build_net("tudui", channels=3, image_size=16, num_classes=10).to(model.dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum)
    data = shapes_data()
    loader = data.train_dataloader()
    steps = 0
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in loader:
            images = data.on_after_batch_transfer(batch, 0).images.to(model.dtype).contiguous()
            optimizer.zero_grad()
            F.cross_entropy(net(images), batch.labels).backward()
            optimizer.step()
            steps += 1

    assert steps == 21
    for name, parameter in net.state_dict().items():
        torch.testing.assert_close(model.net.state_dict()[name].detach(), parameter, rtol=0, atol=tolerance)
