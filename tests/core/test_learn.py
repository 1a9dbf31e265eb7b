"""Estimators: the multiplier's arithmetic, PPO against plain formulas and a toy it must solve, the warm start."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn import functional as F

from split_core.decision import Decision, log_prob
from split_core.features import Features
from split_core.learn import ppo as ppo_module
from split_core.learn.config import DualConfig, PPOConfig
from split_core.learn.dual import Dual, Threshold, token_price
from split_core.learn.estimator import EstimatorContext, Lesson
from split_core.learn.ppo import PPO, advantage, image_weight, ppo_loss, sample_rollouts
from split_core.learn.warmstart import imitation_loss, pseudo_labels, start_tau
from split_core.model import SplitViT
from split_core.policy import SplitPolicy, StageView
from split_core.quadtree import build_layout, leaf_scale, valid_at
from split_core.types import Grid, Pyramid, Splits
from split_core.wrapping import wrap
from strategies import Case, cases, random_logits, random_pyramid, seeds
from tiny import Bright, Linear, images, jitter, tiny_vit

BUDGET = 0.5


def student(stages: int = 1, policy: SplitPolicy | None = None, seed: int = 0) -> SplitViT:
    torch.manual_seed(seed)
    model = wrap(tiny_vit(depth=1), policy or Linear(), stages=stages).eval()
    jitter(model.embed, seed)
    return model


def estimator(**settings: Any) -> PPO:
    return PPO(PPOConfig(**settings), EstimatorContext(BUDGET, steps=10))


def output_norm(model: SplitViT) -> Any:
    return lambda features: model.forward_head(features).norm(dim=1)


# ---------------------------------------------------------------- advantage and loss


def test_advantage_is_the_leave_one_out_loop() -> None:
    cost = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    gain = advantage(cost)
    for k, i in itertools.product(range(4), range(3)):
        others = [float(cost[j, i]) for j in range(4) if j != k]
        assert float(gain[k, i]) == pytest.approx(sum(others) / 3 - float(cost[k, i]), abs=1e-6)
    torch.testing.assert_close(gain.sum(0), torch.zeros(3), atol=1e-6, rtol=0)


def test_images_weigh_by_the_inverse_spread_of_their_errors() -> None:
    error = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    spread = [float(error[:, i].std()) for i in range(3)]
    expected = [1 / (own + sum(spread) / 3) for own in spread]
    assert image_weight(error).tolist() == pytest.approx(expected, rel=1e-5)
    # Units do not matter, and an image that no mask moves weighs at most twice the typical one.
    torch.testing.assert_close(image_weight(10 * error) * 10, image_weight(error))
    still = torch.cat([error, torch.ones(4, 1)], 1)
    assert image_weight(still).isfinite().all()


def test_the_price_of_a_token_is_that_of_the_weighted_objective() -> None:
    """Two images, two prices: the weighted price lies between, nearer that of the heavier image."""
    score = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    error, fraction = score * torch.tensor([-3.0, -1.0]), score * 0.5
    assert float(token_price(error, fraction, score)) == pytest.approx(4.0)
    assert float(token_price(error, fraction, score, torch.tensor([0.0, 1.0]))) == pytest.approx(2.0)
    assert float(token_price(error, fraction, score, torch.tensor([3.0, 1.0]))) == pytest.approx(5.0)


def test_ppo_loss_is_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    now, old = (torch.randn(4, 5, generator=generator) * 0.2 - 3 for _ in range(2))
    gain, clip = torch.randn(4, 5, generator=generator), 0.1
    loss, clipped, kl = ppo_loss(now, old, gain, clip)
    terms, outside, kls = [], 0, []
    for k, i in itertools.product(range(4), range(5)):
        r, a = math.exp(float(now[k, i] - old[k, i])), float(gain[k, i])
        terms.append(min(r * a, min(max(r, 1 - clip), 1 + clip) * a))
        outside += abs(r - 1) > clip
        kls.append(r - 1 - math.log(r))
    assert float(loss) == pytest.approx(-sum(terms) / 20, abs=1e-6)
    assert float(clipped) == pytest.approx(outside / 20)
    assert float(kl) == pytest.approx(sum(kls) / 20, abs=1e-6)
    assert outside > 0


def test_the_clip_stops_the_gradient_only_where_a_step_would_go_further() -> None:
    now = torch.tensor([[0.5, 0.5, -0.5, -0.5, 0.0]], requires_grad=True)
    gain = torch.tensor([[1.0, -1, 1, -1, 1]])
    ppo_loss(now, torch.zeros(1, 5), gain, 0.1)[0].backward()
    assert (now.grad != 0).tolist() == [[False, True, True, False, True]]


def test_a_ratio_far_away_stays_finite() -> None:
    now = torch.tensor([[300.0, -300.0]], requires_grad=True)
    loss, _, kl = ppo_loss(now, torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]), 0.1)
    loss.backward()
    assert loss.isfinite()
    assert kl.isfinite()
    assert now.grad.isfinite().all()


# ---------------------------------------------------------------- rollouts


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("size", [(32, 32), (40, 20)], ids=str)
def test_rollouts_packed_together_are_each_evaluated_alone(stages: int, size: tuple[int, int]) -> None:
    model, picture, times = student(stages), images(3, *size), 4
    error_of = output_norm(model)
    with torch.no_grad():
        pyramid = model.pyramid(picture)
        rollouts = sample_rollouts(model, pyramid, picture, error_of, times, torch.Generator().manual_seed(0))
        for k, i in itertools.product(range(times), range(3)):
            row = k * 3 + i
            alone = Splits(tuple(mask[row : row + 1] for mask in rollouts.splits.masks), rollouts.splits.grid)
            layout = build_layout(alone)
            one = model.encode(model.pyramid(picture[i : i + 1]), layout)
            torch.testing.assert_close(rollouts.error[k, i], error_of(one)[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(rollouts.fraction[k, i], layout.token_fraction[0])
            logits = tuple(x[i : i + 1] for x in model.logits(pyramid, picture))
            torch.testing.assert_close(rollouts.log_probs[k, i].sum(), log_prob(logits, alone)[0])
            score = torch.zeros(())
            inside = valid_at(pyramid.grid, None, picture.device)
            exists = torch.ones(1, *pyramid.grid.shape(stages), dtype=torch.bool)
            for s in range(stages, 0, -1):
                p = logits[s - 1].sigmoid().unflatten(1, pyramid.grid.shape(s))
                score = score + ((alone.masks[s - 1].float() - p) * exists * inside[s]).sum()
                exists = alone.masks[s - 1].repeat_interleave(2, 1).repeat_interleave(2, 2)
            torch.testing.assert_close(rollouts.score[k, i], score, atol=1e-5, rtol=1e-5)
        deployed = build_layout(Decision("threshold")(model.logits(pyramid, picture), pyramid.grid)).token_fraction
        assert torch.equal(rollouts.deployed, deployed)


def test_rollouts_follow_the_generator() -> None:
    model, picture = student(2), images(2)
    drawn = []
    for seed in (3, 3, 4):
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            drawn.append(
                sample_rollouts(model, model.pyramid(picture), picture, output_norm(model), 4, generator).error
            )
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


# ---------------------------------------------------------------- PPO


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_one_loss_per_epoch_and_a_ratio_of_exactly_one_before_the_first_update(epochs: int, monkeypatch) -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    inner = ppo_module.ppo_loss

    def spy(now: Tensor, old: Tensor, gain: Tensor, clip: float) -> tuple[Tensor, Tensor, Tensor]:
        seen.append((now.detach().clone(), old))
        return inner(now, old, gain, clip)

    monkeypatch.setattr(ppo_module, "ppo_loss", spy)
    model, ppo = student(2), estimator(epochs=epochs)
    optimizer = torch.optim.SGD(model.policy.parameters(), lr=1.0)
    count = 0
    for loss in ppo.losses(model, Lesson(images(4, 40), output_norm(model), torch.Generator().manual_seed(0))):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        count += 1
    assert count == epochs
    assert torch.equal(*seen[0])
    assert all(not torch.equal(now, old) for now, old in seen[1:])
    metrics = ppo.metrics()
    assert metrics["kl_1"] == 0
    assert metrics["clip_fraction_1"] == 0
    assert all(f"kl_{n}" in metrics for n in range(1, epochs + 1))


@pytest.mark.parametrize("bonus", [0.0, 0.1])
def test_gradients_reach_the_policy_and_nothing_else(bonus: float) -> None:
    model = student(2)
    for loss in estimator(entropy_bonus=bonus).losses(model, Lesson(images(3), output_norm(model))):
        loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.policy.parameters())
    assert all(p.grad is None for part in (model.vit, model.embed) for p in part.parameters())


class Saturated(Linear):
    """Logits of +90 and -90."""

    def forward(self, view: StageView) -> Tensor:
        return 90 * torch.tanh(1e4 * super().forward(view))


def test_saturated_logits_give_finite_losses_and_gradients() -> None:
    model = student(2, Saturated())
    ppo = estimator(entropy_bonus=0.1)
    for loss in ppo.losses(model, Lesson(images(3, 64), output_norm(model))):
        assert loss.isfinite()
        loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.policy.parameters())
    assert all(math.isfinite(value) for value in ppo.metrics().values())


def test_the_objective_is_error_and_tokens_weighed_by_lambda(monkeypatch) -> None:
    gains: list[Tensor] = []
    monkeypatch.setattr(ppo_module, "advantage", lambda cost: gains.append(cost) or advantage(cost))
    model, picture = student(), images(3)
    ppo = estimator(dual={"init": 3.0})
    for loss in ppo.losses(model, Lesson(picture, output_norm(model), torch.Generator().manual_seed(1))):
        loss.backward()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        rollouts = sample_rollouts(model, model.pyramid(picture), picture, output_norm(model), 4, generator)
    torch.testing.assert_close(gains[0][..., 0], (rollouts.error + 3 * rollouts.fraction) / 4)
    assert ppo.metrics()["lambda"] == 3.0
    assert ppo.metrics()["token_fraction"] == pytest.approx(float(rollouts.fraction.mean()))


@pytest.mark.parametrize("measure", ["sampled", "deployed"])
def test_lambda_moves_after_the_updates_of_a_batch_by_what_it_is_told_to_read(measure: str) -> None:
    model, ppo = student(), estimator(dual={"init": 1.0, "lr": 0.5, "measure": measure})
    for _ in ppo.losses(model, Lesson(images(3), output_norm(model), torch.Generator().manual_seed(0))):
        assert ppo.dual.value == 1.0
    fraction = ppo.metrics()["token_fraction" if measure == "sampled" else "deployed_fraction"]
    assert ppo.dual.value == pytest.approx(1.0 + 0.5 * (fraction - BUDGET))


def test_lambda_reads_the_mean_over_processes() -> None:
    model = student()
    ppo = PPO(PPOConfig(dual=DualConfig(init=1.0, lr=1.0)), EstimatorContext(BUDGET, 10, mean=lambda value: 0.9))
    list(ppo.losses(model, Lesson(images(2), output_norm(model))))
    assert ppo.dual.value == pytest.approx(1.4)


def test_a_start_of_null_measures_the_price_while_the_policy_stands_still() -> None:
    model, ppo = student(), estimator(dual={"init": None, "price_batches": 2})
    for batch in range(2):
        assert ppo.dual.measuring
        assert list(ppo.losses(model, Lesson(images(4, seed=batch), output_norm(model)))) == []
        assert "token_fraction" in ppo.metrics()
    assert not ppo.dual.measuring
    assert ppo.dual.value == pytest.approx(max(0.0, sum(ppo.dual.prices) / 2))
    assert len(list(ppo.losses(model, Lesson(images(4), output_norm(model))))) == 2


def test_the_state_of_ppo_is_resumed() -> None:
    model, first, second = student(), estimator(dual={"kind": "pi"}), estimator(dual={"kind": "pi"})
    list(first.losses(model, Lesson(images(2), output_norm(model))))
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.dual.value == first.dual.value


HIDDEN_WEIGHT = torch.randn(32, generator=torch.Generator().manual_seed(42))


def wrong_splits(wanted: Tensor) -> Any:
    """Share of parents whose split is not the hidden one; what the policy has to find out from errors alone."""

    def error_of(features: Features) -> Tensor:
        split = features.layout.fine()[:, ::2, ::2].flatten(1)
        return (split != wanted.repeat(split.shape[0] // wanted.shape[0], 1)).float().mean(1)

    return error_of


def hidden(model: SplitViT, picture: Tensor) -> Tensor:
    with torch.no_grad():
        return model.pyramid(picture).levels[1] @ HIDDEN_WEIGHT > 0


def test_ppo_finds_the_mask_that_errors_reward() -> None:
    model = student(seed=1)
    ppo = estimator(rollouts=8, dual={"lr": 1e-9})
    optimizer = torch.optim.Adam(model.policy.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(0)
    test = images(64, seed=999)

    def error() -> float:
        with torch.no_grad():
            return float(wrong_splits(hidden(model, test))(model.forward_features(test)).mean())

    before = error()
    for step in range(40):
        picture = images(16, seed=step)
        for loss in ppo.losses(model, Lesson(picture, wrong_splits(hidden(model, picture)), generator)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert before > 0.3
    assert error() < 0.4 * before


def test_ppo_under_the_multiplier_comes_to_the_budget() -> None:
    """Fine tokens cost nothing in error here, so without lambda nothing would hold the fraction down."""
    model = student(seed=2)
    torch.nn.init.constant_(model.policy.score.bias, 1.5)
    ppo = estimator(rollouts=8, dual={"lr": 0.5, "kind": "pi", "init": 0.5})
    optimizer = torch.optim.Adam(model.policy.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(0)

    def saving(features: Features) -> Tensor:  # each fine parent saves error, with falling returns
        return 1 - features.layout.token_fraction.sqrt() * 0.3

    fractions = []
    for step in range(80):
        for loss in ppo.losses(model, Lesson(images(16, seed=step), saving, generator)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        fractions.append(ppo.metrics()["token_fraction"])
    assert fractions[0] > 0.75
    assert sum(fractions[-20:]) / 20 == pytest.approx(BUDGET, abs=0.06)


# ---------------------------------------------------------------- the multiplier


def test_the_papers_multiplier_integrates_the_gap_and_stays_above_zero() -> None:
    dual = Dual(DualConfig(kind="paper", lr=0.5, init=0.1), budget=0.7)
    dual.update(0.9)
    assert dual.value == pytest.approx(0.2)
    dual.update(0.1)
    assert dual.value == 0.0  # 0.2 - 0.3 is cut off
    dual.update(0.8)
    assert dual.value == pytest.approx(0.05)


def test_the_pi_multiplier_adds_a_share_of_the_gap() -> None:
    dual = Dual(DualConfig(kind="pi", lr=0.5, gain=2.0, init=0.1), budget=0.5)
    assert dual.value == pytest.approx(0.1)
    dual.update(0.6)
    assert dual.integral == pytest.approx(0.15)
    assert dual.value == pytest.approx(0.15 + 2 * 0.1)
    dual.update(0.2)
    assert dual.integral == pytest.approx(0.0)
    assert dual.value == 0.0
    dual.update(0.5)
    assert dual.value == pytest.approx(0.0)


def test_the_measured_start_is_the_mean_price() -> None:
    dual = Dual(DualConfig(init=None, price_batches=3), budget=0.5)
    assert dual.value == 0.0
    for price, mean in [(0.3, 0.3), (0.5, 0.4), (0.1, 0.3)]:
        assert dual.measuring
        dual.measure(price)
        assert dual.value == pytest.approx(mean)
    assert not dual.measuring
    negative = Dual(DualConfig(init=None, price_batches=1), budget=0.5)
    negative.measure(-2.0)
    assert negative.value == 0.0
    assert not Dual(DualConfig(init=0.0), budget=0.5).measuring


def test_the_state_of_the_multiplier_round_trips() -> None:
    dual, twin = (Dual(DualConfig(kind="pi", init=None, price_batches=2), budget=0.5) for _ in range(2))
    dual.measure(0.4)
    dual.update(0.7)
    twin.load_state_dict(dual.state_dict())
    assert (twin.value, twin.measuring, twin.state_dict()) == (dual.value, True, dual.state_dict())
    twin.measure(0.1)
    assert dual.prices == [0.4]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_token_price_is_the_derivative_on_a_toy_that_can_be_solved(seed: int) -> None:
    """E = sum_i w_i m_i. Shifting all logits moves E by sum w_i p_i (1 - p_i) and P by the same sum of 3 / N."""
    grid, times = Grid((8, 8), 1), 20_000
    logits = random_logits(grid, 1, seed)
    weight = -torch.rand(16, generator=torch.Generator().manual_seed(seed))
    p = logits[0][0].sigmoid()
    splits = Decision("sample")((logits[0].expand(times, -1),), grid, generator=torch.Generator().manual_seed(seed))
    masks = splits.masks[0].flatten(1).float()
    fraction = build_layout(splits).token_fraction
    price = token_price((masks @ weight)[:, None], fraction[:, None], (masks - p).sum(1)[:, None])
    variance = p * (1 - p)
    exact = -(weight * variance).sum() / (3 / 64 * variance.sum())
    assert float(price) == pytest.approx(float(exact), rel=0.04)


def test_the_token_price_compares_rollouts_of_the_same_image_only() -> None:
    """An offset of an image's errors, however large, is no price."""
    generator = torch.Generator().manual_seed(0)
    error, fraction, score = (torch.rand(6, 4, generator=generator) for _ in range(3))
    fraction = fraction + score
    shifted = error + torch.tensor([100.0, -50, 0, 7])
    torch.testing.assert_close(
        token_price(shifted, fraction, score), token_price(error, fraction, score), atol=1e-3, rtol=1e-3
    )


