"""What is asked of a sharded parameter is answered right, or refused by its name."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import zerolab
from zerolab import absent, comm, zero
from zerolab.errors import UsageError

NAME = "1.0.weight"


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])


def build(model):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return zerolab.initialize(model=model, config=config)[0]


def on_two_ranks(ask):
    """Ask something of a sharded parameter; return the answers of both ranks."""

    def work():
        engine = build(make_model())
        answer = ask(engine.module.get_parameter(NAME))
        engine.backward(engine(torch.ones(4, 6)).pow(2).mean())  # and training goes on
        engine.step()
        return answer

    return comm.run(work, 2)


READS = {
    "clone": torch.Tensor.clone,
    "float": lambda p: p.detach().float().add(0),
    "double": torch.Tensor.double,
    "sum": torch.Tensor.sum,
    "norm": torch.Tensor.norm,
    "numpy": lambda p: p.detach().numpy(),
    "numpy of it": np.asarray,
    "torch.save": lambda p: torch.save(p, io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "to": lambda p: p.to(torch.bfloat16),
    "half": torch.Tensor.half,
    "index": lambda p: p[0],
    "index of data": lambda p: p.data[0],
    "view": lambda p: p.view(-1),
    "transposed": lambda p: p.T,
    "compared": lambda p: bool((p == 0).all()),
    "tolist": torch.Tensor.tolist,
    "in place": lambda p: p.add_(1),
    "in place on data": lambda p: p.data.zero_(),
    "initialised": nn.init.zeros_,
    "in a product": lambda p: torch.ones(6) @ p,
    "in a list": lambda p: torch.stack([p]),
    "in a vector": lambda p: parameters_to_vector([p]),
    "in a layer": lambda p: nn.functional.linear(torch.ones(1, 6), p),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_of_values_is_refused_with_name_rule_and_remedy(read):
    def ask(param):
        with pytest.raises(UsageError) as caught:
            READS[read](param)
        return str(caught.value)

    for message in on_two_ranks(ask):
        assert f"needs the values of parameter '{NAME}'" in message
        assert "sharded outside of forward and backward" in message
        assert "with zero.GatheredParameters(param):" in message and "modifier_rank=0" in message


ANSWERS = {
    "shape": lambda p: (*p.shape, p.numel(), p.dim(), len(p), p.nbytes, p.element_size()),
    "shape of data": lambda p: (p.data.shape, p.detach().dtype, p.data.numel()),
    "kind": lambda p: (p.dtype, p.device, p.type(), p.is_leaf, p.requires_grad, p.grad),
    "the same": lambda p: (p.to("cpu") is p, p.float() is p, p.cpu() is p, p in {p}),
    "zeros": lambda p: torch.zeros_like(p).tolist() + p.new_zeros(2).tolist(),
    "is floating": torch.is_floating_point,
    "optimizer": lambda p: len(torch.optim.Adam([p]).param_groups),
    "is a parameter": lambda p: isinstance(p, nn.Parameter),
}


@pytest.mark.parametrize("question", ANSWERS)
def test_what_needs_no_values_is_answered_as_before(question):
    expected = ANSWERS[question](make_model().get_parameter(NAME))
    assert on_two_ranks(ANSWERS[question]) == [expected] * 2


def test_a_sharded_parameter_prints_its_name_and_shape():
    for text in on_two_ranks(lambda p: (repr(p), f"{p}", str(p.data))):
        assert set(text) == {
            f"Parameter '{NAME}' sharded: no values here of shape (6, 6), dtype=torch.float32"
        }


def test_gathered_parameters_are_ordinary_and_absent_again_after():
    def ask(param):
        with zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
            inside = type(param), param.norm().item(), copy.deepcopy(param).sum().item()
            param.mul_(2)
        with zero.GatheredParameters(param):
            return inside, param.norm().item(), type(param)

    weight = make_model().get_parameter(NAME)
    expected = (nn.Parameter, weight.norm().item(), weight.sum().item())
    for inside, doubled, _ in on_two_ranks(ask):
        assert inside == expected and doubled == pytest.approx(2 * expected[1])


def test_parameters_are_ordinary_while_the_model_runs():
    def work():
        engine, seen = build(make_model()), []
        layer = engine.module[1][0]
        layer.register_forward_hook(lambda *_: seen.append(type(layer._parameters["weight"])))
        engine(torch.ones(4, 6))
        return [*seen, type(engine.module.get_parameter(NAME))]

    assert comm.run(work, 2) == [[nn.Parameter, absent.AbsentParameter]] * 2


class Lists(nn.Module):
    """It keeps its weights in a plain list as well, which no dictionary of parameters sees."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.weights = list(self.layers.parameters())[::2]

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(torch.matmul(x, weight))
        return x.pow(2).mean()


