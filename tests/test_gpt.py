"""The GPT: its size in closed form, its numbers against torch, its manners with bad shapes."""

import math

import pytest
import torch
from torch.nn import functional as F

from zerolab import gpt
from zerolab.errors import UsageError


def build(seed=0, **changes):
    shape = {"seq_len": 16, "dim": 24, "num_heads": 3, "num_layers": 2} | changes
    torch.manual_seed(seed)
    return gpt.GPT(gpt.GPTConfig(**shape))


def sample(seed=1, batch=2, seq=16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, seq), generator=generator)


def test_gpt_10m_has_the_size_that_overflows_160_mib():
    config = gpt.preset("gpt-10m")
    assert gpt.num_params(config) == 10_795_008
    assert 16 * gpt.num_params(config) > 160 * 2**20


@pytest.mark.parametrize("name", ["gpt-nano", "gpt-1m", "gpt-10m"])
def test_num_params_matches_the_real_modules(name):
    model = gpt.GPT(gpt.preset(name))
    assert sum(param.numel() for param in model.parameters()) == gpt.num_params(model.config)


@pytest.mark.parametrize("name", list(gpt.PRESETS))
def test_num_params_matches_the_meta_device(name):
    with torch.device("meta"):
        model = gpt.GPT(gpt.preset(name))
    assert sum(param.numel() for param in model.parameters()) == gpt.num_params(model.config)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt-nano", 1e-4), ("gpt-1m", 1e-3), ("gpt-10m", 0.0108), ("gpt-125m", 0.125),
     ("gpt-350m", 0.35), ("gpt-1.5b", 1.5), ("gpt-7.5b", 7.46), ("gpt-13b", 13), ("gpt-170b", 170)],
)  # fmt: skip
def test_presets_are_as_large_as_they_are_called(name, billions):
    assert gpt.num_params(gpt.preset(name)) == pytest.approx(billions * 1e9, rel=0.05)


def test_an_untied_head_counts_on_its_own():
    model = build(tie=False)
    assert sum(param.numel() for param in model.parameters()) == gpt.num_params(model.config)
    assert model.head.weight is not model.token_embedding.weight


def test_a_tied_head_is_the_token_embedding():
    model = build()
    assert model.head.weight is model.token_embedding.weight


def test_the_same_seed_gives_the_same_model():
    for one, other in zip(build(3).parameters(), build(3).parameters(), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(build(3).head.weight, build(4).head.weight)


def test_weights_start_as_wide_as_gpt2s():
    model = build(dim=96, num_layers=8)
    assert model.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    narrow = model.blocks[0].mlp.narrow.weight
    assert narrow.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    assert torch.equal(model.last_norm.weight, torch.ones(96))
    assert not model.blocks[0].mlp.widen.bias.any()


def test_an_untrained_model_knows_nothing():
    loss = build()(sample(1), sample(2))
    assert loss.item() == pytest.approx(math.log(256), abs=0.2)


def test_manual_attention_matches_fused_attention():
    fused, manual = build(attention="fused"), build(attention="manual")
    tokens = sample()
    torch.testing.assert_close(fused(tokens), manual(tokens), rtol=1e-5, atol=1e-6)


def test_attention_matches_torch_multihead_attention():
    attention = build().blocks[0].attention
    reference = torch.nn.MultiheadAttention(24, 3, batch_first=True)
    reference.load_state_dict(
        {
            "in_proj_weight": attention.qkv.weight,
            "in_proj_bias": attention.qkv.bias,
            "out_proj.weight": attention.out.weight,
            "out_proj.bias": attention.out.bias,
        }
    )
    x = torch.randn(2, 16, 24, generator=torch.Generator().manual_seed(0))
    ahead = torch.ones(16, 16, dtype=torch.bool).triu(1)
    expected, _ = reference(x, x, x, attn_mask=ahead, need_weights=False)
    torch.testing.assert_close(attention(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention", ["fused", "manual"])
def test_no_position_sees_what_follows_it(attention):
    model, tokens = build(attention=attention), sample()
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_loss_is_float32_cross_entropy_of_the_bf16_logits():
    model = build().to(torch.bfloat16)
    tokens, targets = sample(1), sample(2)
    loss = model(tokens, targets)
    logits = model(tokens)
    assert (loss.dtype, logits.dtype) == (torch.float32, torch.bfloat16)
    expected = F.cross_entropy(logits.float().reshape(-1, 256), targets.reshape(-1))
    assert torch.equal(loss, expected)


def test_loss_falls_when_one_batch_is_learned():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens, targets = sample(1), sample(2)
    losses = []
    for _ in range(20):
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("attention", ["fused", "manual"])
def test_dropout_acts_in_training_only(attention):
    model, tokens = build(dropout=0.5, attention=attention), sample()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_dropout_keeps_the_expected_value_and_a_mask_of_one_byte():
    layer = gpt.Dropout(0.25)
    ones = torch.ones(100_000, requires_grad=True)
    dropped = layer(ones)
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.02)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    saved = dropped.grad_fn._saved_result1
    assert saved.dtype == torch.bool


def test_generate_goes_on_without_end_and_repeats_with_the_seed():
    model = build().eval()

    def ten():
        luck = torch.Generator().manual_seed(7)
        stream = gpt.generate(model, sample()[0], seq_len=16, generator=luck)
        return [next(stream) for _ in range(10)]

    assert ten() == ten()
    assert all(0 <= token < 256 for token in ten())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dim": 25}, "dim=25"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"seq_len": -1}, "seq_len=-1"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"attention": "flash"}, "'flash'"),
    ],
)
def test_impossible_shapes_are_usage_errors(changes, says):
    with pytest.raises(UsageError, match=says):
        build(**changes)


def test_an_unknown_preset_suggests_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'gpt-10m'") as raised:
        gpt.preset("gpt-10mm")
    assert "\n" not in str(raised.value)
    with pytest.raises(UsageError, match="choose one"):
        gpt.preset("zzz")
