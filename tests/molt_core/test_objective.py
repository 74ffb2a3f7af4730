"""The shared objective: the sampled distribution, one weighted sum whatever the split, rollouts none of which is lost."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt_core.algo.aggregation import WeightedRollout
from molt_core.algo.config import AlgorithmConfig, KLConfig
from molt_core.algo.losses import register_loss
from molt_core.config import TrainerConfig
from molt_core.train.collate import MicroBatch, collate
from molt_core.train.logprobs import ActionDistribution, action_logprobs
from molt_core.train.objective import (
    forward_backward,
    row_logprobs,
    score,
    weighted_loss,
)
from molt_core.train.ranks import added
from molt_core.train.routing import Choice
from molt_core.train.split import filler_row, shares
from tests.molt_core.make import trajectory

NOTHING = torch.tensor([], dtype=torch.long)


class Bigram:
    """The least policy there is: the next token's logits are a row of a table. A TrainBackend less what is not used here."""

    def __init__(self, gap: torch.Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(12, 12, generator=generator).requires_grad_()
        self.gap = gap

    def action_logprobs(self, batch: MicroBatch, distribution: ActionDistribution):
        before = batch.token_ids[batch.action_positions - 1]
        return action_logprobs(self.table[before], torch.eye(12), batch.action_ids, distribution)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        loss.backward()

    def routing(self) -> tuple[Choice, ...]:
        if self.gap is None:
            return ()
        experts = torch.zeros(len(self.gap), 1, dtype=torch.long)
        return (Choice(experts, experts, self.gap, experts=2),)


DISTRIBUTION = ActionDistribution(1.3, torch.tensor([0]))
SEGMENTS = [(1,), (4,), (2, 1), (5,), (3,)]
"""Sampled tokens of each segment of each rollout."""


def rollout(number: int, lengths: tuple[int, ...]) -> WeightedRollout:
    """Rows, advantages, weights and reference log-probabilities with no two rollouts alike."""
    rows = tuple(trajectory(prompt=3, actions=n, logprob=-2.0 - n / 10) for n in lengths)
    each = np.arange(sum(lengths), dtype=np.float32)
    return WeightedRollout(
        rows, 1 - number / 2 + each / 9, 0.05 + 0.01 * number + 0 * each, -2.2 + each / 7
    )


ROLLOUTS = [rollout(number, lengths) for number, lengths in enumerate(SEGMENTS)]
CONFIGS = {
    "clipped": AlgorithmConfig(),
    "gspo": AlgorithmConfig(loss="gspo", proximal="rollout", correction="off"),
    "cispo, reference, entropy": AlgorithmConfig(
        loss="cispo", kl=KLConfig(coef=0.3, estimator="k3"), entropy_coef=0.05
    ),
    "sequence mask, behaviour": AlgorithmConfig(
        loss="policy_gradient",
        correction={"level": "sequence", "mode": "mask", "high": 3.0},
        kl=KLConfig(coef=0.3, base="behaviour", estimator="k2"),
    ),
}


def train(
    shares: Iterable, algorithm: AlgorithmConfig, rollouts: Sequence[WeightedRollout] = ROLLOUTS
) -> tuple[dict[str, float], torch.Tensor]:
    """Sums and gradient, both added up over the ranks whose micro-batches ``shares`` gives."""
    sums: dict[str, float] = {}
    gradient = torch.zeros(12, 12)
    for micro_batches in shares:
        backend = Bigram()
        of_rank = forward_backward(
            backend,
            [[rollouts[i] for i in m] for m in micro_batches],
            algorithm=algorithm,
            distribution=DISTRIBUTION,
        )
        gradient += backend.table.grad
        for name, value in of_rank.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums, gradient


def test_loss_and_gradient_are_the_weighted_sum_of_all_terms_written_out_naively():
    # Policy gradient times min(rho, 1.2), plus 0.3 times k2 to the reference times the same, minus 0.05 times the entropy.
    algorithm = AlgorithmConfig(
        loss="policy_gradient",
        correction={"high": 1.2},
        kl=KLConfig(coef=0.3, estimator="k2"),
        entropy_coef=0.05,
    )
    sums, gradient = train([[[0, 1, 2, 3, 4]]], algorithm)
    table, total = Bigram().table, 0.0
    for one in ROLLOUTS:
        tokens = ((row, t) for row in one.segments for t in np.flatnonzero(row.action_mask))
        for n, (row, t) in enumerate(tokens):
            allowed = (table[int(row.token_ids[t - 1])] / 1.3)[1:].log_softmax(0)
            logprob = allowed[int(row.token_ids[t]) - 1]
            rho = min(math.exp(logprob.item() - row.logprobs[t]), 1.2)
            term = -one.advantages[n] * logprob * rho
            term = term + 0.3 * (logprob - one.reference_logprobs[n]) ** 2 / 2 * rho
            term = term + 0.05 * (allowed.exp() * allowed).sum()
            total = total + one.weights[n] * term
    assert sums["loss"] == pytest.approx(total.item(), rel=1e-5)
    torch.testing.assert_close(gradient, torch.autograd.grad(total, table)[0])


@pytest.mark.parametrize("algorithm", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "shares",
    [
        [[[0], [1], [2], [3], [4]]],
        [[[3, 4], [0, 1, 2]]],
        [[[0, 1]], [[2, 3, 4]]],
        [[[0], [1]], [[2, 3], [4]]],
        [[[4]], [[3]], [[2]], [[0, 1]]],
    ],
    ids=["five micro-batches", "two uneven", "two ranks", "two ranks of two", "four ranks"],
)
def test_loss_gradient_and_sums_do_not_depend_on_the_split(shares, algorithm):
    whole_sums, whole_gradient = train([[[0, 1, 2, 3, 4]]], algorithm)
    sums, gradient = train(shares, algorithm)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-5, atol=1e-6)
    assert sums == pytest.approx(whole_sums, rel=1e-5)


