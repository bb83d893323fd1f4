"""Which optimizer updates which weights of a head, and what Muon's steps are."""

from __future__ import annotations

import pytest
import torch

from draftlayers.optimizers import make_optimizers, updated
from draftlayers.project import UserError
from tests.helpers import new_head, training_data


@pytest.fixture
def head(target, tmp_path):
    return new_head(target, training_data(target, tmp_path), fc_norm=True, head_layers=2)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_each_weight_has_one_optimizer(head, kind, frozen):
    head.lm_head.requires_grad_(not frozen)
    optimizers = make_optimizers(head, kind, 1e-3, (0.9, 0.95), 0.0)
    names = {id(p): name for name, p in head.named_parameters()}
    adamw, *muon = ([names[id(p)] for p in updated(o)] for o in optimizers)
    learning = {name for name, p in head.named_parameters() if p.requires_grad}
    assert sorted([*adamw, *(name for some in muon for name in some)]) == sorted(learning)
    if kind == "muon":
        outside = {name for name in learning if "norm" in name or name == "lm_head.weight"}
        assert set(adamw) == outside and len(muon[0]) == 1 + 2 * 7
    else:
        assert not muon


def test_muon_steps_along_all_directions_alike_and_as_far_as_adamw(head):
    """Its step is the gradient with all singular values near one, 0.2 in root mean square."""
    rate, weight = 1e-3, head.midlayer.mlp.down_proj.weight
    _, muon = make_optimizers(head, "muon", rate, (0.9, 0.95), 0.0)
    before = weight.detach().clone()
    generator = torch.Generator().manual_seed(0)
    for p in head.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    muon.step()
    step = (before - weight.detach()) / rate
    u, s, v = torch.linalg.svd(weight.grad, full_matrices=False)
    assert step.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.25)
    own = torch.linalg.svdvals(step)
    assert own.max() / own.min() < 2.5 < s.max() / s.min()
    assert torch.nn.functional.cosine_similarity(step.flatten(), (u @ v).flatten(), 0) > 0.95


def test_unknown_optimizers_are_refused(head):
    with pytest.raises(UserError, match="'sgd': expected adamw or muon"):
        make_optimizers(head, "sgd", 1e-3, (0.9, 0.95), 0.0)
