"""A transformers policy that answers one question: how probable, and how sure, was each sampled token?

And a critic on the same backbone that answers another: what return was to be expected before each of them?
"""

from __future__ import annotations

import torch
from torch import nn

from molt_core.models.layout import decoder_of, vision_of
from molt_core.train import attention
from molt_core.train.collate import MicroBatch
from molt_core.train.logprobs import ActionDistribution, action_logprobs
from molt_core.train.routing import install_routers, replay


class ActionPolicy(nn.Module):
    """Wraps a policy; from then on its decoder attends to rows that lie end to end, and routes by ``Router``.

    Its whole forward pass is one call, so that it can be one sharding unit's.
    """

    def __init__(self, policy: nn.Module, routing_replay: bool = False) -> None:
        super().__init__()
        self.policy, self.routing_replay = policy, routing_replay
        self.routers = install_routers(policy)
        decoder_of(policy).set_attn_implementation(attention.NAME)

    def forward(
        self, batch: MicroBatch, distribution: ActionDistribution
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies ``[N]`` of the batch's action tokens, see ``logprobs.action_logprobs``."""
        return action_logprobs(
            self.hidden(batch), self.policy.lm_head.weight, batch.action_ids, distribution
        )

    def hidden(self, batch: MicroBatch) -> torch.Tensor:
        """The decoder's output ``[N, hidden]`` at the positions that predict the batch's action tokens."""
        if self.routing_replay:
            replay(self.routers, batch)
        visual = vision_of(self.policy)
        return self._read(batch) if visual is None else self._see_and_read(visual, batch)

    def _read(self, batch: MicroBatch) -> torch.Tensor:
        check_text_alone(batch)
        # Of text all three axes count alike.
        return self._decoded(batch, position_ids=batch.position_ids[:1])

    def _see_and_read(self, visual: nn.Module, batch: MicroBatch) -> torch.Tensor:
        has_images = batch.patches is not None
        patches, grid = (batch.patches, batch.grid_thw) if has_images else blank_image(visual)
        features = visual(patches.type(visual.dtype), grid_thw=grid, return_dict=True)
        outputs = (features.pooler_output, *features.deepstack_features)
        if has_images:
            pooled, *deepstack = ([output[batch.feature_index]] for output in outputs)
            features.pooler_output, features.deepstack_features = pooled, deepstack
        hidden = self._decoded(
            batch,
            position_ids=batch.position_ids[:, None],
            mm_encoder_outputs={"image": features} if has_images else None,
        )
        if not has_images:
            # The vision tower took part, so that its gradients are zero and not missing and ranks agree on their collectives.
            hidden = hidden + 0.0 * sum(output.sum() for output in outputs)
        return hidden

    def _decoded(self, batch: MicroBatch, **inputs) -> torch.Tensor:
        hidden = self.policy.model(
            input_ids=batch.token_ids[None], use_cache=False, blocks=batch.blocks, **inputs
        ).last_hidden_state[0]
        return hidden[batch.action_positions - 1]


class ValueModel(ActionPolicy):
    """A policy's backbone under one vector in place of its output layer: the value before each sampled token.

    The vector begins at 0, so that no seed decides it and the first values claim nothing. One dimension: by
    ``decay_filter: matrices`` it is not decayed.
    """

    def __init__(self, policy: nn.Module, routing_replay: bool = False) -> None:
        super().__init__(policy, routing_replay)
        self.value_head = nn.Parameter(torch.zeros(policy.lm_head.in_features))
        del policy.lm_head

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Values ``[N]`` float32 of the states in which the batch's action tokens were sampled."""
        return self.hidden(batch).float() @ self.value_head.float()


def check_text_alone(batch: MicroBatch) -> None:
    """Raise ValueError where ``batch`` has images, which a model without a vision tower would pass over in silence."""
    if batch.patches is not None:
        raise ValueError(
            f"{len(batch.grid_thw)} images for a model that reads text alone; take rows without images, or a vision-language "
            "model"
        )


def blank_image(visual: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches and grid of the smallest image: one merged token."""
    config = visual.config
    side = config.spatial_merge_size
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    device = next(visual.parameters()).device
    return (
        torch.zeros(side * side, width, device=device),
        torch.tensor([[1, side, side]], device=device),
    )