def test_only_the_distance_to_the_reference_is_weighed_by_importance():
    # log pi -1, -2; behaviour -1, -3: ratios 1 and e, truncated to 2; reference -1.5, -1: k3 0.106531 and 0.718282.
    row = trajectory(prompt=3, actions=2)
    behaviour = row.logprobs.copy()
    behaviour[-2:] = -1.0, -3.0
    arrays = (np.ones(2, np.float32), np.ones(2, np.float32), np.array([-1.5, -1.0], np.float32))
    one = WeightedRollout((replace(row, logprobs=behaviour),), *arrays)
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    algorithm = AlgorithmConfig(kl=KLConfig(coef=0.1))
    _, found = weighted_loss(
        [one], collate(one.segments), logprobs, torch.tensor([0.4, 0.6]), algorithm
    )
    sums = {name: float(values.double().sum()) for name, values in found.items()}
    assert sums["kl_reference"] == pytest.approx(0.106531 + 2 * 0.718282, abs=1e-5)
    assert sums["kl"] == pytest.approx(0.718282, abs=1e-5)  # of behaviour and policy: 0, e - 2
    assert sums["entropy"] == pytest.approx(1.0)
    assert sums["importance_ratio"] == pytest.approx(1 + math.e, abs=1e-5)
    assert (sums["importance_weight"], sums["importance_weight_squared"]) == (3.0, 5.0)
    assert (sums["importance_truncated"], sums["tokens_kept"]) == (1.0, 2.0)


@pytest.mark.parametrize(("proximal", "correction"), [("current", "tis"), ("rollout", "off")])
def test_importance_is_shown_whoever_applies_it(proximal, correction):
    # log pi -1, -2, -3; behaviour -1, -2.5, -3.5: ratios 1, e^0.5, e^0.5, the correction's weights or the loss's own.
    (row,) = rollout(0, (3,)).segments
    behaviour = row.logprobs.copy()
    behaviour[row.action_mask] = [-1.0, -2.5, -3.5]
    arrays = (np.ones(3, np.float32), np.full(3, 1 / 3, np.float32), None)
    one = WeightedRollout((replace(row, logprobs=behaviour),), *arrays)
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    config = AlgorithmConfig(proximal=proximal, correction=correction)
    batch = collate(one.segments, [one.advantages])
    _, found = weighted_loss([one], batch, logprobs, torch.zeros(3), config)
    ratios = [1.0, math.exp(0.5), math.exp(0.5)]
    assert found["importance_ratio"].tolist() == pytest.approx(ratios)
    assert found["importance_weight"].tolist() == pytest.approx(ratios)
    assert found["importance_weight_squared"].tolist() == pytest.approx([r * r for r in ratios])


