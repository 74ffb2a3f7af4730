"""What a trainer rank sends: everything once, and from then on what it steps."""

import torch

from molt_core.rollout import refit
from molt_core.train.worker import TrainerRank
from tests.molt_core.make import weight


class Backend:
    frozen = frozenset({"gate"})

    def weights(self, leave_out=frozenset()):
        return [weight(n, torch.zeros(2)) for n in ("gate", "norm") if n not in leave_out]


def test_frozen_weights_are_sent_the_first_time_only(monkeypatch):
    sent = []

    def send(group, weights, announce, expected_names):
        sent.append(([one.name for one in weights], expected_names))

    monkeypatch.setattr(refit, "send", send)
    rank = TrainerRank.__new__(TrainerRank)  # the parts that a refit uses
    rank.rank, rank.backend, rank.refit_group = 0, Backend(), None
    rank.engines_know, rank.expected_names = frozenset(), frozenset({"gate", "norm"})
    for _ in range(3):
        rank.send_weights([])
    assert sent == [(["gate", "norm"], {"gate", "norm"})] + [(["norm"], {"norm"})] * 2