# ---------------------------------------------------------------- warm start


def test_tau_rises_when_the_labels_spend_too_much() -> None:
    threshold = Threshold(0.2, lr=0.1, budget=0.5)
    threshold.update(0.8)
    assert threshold.tau == pytest.approx(0.23)
    threshold.update(0.3)
    assert threshold.tau == pytest.approx(0.21)
    twin = Threshold(0.0, lr=0.1, budget=0.5)
    twin.load_state_dict(threshold.state_dict())
    assert twin.tau == threshold.tau


@given(cases(largest=6, most_images=2), seeds)
def test_pseudo_labels_are_the_loop(case: Case, seed: int) -> None:
    base = random_pyramid(case.grid, case.batch, 6, seed)
    pyramid = Pyramid(base.levels, case.grid, case.valid)
    tau = 0.55
    labels = pseudo_labels(pyramid, tau)
    inside = [case.holds_picture]
    for _ in range(case.grid.stages):
        below = inside[-1]
        inside.append(below[:, ::2, ::2] | below[:, 1::2, ::2] | below[:, ::2, 1::2] | below[:, 1::2, 1::2])
    for s in range(1, case.grid.stages + 1):
        rows, cols = case.grid.shape(s)
        for image, i, j in itertools.product(range(case.batch), range(rows), range(cols)):
            parent = pyramid.levels[s][image, i * cols + j]
            d = [0.0]
            for y, x in itertools.product((2 * i, 2 * i + 1), (2 * j, 2 * j + 1)):
                if inside[s - 1][image, y, x]:
                    child = pyramid.levels[s - 1][image, y * 2 * cols + x]
                    cosine = float(parent @ child) / (float(parent.norm()) * float(child.norm()))
                    d.append((1 - cosine) / 2)
            if abs(max(d) - tau) > 1e-5:
                assert bool(labels.masks[s - 1][image, i, j]) == (max(d) > tau)


