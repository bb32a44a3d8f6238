"""Learning-rate schedules, gradient clipping and AdamW's step, by hand."""

import math

import pytest
import torch
from torch import nn

from trainers.config import OptimizerConfig, SchedulerConfig
from trainers.optim import Optimizer, add_metrics, lr_factor, step_all


def test_warm_up_rises_to_the_peak_and_a_constant_schedule_stays_there():
    schedule = SchedulerConfig(name="constant", warmup_steps=4)
    assert [lr_factor(step, schedule) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert lr_factor(0, SchedulerConfig(warmup_steps=0)) == 1.0


def test_linear_decay_reaches_its_floor_and_stays():
    schedule = SchedulerConfig(name="linear", warmup_steps=2, decay_steps=4, min_lr_ratio=0.2)
    assert [lr_factor(step, schedule) for step in range(8)] == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_decay_is_half_way_down_in_the_middle():
    schedule = SchedulerConfig(name="cosine", warmup_steps=0, decay_steps=4, min_lr_ratio=0.0)
    expected = [1, 0.5 * (1 + math.sqrt(0.5)), 0.5, 0.5 * (1 - math.sqrt(0.5)), 0, 0]
    assert [lr_factor(step, schedule) for step in range(6)] == pytest.approx(expected)


def step(optimizer: Optimizer) -> dict[str, float]:
    return step_all({"it": optimizer})["it"]


def stepped(gradient: list[float], **options: float) -> tuple[torch.Tensor, dict[str, float]]:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = Optimizer([parameter], OptimizerConfig(lr=0.1, **options), SchedulerConfig(warmup_steps=0))
    parameter.grad = torch.tensor(gradient)
    return parameter, step(optimizer)


def test_adamws_first_step_has_the_size_of_the_learning_rate():
    parameter, report = stepped([3.0, -4.0], max_grad_norm=0.0)
    assert parameter.tolist() == pytest.approx([0.9, -1.9], abs=1e-6)
    assert report == {"grad_norm": 5.0, "lr": 0.1, "skipped": 0.0}
    assert parameter.grad is None


def test_weight_decay_is_decoupled_from_the_gradient():
    parameter, _ = stepped([3.0, -4.0], weight_decay=0.5)
    assert parameter.tolist() == pytest.approx([0.95 - 0.1, -1.9 + 0.1], abs=1e-6)


def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_reported():
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = Optimizer([parameter], OptimizerConfig(max_grad_norm=1.0), SchedulerConfig())
    parameter.grad = torch.tensor([3.0, -4.0])
    assert step(optimizer)["grad_norm"] == 5.0
    moment = optimizer.adamw.state[parameter]["exp_avg"]
    assert moment.tolist() == pytest.approx([0.1 * 0.6, -0.1 * 0.8], abs=1e-6)  # (1 - beta1) * clipped gradient


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing_not_even_the_schedule(bad):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Optimizer([parameter], OptimizerConfig(lr=0.1, weight_decay=0.5), SchedulerConfig(warmup_steps=4))
    parameter.grad = torch.tensor([bad, 1.0])
    assert step(optimizer)["skipped"] == 1.0
    assert parameter.tolist() == [1.0, 1.0] and not optimizer.adamw.state
    parameter.grad = torch.ones(2)
    assert step(optimizer)["lr"] == pytest.approx(0.025)


def test_parts_that_belong_together_step_together_or_not_at_all():
    actor, critic = (nn.Parameter(torch.ones(1)) for _ in range(2))
    parts = {
        name: Optimizer([p], OptimizerConfig(lr=0.1), SchedulerConfig(warmup_steps=2))
        for name, p in (("actor", actor), ("critic", critic))
    }
    actor.grad, critic.grad = torch.tensor([math.nan]), torch.ones(1)
    report = step_all(parts)
    assert report["actor"]["skipped"] == report["critic"]["skipped"] == 1.0 and report["critic"]["grad_norm"] == 1.0
    assert actor.item() == critic.item() == 1.0
    assert [part.schedule.last_epoch for part in parts.values()] == [0, 0]


def test_state_carries_moments_and_schedule():
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    make = lambda p: Optimizer([p], OptimizerConfig(lr=0.1), SchedulerConfig(warmup_steps=8))  # noqa: E731
    unbroken, broken = make(first), make(second)
    for _ in range(3):
        for parameter, optimizer in ((first, unbroken), (second, broken)):
            parameter.grad = parameter.detach().clone()
            step(optimizer)
    resumed = make(second)
    resumed.load_state_dict(broken.state_dict())
    for parameter, optimizer in ((first, unbroken), (second, resumed)):
        parameter.grad = parameter.detach().clone()
        assert step(optimizer)["lr"] == pytest.approx(0.05)
    assert torch.equal(first, second)


def test_metrics_of_micro_batches_add_and_maxima_stay_maxima():
    total = {}
    for part in ({"actor": torch.tensor([1.0, 2.0]), "error_max": torch.tensor(3.0)},
                 {"actor": torch.tensor([10.0, 20.0]), "error_max": torch.tensor(2.0)}):  # fmt: skip
        add_metrics(total, part)
    assert total["actor"].tolist() == [11.0, 22.0] and total["error_max"].item() == 3.0
