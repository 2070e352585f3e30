import torch

from cifar_lit.runs.label_errors import exact_twins, nearest_embedding, pixel_difference, suspected_labels


def test_labels_are_suspected_in_the_order_in_which_another_class_outweighs_them() -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.05, 0.95], [0.3, 0.7], [0.1, 0.9]])
    found = suspected_labels(probabilities, torch.tensor([0, 0, 0, 1, 1]))
    assert found.rows.tolist() == [2, 1]
    assert found.suggested.tolist() == [1, 1]
    assert torch.allclose(found.label_probability, torch.tensor([0.05, 0.2]))
    assert torch.allclose(found.suggested_probability, torch.tensor([0.95, 0.8]))


def test_confident_learning_counts_those_that_are_as_sure_as_the_other_classs_own_images() -> None:
    probabilities = torch.tensor([[0.1, 0.9], [0.3, 0.7], [0.1, 0.9], [0.2, 0.8]])
    found = suspected_labels(probabilities, torch.tensor([0, 0, 1, 1]))  # class 1's own have 0.85 on average
    assert found.counted.tolist() == [True, False]


def test_a_class_without_images_makes_nothing_count() -> None:
    found = suspected_labels(torch.tensor([[0.1, 0.1, 0.8], [0.9, 0.1, 0.0]]), torch.tensor([1, 0]))
    assert found.counted.tolist() == [False]


def test_planted_wrong_labels_come_first() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(0, 5, (500,), generator=generator)
    logits = torch.randn(500, 5, generator=generator) + 6 * torch.nn.functional.one_hot(truth, 5)
    labels = truth.clone()
    labels[:10] = (truth[:10] + 1) % 5
    found = suspected_labels(logits.softmax(1), labels)
    assert len(set(found.rows[:10].tolist()) & set(range(10))) >= 9


def test_an_exact_twin_is_the_first_training_image_of_the_same_pixels() -> None:
    train = torch.randint(0, 256, (20, 4, 4, 3), dtype=torch.uint8)
    train[7] = train[3]
    test = torch.randint(0, 256, (3, 4, 4, 3), dtype=torch.uint8)
    test[1] = train[7]
    assert exact_twins(train, test).tolist() == [-1, 3, -1]


def test_the_nearest_is_found_by_the_angle_from_the_mean_in_whatever_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    train = torch.randn(50, 8, generator=generator) + 100
    test = train.mean(0) + 3 * (train[[4, 9, 30]] - train.mean(0))
    told: list[int] = []
    cosines, rows = nearest_embedding(train, test, block=2, advance=told.append)
    assert rows.tolist() == [4, 9, 30]
    assert torch.allclose(cosines, torch.ones(3), atol=1e-4)
    assert told == [2, 1]


def test_the_difference_of_an_image_and_its_mirror_is_none() -> None:
    image = torch.randint(0, 256, (6, 5, 3), dtype=torch.uint8)
    assert pixel_difference(image, image.flip(1)) == 0.0
    assert pixel_difference(torch.zeros_like(image), torch.full_like(image, 10)) == 10.0