@register_loss("one_mean")
def one_mean(tokens, config):
    return (tokens.advantages * tokens.logprobs).mean(), {}


@register_loss("one_column")
def one_column(tokens, config):
    return (tokens.advantages * tokens.logprobs)[:, None], {}


@register_loss("a_share")
def a_share(tokens, config):
    return tokens.advantages * tokens.logprobs, {"share": (tokens.advantages > 0).float().mean()}


@register_loss("our_name")
def our_name(tokens, config):
    return tokens.advantages * tokens.logprobs, {"entropy": tokens.advantages}


@register_loss("a_field")
def a_field(tokens, config):
    return tokens.advantages * tokens.logprobs, {"step": tokens.advantages}


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("one_mean", r"one_mean returned loss of shape \[\] for 3 tokens"),
        ("one_column", r"one_column returned loss of shape \[3, 1\]"),
        ("a_share", r"a_share returned share of shape \[\]"),
        ("our_name", "our_name returned an indicator entropy, which is a metric already"),
        ("a_field", "a_field returned an indicator step, which is a metric already"),
    ],
)
def test_what_a_users_loss_gets_wrong_is_named(loss, said):
    weighted = rollout(0, (3,))
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    config = AlgorithmConfig(loss=loss, plugins=("mine.py",))
    batch = collate(weighted.segments, [weighted.advantages])
    with pytest.raises(ValueError, match=said):
        weighted_loss([weighted], batch, logprobs, torch.zeros(3), config)


@pytest.mark.parametrize("loss", ["clipped", "gspo", "cispo", "policy_gradient"])
def test_a_token_that_the_correction_rejects_has_no_gradient_in_any_loss(loss):
    # IcePop rejects the middle one, whose probability is e^5 times the engine's; the others are on policy: -A / 3 each.
    (row,) = rollout(0, (3,)).segments
    behaviour = row.logprobs.copy()
    behaviour[row.action_mask] = [-1.0, -7.0, -1.0]
    arrays = (np.ones(3, np.float32), np.full(3, 1 / 3, np.float32), None)
    one = WeightedRollout((replace(row, logprobs=behaviour),), *arrays)
    logprobs = torch.tensor([-1.0, -2.0, -1.0], requires_grad=True)
    config = AlgorithmConfig(loss=loss, correction="icepop")
    batch = collate(one.segments, [one.advantages])
    value, found = weighted_loss([one], batch, logprobs, torch.zeros(3), config)
    value.backward()
    assert logprobs.grad.tolist() == pytest.approx([-1 / 3, 0.0, -1 / 3])
    assert found["tokens_kept"].tolist() == [True, False, True]


def test_a_rollout_of_several_segments_has_one_ratio():
    # Segments of 2 and 1 tokens, ids 3, 4 and 3: one geometric mean over all three, clipped as one.
    (one,) = train_on = [ROLLOUTS[2]]
    sums, _ = train([[[0]]], CONFIGS["gspo"], train_on)
    found = np.concatenate(row_logprobs(Bigram(), one.segments, DISTRIBUTION))
    sampled = np.concatenate([row.logprobs[row.action_mask] for row in one.segments])
    ratio = math.exp((found - sampled).mean())
    bounded = min(max(ratio, 0.8), 1.28)
    terms = [min(ratio * a, bounded * a) for a in one.advantages]
    assert sums["loss"] == pytest.approx(-float(one.weights[0]) * sum(terms), rel=1e-5)


@given(order=st.permutations(range(5)))
def test_the_order_of_rollouts_does_not_matter(order):
    whole_sums, whole_gradient = train([[range(5)]], CONFIGS["gspo"])
    sums, gradient = train([[order]], CONFIGS["gspo"])
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-5, atol=1e-6)
    assert sums == pytest.approx(whole_sums, rel=1e-5)


def test_a_row_of_context_between_the_others_changes_nothing():
    context = WeightedRollout((trajectory(prompt=11, actions=0),), *np.zeros((3, 0), np.float32))
    sums, gradient = train([[range(5)]], CONFIGS["clipped"])
    more_sums, found = train([[range(6)]], CONFIGS["clipped"], [context, *ROLLOUTS])
    torch.testing.assert_close(found, gradient, rtol=0, atol=0)
    assert more_sums == sums


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_the_policy_says_where_nothing_was_sampled_is_never_read(value):
    # Ids 0 and 1 stand in prompts only, and 8 to 11 in no row: none of them precedes a sampled token.
    backend = Bigram()
    with torch.no_grad():
        backend.table[[0, 1, 8, 9, 10, 11]] = value
    sums = forward_backward(
        backend, [ROLLOUTS], algorithm=CONFIGS["clipped"], distribution=DISTRIBUTION
    )
    whole_sums, whole_gradient = train([[range(5)]], CONFIGS["clipped"])
    assert sums == whole_sums
    assert torch.equal(backend.table.grad, whole_gradient)