@given(cases(largest=6, most_images=3), seeds)
def test_imitation_loss_is_the_loop_over_parents_that_exist(case: Case, seed: int) -> None:
    logits = random_logits(case.grid, case.batch, seed)
    leaf = leaf_scale(case.splits)
    terms = []
    for s in range(1, case.grid.stages + 1):
        rows, cols = case.grid.shape(s)
        logit = logits[s - 1].unflatten(1, (rows, cols))
        for image, i, j in itertools.product(range(case.batch), range(rows), range(cols)):
            block = case.holds_picture[image, i << s : (i + 1) << s, j << s : (j + 1) << s]
            if block.any() and int(leaf[image, i << s, j << s]) <= s:  # it is a leaf or was split
                label = case.masks[s - 1][image, i, j].float()
                terms.append(F.binary_cross_entropy_with_logits(logit[image, i, j], label))
    expected = torch.stack(terms).mean()
    torch.testing.assert_close(imitation_loss(logits, case.splits, case.valid), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("budget", [0.4, 0.6, 0.8])
@pytest.mark.parametrize("stages", [1, 2])
def test_the_first_tau_meets_the_budget(budget: float, stages: int) -> None:
    grid = Grid((12, 16), stages)
    pyramid = random_pyramid(grid, 8, 16, seed=4)
    fraction = build_layout(pseudo_labels(pyramid, start_tau([pyramid], budget))).token_fraction.mean()
    # one more parent over tau may bring its four children with it
    assert float(fraction) == pytest.approx(budget, abs=(3 if stages == 1 else 15) / (192 * 8) + 1e-6)


def test_imitation_learns_the_cosine_rule() -> None:
    model = student(2, seed=3)
    picture = images(16, 64)
    with torch.no_grad():
        pyramid = model.pyramid(picture)
        # labels that a linear policy can express: the sign of one direction
        masks = tuple((pyramid.levels[s] @ HIDDEN_WEIGHT > 0).unflatten(1, pyramid.grid.shape(s)) for s in (1, 2))
    labels = Splits(masks, pyramid.grid)
    optimizer = torch.optim.Adam(model.policy.parameters(), lr=0.1)
    losses = []
    for _ in range(60):
        loss = imitation_loss(model.logits(pyramid, picture), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
    assert all(p.grad is None for p in model.vit.parameters())


def test_an_estimator_without_losses_says_so() -> None:
    from split_core.learn.estimator import Estimator, Lesson

    with pytest.raises(NotImplementedError, match="Estimator does not define losses"):
        Estimator().losses(wrap(tiny_vit(), Bright()), Lesson(images(1), lambda features: torch.zeros(1)))
