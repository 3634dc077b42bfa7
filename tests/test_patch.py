"""`patch`, `patched`, `unpatch`: instances change class, and nothing else changes."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fusedops


class OwnNorm(nn.LayerNorm):
    """A user's subclass: its forward may be anything."""


class FamilyRMSNorm(nn.Module):
    """A norm by name only, as model libraries have them."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.RMSNorm(8), OwnNorm(8), nn.BatchNorm1d(8))


def test_exact_torch_classes_are_replaced_and_the_rest_is_left_with_reasons():
    model = make_model().append(FamilyRMSNorm())
    assert fusedops.patch(model, verbose=False) is model
    assert type(model[1]) is fusedops.nn.LayerNorm
    assert type(model[3]) is fusedops.nn.RMSNorm
    report = fusedops.patched(model)
    assert report.replaced == {"1": "fusedops.nn.LayerNorm", "3": "fusedops.nn.RMSNorm"}
    assert "OwnNorm is a subclass of nn.LayerNorm" in report.left["4"]
    assert "FamilyRMSNorm is not torch's own class" in report.left["6"]
    assert report.left.keys() == {"4", "6"}
    assert "2 modules replaced, 2 left" in str(report)


def test_parameters_names_hooks_and_state_dict_stay():
    model = make_model()
    calls = []
    model[1].register_forward_hook(lambda module, args, output: calls.append(type(module)))
    before, state = dict(model.named_parameters()), model.state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fusedops.patch(model, verbose=False)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is param for name, param in before.items())
    assert model.state_dict().keys() == state.keys()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    assert calls == [fusedops.nn.LayerNorm]


def test_outputs_and_gradients_agree_with_the_original():
    model = make_model().double()
    twin = fusedops.patch(copy.deepcopy(model), verbose=False)
    x = torch.randn(5, 8, dtype=torch.float64)
    for each in (model, twin):
        each(x).square().sum().backward()
    torch.testing.assert_close(twin(x), model(x))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)


def test_patching_twice_changes_nothing_and_unpatch_restores():
    model = make_model()
    before = [(type(m), set(m.__dict__)) for m in model.modules()]
    fusedops.patch(model, verbose=False)
    once = [(type(m), set(m.__dict__)) for m in model.modules()], str(fusedops.patched(model))
    fusedops.patch(model, verbose=False)
    assert ([(type(m), set(m.__dict__)) for m in model.modules()], str(fusedops.patched(model))) == once
    assert fusedops.unpatch(model) is model
    assert [(type(m), set(m.__dict__)) for m in model.modules()] == before
    assert fusedops.unpatch(model) is model


def test_a_users_own_fused_norm_is_no_business_of_patch():
    model = nn.Sequential(fusedops.nn.LayerNorm(8), nn.LayerNorm(8))
    fusedops.patch(model, verbose=False)
    assert fusedops.patched(model).replaced.keys() == {"1"}
    fusedops.unpatch(model)
    assert type(model[0]) is fusedops.nn.LayerNorm


def test_ops_skip_and_filter_fn_choose():
    report = fusedops.patched(fusedops.patch(make_model(), ops=["rms_norm"], verbose=False))
    assert report.replaced.keys() == {"3"}
    assert report.left["1"] == "layer_norm is not among ops"

    report = fusedops.patched(
        fusedops.patch(nn.ModuleDict({"a": make_model(), "b": make_model()}), skip=["b.*"], verbose=False)
    )
    assert report.replaced.keys() == {"a.1", "a.3"}
    assert report.left["b.1"] == "named in skip"

    model = fusedops.patch(make_model(), filter_fn=lambda name, module: isinstance(module, nn.RMSNorm), verbose=False)
    assert fusedops.patched(model).left["1"] == "filter_fn returned False"
    fusedops.patch(model, verbose=False)
    assert fusedops.patched(model).replaced.keys() == {"1", "3"}


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"ops: expected names among layer_norm, rms_norm, got 'lion'"):
        fusedops.patch(make_model(), ops=["lion"])
    with pytest.raises(ValueError, match="ops: expected a list"):
        fusedops.patch(make_model(), ops="layer_norm")
    for skip in ("1", [1], ["1", None], 1, None):
        with pytest.raises(ValueError, match="skip: expected a list of module names, got "):
            fusedops.patch(make_model(), skip=skip)
    for ops in ([1], [["rms_norm"]], 1):
        with pytest.raises(ValueError, match=r"ops: expected .*, got "):
            fusedops.patch(make_model(), ops=ops)
    with pytest.raises(ValueError, match="filter_fn: expected a function or None, got True"):
        fusedops.patch(make_model(), filter_fn=True)
    for call in (fusedops.patch, fusedops.patched, fusedops.unpatch):
        for model in (None, nn.LayerNorm, [make_model()]):
            with pytest.raises(ValueError, match="model: expected a module, got "):
                call(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_what_is_patched_can_be_scripted(norm):
    module, x = norm(8), torch.randn(4, 8)
    nn.init.normal_(module.weight)
    torch.jit.script(module)  # which leaves an attribute of its own on any module
    before, want = set(vars(module)), module(x)
    fusedops.patch(module, verbose=False)
    torch.testing.assert_close(torch.jit.script(nn.Sequential(module))(x), want)
    fusedops.unpatch(module)
    assert (type(module), set(vars(module))) == (norm, before)
    torch.testing.assert_close(torch.jit.script(module)(x), want)


def test_post_norm_layers_and_replaced_forwards_are_left():
    layers = nn.ModuleDict(
        {
            "post": nn.TransformerEncoderLayer(8, 2, 16),
            "pre": nn.TransformerEncoderLayer(8, 2, 16, norm_first=True),
            "wrapped": nn.LayerNorm(8),
        }
    )
    layers["wrapped"].forward = lambda x: x
    report = fusedops.patched(fusedops.patch(layers, verbose=False))
    assert report.replaced.keys() == {"pre.norm1", "pre.norm2"}
    assert "post-norm" in report.left["post.norm1"]
    assert "forward is replaced" in report.left["wrapped"]


def test_what_was_done_is_printed_unless_told_not_to(capsys):
    fusedops.patch(make_model())
    counts, autocast = capsys.readouterr().out.splitlines()
    assert counts == "fusedops.patch: 2 modules replaced, 1 left (print fusedops.patched(model) for why)"
    assert "post-norm" in autocast
    fusedops.patch(make_model(), verbose=False)
    assert capsys.readouterr().out == ""


def test_the_model_itself_may_be_a_norm():
    norm = fusedops.patch(nn.LayerNorm(8), verbose=False)
    assert "(the model itself) → fusedops.nn.LayerNorm" in str(fusedops.patched(norm))


def test_copies_and_pickles_stay_patched_and_can_be_unpatched():
    model = fusedops.patch(make_model(), verbose=False)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert str(fusedops.patched(copied)) == str(fusedops.patched(model))
        assert type(fusedops.unpatch(copied)[1]) is nn.LayerNorm
    assert type(model[1]) is fusedops.nn.LayerNorm


class Twice(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_unpatch_keeps_a_parametrization_made_since():
    model, x = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8)), torch.randn(4, 8)
    fusedops.patch(model, verbose=False)
    parametrize.register_parametrization(model[0], "weight", Twice())
    before = model(x)
    fusedops.unpatch(model)
    assert not any(issubclass(c, fusedops.nn.LayerNorm) for c in type(model[0]).__mro__)
    torch.testing.assert_close(model(x), before)
    torch.testing.assert_close(copy.deepcopy(model)(x), before)
    parametrize.remove_parametrizations(model[0], "weight")
    assert [type(m) for m in model] == [nn.LayerNorm, nn.LayerNorm]
    torch.testing.assert_close(model(x), before)