def test_a_correction_that_rejects_every_token_keeps_none_and_leaves_no_gradient():
    algorithm = AlgorithmConfig(correction={"mode": "mask", "gate": "tv", "high": 1e-9})
    sums, gradient = train([[range(5)]], algorithm)
    assert (sums["tokens"], sums["tokens_kept"], sums["loss"]) == (16, 0, 0)
    assert not gradient.any()


def test_a_filler_row_adds_nothing():
    backend = Bigram()
    sums = forward_backward(
        backend,
        [[WeightedRollout((filler_row(ROLLOUTS[0].segments[0]),), *np.zeros((2, 0), np.float32))]],
        algorithm=CONFIGS["clipped"],
        distribution=DISTRIBUTION,
    )
    assert sums["tokens"] == 0 and sums["loss"] == 0
    assert not backend.table.grad.any()


class RoutedBigram(Bigram):
    """With a router of four experts: each token goes to the next one by its id, and to the one after."""

    def action_logprobs(self, batch: MicroBatch, distribution: ActionDistribution):
        self.ids = batch.token_ids
        return super().action_logprobs(batch, distribution)

    def routing(self) -> tuple[Choice, ...]:
        experts = torch.stack([self.ids % 4, (self.ids + 1) % 4], -1)
        return (Choice(experts, experts, torch.ones(len(experts)), experts=4),)


@pytest.mark.parametrize("data_size", [1, 2, 5, 8])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_what_a_step_worked_on_is_counted_alike_on_any_number_of_ranks(data_size, rows):
    def with_record(one: WeightedRollout) -> WeightedRollout:
        def recorded(row):
            record = np.full((len(row.token_ids), 1, 2), [0, 1], np.int16)
            record[-1] = -1
            return replace(row, routed_experts=record)

        return one._replace(segments=tuple(map(recorded, one.segments)))

    split = shares(
        [with_record(one) for one in ROLLOUTS], data_size, TrainerConfig(micro_batch_rows=rows)
    )
    sums = added(
        forward_backward(
            RoutedBigram(), share, algorithm=CONFIGS["clipped"], distribution=DISTRIBUTION
        )
        for share in split
    )
    # Prompts of 3 and 1, 4, 2 and 1, 5, 3 sampled tokens: lengths 4, 7, 5, 4, 8, 6 of the ids 0, 1, 2 ...
    assert (sums["tokens"], sums["tokens_forward"]) == (16, 34)
    ids = [token for length in (4, 7, 5, 4, 8, 6) for token in range(length)]
    loads = [sum(e in (t % 4, (t + 1) % 4) for t in ids) for e in range(4)]
    assert sums["expert_tokens"].tolist() == [loads]
    # All but each row's last token are recorded, with experts 0 and 1: six ids 0 go there, and three ids 4.
    assert sums["router_recorded"] == 34 - 6
    assert sums["router_changed"].tolist() == [34 - 6 - 6 - 3]


def test_tokens_from_the_first_router_tie_on_are_tied():
    # Prompt of 3 and 4 actions at columns 3..6; the router ties at column 4, which predicts column 5.
    gap = torch.ones(7)
    gap[4] = 1e-7
    options = dict(distribution=ActionDistribution(1.0, NOTHING), tie_gap=1e-5)
    _, _, tied = score(Bigram(gap), [trajectory(prompt=3, actions=4)], **options)
    assert tied.tolist() == [False, False, True, True]


def test_row_log_probabilities_come_back_by_row():
    rows = [segment for one in ROLLOUTS for segment in one.segments]
    found = row_logprobs(Bigram(), rows, DISTRIBUTION)
    assert [len(values) for values in found] == [1, 4, 2, 1, 5, 3]
    # All rows go through the same ids, so the longest one's log-probabilities begin each other's.
    assert all(np.array_equal(values, found[4][: len(values)]) for values in found)
