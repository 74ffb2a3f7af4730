"""Chunked log-probabilities against the plain softmax: values, gradients, the memory that is kept, a cut vocabulary."""

import math
import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from molt_core.train.logprobs import ActionDistribution, action_logprobs

NOTHING = torch.tensor([], dtype=torch.long)
EXCLUDED = torch.tensor([0, 7, 39])


def case(tokens: int = 50, hidden: int = 16, vocabulary: int = 40, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden, generator=generator).to(dtype).requires_grad_()
    ids = torch.randint(1, 7, (tokens,), generator=generator)
    return states, weight, ids


def plain(states, weight, ids, distribution):
    """The textbook way, all tokens at once."""
    allowed = torch.ones(len(weight), dtype=torch.bool)
    allowed[distribution.excluded_ids] = False
    logits = (states @ weight.T) / distribution.temperature
    logits = torch.where(allowed, logits, -torch.inf)
    entropy = torch.distributions.Categorical(logits=logits[:, allowed]).entropy()
    return logits.log_softmax(-1).gather(1, ids[:, None]).squeeze(1), entropy


def of_logits(logits, ids, distribution):
    """With the identity as the output layer's input, its weight's rows are the logits."""
    return action_logprobs(torch.eye(len(ids)), torch.tensor(logits).T, ids, distribution)


def test_excluded_ids_have_no_share_in_the_distribution():
    # Probabilities 1/2, 1/4, 1/4 over ids 0, 1, 2. Without id 0: 1/2 each; entropy log 2.
    logits = [[math.log(0.5), math.log(0.25), math.log(0.25)]]
    distribution = ActionDistribution(1.0, torch.tensor([0]))
    logprobs, entropy = of_logits(logits, torch.tensor([1]), distribution)
    assert logprobs.item() == pytest.approx(math.log(1 / 2))
    assert entropy.item() == pytest.approx(math.log(2))


def test_an_id_that_the_vocabulary_lacks_is_never_sampled():
    logprobs, _ = of_logits(
        [[0.0, 0.0]] * 2, torch.tensor([1, 2]), ActionDistribution(1.0, NOTHING)
    )
    assert logprobs.tolist() == [pytest.approx(math.log(0.5)), -math.inf]


def test_temperature_divides_the_logits():
    # Logits 0 and log 4 at temperature 2: 0 and log 2, so 1/3 and 2/3.
    distribution = ActionDistribution(2.0, NOTHING)
    logprobs, _ = of_logits([[0.0, math.log(4)]], torch.tensor([1]), distribution)
    assert logprobs.item() == pytest.approx(math.log(2 / 3))


@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
def test_any_chunk_gives_the_plain_values_and_gradients(chunk):
    distribution = ActionDistribution(0.7, EXCLUDED)
    states, weight, ids = case()
    upstream = torch.linspace(-1, 2, 2 * len(ids)).split(len(ids))
    expected = plain(states, weight, ids, distribution)
    gradients = torch.autograd.grad(expected, (states, weight), upstream)
    found = action_logprobs(states, weight, ids, distribution, chunk_tokens=chunk)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-6)
    found = torch.autograd.grad(found, (states, weight), upstream)
    torch.testing.assert_close(found, gradients, atol=2e-5, rtol=1e-5)


def test_gradients_equal_finite_differences_in_float64():
    states, weight, ids = case(tokens=5, hidden=3, vocabulary=9, dtype=torch.float64)
    distribution = ActionDistribution(1.3, torch.tensor([0, 8]))
    assert torch.autograd.gradcheck(
        lambda h, w: action_logprobs(h, w, ids, distribution, chunk_tokens=2), (states, weight)
    )


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation made inside."""

    elements = 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        out = operation(*arguments, **(options or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("tokens", [64, 512])
def test_no_tensor_of_all_tokens_and_the_vocabulary_is_made_or_kept(tokens):
    vocabulary, chunk = 1000, 16
    states, weight, ids = case(tokens, 4, vocabulary)
    kept = []
    with (
        LargestTensor() as seen,
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.numel()) or t, lambda t: t
        ),
    ):
        logprobs, entropy = action_logprobs(
            states, weight, ids, ActionDistribution(1.0, NOTHING), chunk_tokens=chunk
        )
        torch.autograd.backward([logprobs.sum() + entropy.sum()])
    assert sum(kept) < weight.numel() + states.numel() + 2 * tokens
    assert seen.elements == chunk * vocabulary  # the plain way makes tokens * vocabulary


def test_no_token_at_all_still_reaches_the_weights():
    states, weight, ids = case(tokens=0)
    logprobs, entropy = action_logprobs(states, weight, ids, ActionDistribution(1.0, EXCLUDED))
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None and not weight.grad.any()


def test_bfloat16_sums_the_weights_gradient_in_float32():
    """Chunk after chunk rounded to 8 bits would lose what is added to what is already there."""
    states, weight, ids = case(tokens=512, dtype=torch.bfloat16)
    distribution = ActionDistribution(1.0, EXCLUDED)
    gradients = []
    for chunk in (512, 1):
        logprobs, _ = action_logprobs(states, weight, ids, distribution, chunk_tokens=chunk)
        gradients.append(torch.autograd.grad(logprobs.sum(), weight)[0].float())
    whole, one_by_one = gradients
    assert float((one_by_one - whole).norm() / whole.norm()) < 2e-3


def _rank(rank: int, file: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    states, weight, ids = case()
    shard = weight.detach().chunk(2)[rank].clone().requires_grad_()
    distribution = ActionDistribution(0.7, EXCLUDED)
    found = action_logprobs(states, shard, ids, distribution, dist.group.WORLD, chunk_tokens=7)
    (found[0].sum() + found[1].square().sum()).backward()
    torch.save([t.detach() for t in (*found, states.grad, shard.grad)], f"{out}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.distributed
def test_a_vocabulary_cut_over_two_ranks_gives_the_same_values_and_gradients(tmp_path):
    states, weight, ids = case()
    logprobs, entropy = plain(states, weight, ids, ActionDistribution(0.7, EXCLUDED))
    (logprobs.sum() + entropy.square().sum()).backward()
    context = multiprocessing.get_context("spawn")
    arguments = (str(tmp_path / "store"), str(tmp_path))
    ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    for rank, shard_gradient in enumerate(weight.grad.chunk(2)):
        expected = [logprobs, entropy, states.grad, shard_gradient]
        found = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(found, [t.detach() for t in expected], atol=3e-5, rtol=1e-5)
