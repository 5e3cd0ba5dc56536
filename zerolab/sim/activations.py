"""Chapter 1: activations: what forward leaves in memory for backward.

Owns no data. Two accounts of the same thing: `activation_bytes`, exact for `zerolab.gpt.GPT` on
a virtual GPU at the start of backward (kind "activation"), and `paper_activation_bytes`, the
formula that everybody quotes. In what follows T = batch * seq tokens, w bytes an element, and

    block   16 T dim w      the inputs of norms, projections, gelu and the MLP
          +  4 T w          mean and deviation of two norms
          +  4 T heads      fused attention: one fp32 number a row in place of the scores
       or +  w heads seq^2 batch + seq^2     manual: the scores after softmax, and a mask

Dropout adds its masks, one byte an element, and the scores once more. With it, and without norms
and mask, that is the paper's 34 s b h + 5 a s^2 b for a layer.

Source: Korthikanti et al., Reducing Activation Recomputation (2022), equations 1 and 2; Chen et
al. 2016 for checkpointing. DeepSpeed key `activation_checkpointing`.
"""

from ..gpt import GPTConfig
from .states import PARAM_BYTES, check_precision

INDEX_BYTES = 8  # int64
FP32_BYTES = 4


def attention_map_bytes(config: GPTConfig, batch: int, dtype: str = "bf16") -> int:
    """Return what one block keeps of its scores [batch, heads, seq, seq].

    Fused attention keeps a sum a row. Manual attention keeps the scores after softmax and the
    mask of what lies ahead; with dropout also the dropped scores and a byte for each.

    Args:
        config: the model; dropout makes attention manual.
        batch: sequences.
        dtype: "bf16", "fp16" or "fp32".
    """
    check_precision(dtype)
    rows = batch * config.num_heads * config.seq_len
    if config.dropout == 0.0 and config.attention == "fused":
        return FP32_BYTES * rows
    width = PARAM_BYTES[dtype]
    each = width if config.dropout == 0.0 else 2 * width + 1
    return each * rows * config.seq_len + config.seq_len**2


def block_activation_bytes(config: GPTConfig, batch: int, dtype: str = "bf16") -> int:
    """Return what one block keeps for its backward, its output included and its input not.

    Args:
        config: the model.
        batch: sequences, each `config.seq_len` long.
        dtype: "bf16", "fp16" or "fp32".
    """
    check_precision(dtype)
    tokens, width = batch * config.seq_len, PARAM_BYTES[dtype]
    masks = 0 if config.dropout == 0.0 else 2 * tokens * config.dim
    norms = 4 * tokens * width
    maps = attention_map_bytes(config, batch, dtype)
    return 16 * tokens * config.dim * width + norms + masks + maps


def stem_activation_bytes(config: GPTConfig, batch: int, dtype: str = "bf16") -> int:
    """Return what lies outside the blocks: embeddings, the last norm, the loss.

    The log-probabilities of the loss are fp32, [tokens, vocab_size]: with a large vocabulary and
    few layers they are the largest tensor of all.
    """
    check_precision(dtype)
    tokens, width = batch * config.seq_len, PARAM_BYTES[dtype]
    positions = INDEX_BYTES * config.seq_len
    first = tokens * config.dim * (width if config.dropout == 0.0 else width + 1)
    last_norm = tokens * width * (config.dim + 2)
    loss = FP32_BYTES * (tokens * config.vocab_size + 2)  # and the mean with its divisor
    return positions + first + last_norm + loss


def activation_bytes(
    config: GPTConfig, batch: int, dtype: str = "bf16", *, checkpointed: bool = False
) -> int:
    """Return the activations of a whole GPT at the start of backward.

    With checkpointing a block keeps only its output, which is the next one's input; when its
    turn in backward comes, `block_activation_bytes` appears once more, one block at a time.

    Args:
        config: the model.
        batch: sequences in a micro-batch (`train_micro_batch_size_per_gpu`).
        dtype: "bf16", "fp16" or "fp32".
        checkpointed: whether each block runs under `zerolab.checkpointing.checkpoint`.
    """
    output = batch * config.seq_len * config.dim * PARAM_BYTES[dtype]
    block = output if checkpointed else block_activation_bytes(config, batch, dtype)
    return config.num_layers * block + stem_activation_bytes(config, batch, dtype)


def paper_activation_bytes(
    seq_len: int, batch: int, dim: int, num_heads: int, *, checkpointed: bool = False
) -> int:
    """Return the paper's activations of one layer, in bytes.

    For 16 bits with dropout everywhere and the scores written out. It leaves out the norms'
    statistics and the causal mask. With checkpointing it is the layer's input alone.

    Args:
        seq_len: s, tokens of a sequence.
        batch: b, sequences.
        dim: h, width of the residual stream.
        num_heads: a.
        checkpointed: whether only the layer's input is kept.
    """
    if checkpointed:
        return 2 * seq_len * batch * dim
    return 34 * seq_len * batch * dim + 5 * num_heads * seq_len**2 * batch
