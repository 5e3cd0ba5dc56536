"""Chapter 06 beside its exercises: a second opinion on stage 3, its numbers, its evidence."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zerolab
from zerolab import comm, gpt
from zerolab.lab import exercise, plug, prediction
from zerolab.lab.chapters import c06, c06_mutants, rewriting, unit_runs
from zerolab.lab.chapters.unit_runs import Plan
from zerolab.sim import estimate
from zerolab.two_layers import parameter_sharding

STEPS = 4


def layers():
    torch.manual_seed(2)
    return nn.Sequential(nn.Sequential(nn.Linear(6, 7), nn.Tanh()), nn.Linear(7, 3))


def batches():
    rank = comm.get_rank()
    luck = [torch.Generator().manual_seed(50 * step + rank) for step in range(STEPS)]
    return [(torch.randn(4, 6, generator=one), torch.randn(4, 3, generator=one)) for one in luck]


def on_one_page():
    model = layers()
    parameter_sharding.train_sharded_params(
        model, batches(), lambda params: torch.optim.AdamW(params, lr=0.05)
    )
    return [param.detach().clone() for param in model.parameters()]


def by_the_engine():
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3},
    }
    engine, *_ = zerolab.initialize(model=layers(), config=config)
    for inputs, targets in batches():
        engine.backward(F.mse_loss(engine(inputs), targets))
        engine.step()
    return list(engine.module_state_dict().values())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_stage_3_on_one_page_is_of_the_engines_opinion(world_size):
    page = comm.run(on_one_page, world_size)[-1]
    for mine, theirs in zip(page, comm.run(by_the_engine, world_size)[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_numbers_in_the_predictions_are_those_of_the_model():
    shape = gpt.preset("gpt-1m")
    root, *blocks = estimate.layout(gpt.GPT(shape), estimate.BUCKET_NUMEL, 4).unit_numels()
    first = prediction.find("6.8")
    assert first.what.count(f"{blocks[0]:,}") == 1 and first.what.count(f"{root:,}") == 1
    assert len(blocks) == 5 and len(set(blocks)) == 1
    expected = estimate.gathered_peak_numel([root, *blocks]) * 2 / 2**10
    assert c06.gathered_at_most() == expected
    assert c06.passes_with_accumulation() == 3 * 4


def test_the_story_of_a_step_tells_every_unit_twice_and_nothing_in_the_step():
    for shown in unit_runs.run(Plan(3, 2)):
        names = ["root", *unit_runs.BLOCKS]
        assert {name: shown.gathers.count(name) for name in names} == dict.fromkeys(names, 2)
        assert sorted(shown.story) == sorted(2 * [sign + name for name in names for sign in "+-"])
        assert shown.published == ()
        # In forward the root comes first and goes last; a block goes before the next but one comes.
        story = list(shown.story)
        assert story[:3] == ["+root", "+blocks.0", "+blocks.1"]
        assert story.index("-blocks.0") < story.index("+blocks.2") < story.index("-blocks.1")


def test_most_gathered_is_the_formula():
    for world_size in (1, 2, 3):
        sizes = [unit_runs.padded(unit_runs.ROOT, world_size)]
        sizes += unit_runs.NUM_BLOCKS * [unit_runs.padded(unit_runs.BLOCK, world_size)]
        for prefetch in (True, False):
            expected = 4 * estimate.gathered_peak_numel(sizes, prefetch)
            for shown in unit_runs.run(Plan(3, world_size, prefetch=prefetch)):
                assert shown.most_gathered == expected


def test_a_mutant_whose_line_is_gone_is_told():
    with pytest.raises(ValueError, match="holds 'no such line' 0 times"):
        rewriting.rewritten(c06_mutants.TURN, "m", "believes", ("no such line", ""))


def test_a_moment_of_the_learners_is_the_one_that_gathers():
    """GatheredParameters and the engine work on a learner's class, which is not ours."""
    found = exercise.find("6.7")
    namespace = dict(vars(found.module))
    exec(exercise.source_of(found), namespace)
    with plug.plugged(found.target, namespace["Zero3"]):
        own = comm.run(by_the_engine, 2)[0]
    for mine, theirs in zip(own, comm.run(by_the_engine, 2)[0], strict=True):
        assert torch.equal(mine, theirs)


def test_a_class_derived_from_the_learners_reaches_rank_processes():
    """Not by its name, under which a rank process would find the package's own."""
    found = exercise.find("6.7")
    namespace = {**vars(found.module), "__name__": "__main__"}
    exec(exercise.source_of(found), namespace)
    with plug.plugged(found.target, namespace["Zero3"]):

        class Hoarder(plug.running(found.target)):
            def post_forward(self, unit):
                pass

        Hoarder.__module__ = Hoarder.post_forward.__module__ = "__main__"
        with plug.plugged(found.target, Hoarder):
            shown = comm.run(unit_runs._train, 2, "gloo", args=(Plan(3, 2),), timeout=60)
    whole = 4 * unit_runs.stack_numel(2)
    assert [one.most_gathered for one in shown] == [whole, whole]