def test_a_weight_reached_past_its_module_is_borrowed_while_the_model_runs():
    def work():
        engine, losses = build(Lists()), []
        for _ in range(2):
            losses.append(engine(torch.ones(4, 6)))
            engine.backward(losses[-1])
            engine.step()
        return losses[-1].item(), engine.module_state_dict()

    model = Lists()
    sgd, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        sgd.zero_grad()
        losses.append(model(torch.ones(4, 6)))
        losses[-1].backward()
        sgd.step()
    for loss, state in comm.run(work, 2):
        assert loss == pytest.approx(losses[-1].item())
        torch.testing.assert_close(state, dict(model.state_dict()))


def test_a_parameter_whose_engine_is_gone_is_told_by_its_shape():
    def work():
        model = make_model()
        build(model)
        with pytest.raises(UsageError, match=r"parameter of shape \(6, 6\), .*keep the engine"):
            model.get_parameter(NAME).sum()

    comm.run(work, 2)


def test_a_write_through_an_optimizer_of_the_script_is_refused_by_name():
    def ask(param):
        own = torch.optim.SGD([param], lr=0.1)
        param.grad = torch.ones(6, 6)
        with pytest.raises(UsageError, match=f"parameter '{NAME}'"):
            own.step()
        param.grad = None

    on_two_ranks(ask)


# -- transforms of torch.func, which wrap tensors -------------------------------------------


class Slope(nn.Module):
    """The loss has a derivative in it, taken by a transform around units of the model."""

    def __init__(self, derivative):
        super().__init__()
        self.model = make_model()
        self.derivative = derivative

    def forward(self, x):
        return self.model(x).pow(2).mean() + self.derivative(self.model, x).pow(2).mean()


# torch.func.jvp itself imports a module that warns of torch.jit.
jvp_warns = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

DERIVATIVES = {
    "grad": lambda model, x: torch.func.grad(lambda a: model(a).pow(2).sum())(x),
    "jacobian": lambda model, x: torch.func.vmap(torch.func.jacrev(model))(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
}


@jvp_warns
@pytest.mark.parametrize(
    ("name", "world_size"), [("grad", 2), ("jacobian", 2), ("jvp", 1), ("grad", 1)]
)
def test_a_transform_around_sharded_units_gives_what_torch_gives(name, world_size):
    def work():
        engine = build(Slope(DERIVATIVES[name]))
        for _ in range(2):
            engine.backward(engine(torch.ones(4, 6)))
            engine.step()
        return engine.module_state_dict()

    model = Slope(DERIVATIVES[name])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        sgd.zero_grad()
        model(torch.ones(4, 6)).backward()
        sgd.step()
    for state in comm.run(work, world_size):
        torch.testing.assert_close(state, dict(model.state_dict()))


@jvp_warns
def test_forward_mode_levels_of_two_ranks_in_one_process_are_refused():
    def work():
        engine = build(Slope(DERIVATIVES["jvp"]))
        with pytest.raises(UsageError, match=r"forward-mode.*run it with processes"):
            engine(torch.ones(4, 6))

    comm.run(work, 2)
