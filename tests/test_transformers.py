"""Models of Hugging Face transformers, built from a configuration: real forward with labels."""

import pytest
import torch
from stage_runs import full_params

import zerolab
from zerolab import comm

transformers = pytest.importorskip("transformers")

WORDS, LENGTH, BATCH, STEPS = 61, 9, 6, 2


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert():
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def t5():
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5}


def make(name):
    torch.manual_seed(11)
    return MODELS[name]()


def batch(step, rank, world_size):
    numbers = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, WORDS, (BATCH, LENGTH), generator=numbers)
    return tokens.chunk(world_size)[rank]


def optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def plain(name):
    model = make(name)
    opt = optimizer(model.parameters())
    losses = []
    for step in range(STEPS):
        tokens = batch(step, 0, 1)
        loss = model(input_ids=tokens, labels=tokens).loss
        losses.append(float(loss.detach()))
        loss.backward()
        opt.step()
        opt.zero_grad()
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}


def sharded(name, stage):
    model = make(name)
    engine, *_ = zerolab.initialize(
        model=model,
        optimizer=optimizer(list(model.parameters())),
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}},
    )
    losses = []
    for step in range(STEPS):
        tokens = batch(step, comm.get_rank(), comm.get_world_size())
        loss = engine(input_ids=tokens, labels=tokens).loss
        mean = loss.detach().double().reshape(1)
        comm.all_reduce(mean, "avg", purpose="control")
        losses.append(float(mean))
        engine.backward(loss)
        engine.step()
    engine.eval()
    with torch.no_grad():
        tokens = batch(9, 0, 1)
        assert torch.isfinite(engine(input_ids=tokens, labels=tokens).loss)
    return losses, full_params(engine)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_transformers_train_as_in_plain_torch(name, stage):
    losses, params = plain(name)
    for mine, values in comm.run(sharded, 2, args=(name, stage)):
        assert mine == pytest.approx(losses, rel=2e-5)
        for key, value in params.items():
            torch.testing.assert_close(values[key], value, rtol=1e-4, atol=1e-5)
