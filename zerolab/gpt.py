"""Chapter 1: a small GPT. Nothing here knows that there is more than one rank.

Owns the parameters that every stage will later cut up: two embeddings, a list of blocks,
a last norm and a head that is usually the token embedding again (tied). A block is

    x = x + attention(norm(x))        who looks at whom, never ahead
    x = x + mlp(norm(x))              what to make of it, position by position

so it holds 12 dim^2 numbers in its four linear layers and 13 dim in norms and biases, and
nearly all parameters of a large model sit in blocks. `num_params` says exactly how many.

Dropout goes through `torch.native_dropout`, which remembers one byte an element as a GPU
does; `F.dropout` on a CPU would remember a whole number. Weights come from torch's random
numbers, so the same seed gives the same model on every rank.
"""

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .errors import UsageError

INIT_STD = 0.02  # GPT-2's


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The shape of a model.

    Attributes:
        vocab_size: how many tokens there are; 256 when a token is a byte.
        seq_len: the longest sequence, in tokens.
        dim: width of the residual stream; a multiple of `num_heads`.
        num_heads: attention heads a block.
        num_layers: blocks.
        dropout: share of the elements that training drops, 0 to below 1.
        tie: whether the head is the token embedding.
        attention: "fused" hides the scores from memory; "manual" writes them out, which
            costs 2 more tensors of [batch, heads, seq, seq] a block. With dropout > 0
            training is always manual, because the scores are what is dropped.
    """

    vocab_size: int = 256
    seq_len: int = 128
    dim: int = 384
    num_heads: int = 6
    num_layers: int = 6
    dropout: float = 0.0
    tie: bool = True
    attention: str = "fused"

    def __post_init__(self) -> None:
        """Refuse shapes that no model can have."""
        for name in ("vocab_size", "seq_len", "dim", "num_heads", "num_layers"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} is below 1; give 1 or more")
        if self.dim % self.num_heads:
            raise UsageError(
                f"dim={self.dim} does not divide into num_heads={self.num_heads}; "
                f"give a dim that is a multiple of {self.num_heads}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise UsageError(f"dropout={self.dropout} is not in [0, 1); 0.1 is usual")
        if self.attention not in ("fused", "manual"):
            raise UsageError(f'attention={self.attention!r} is unknown; give "fused" or "manual"')


# Up to gpt-small a token is a byte; from there on vocabularies are GPT-2's (50,257) or the same
# padded to a multiple of 1,024. Shapes of gpt-125m to gpt-13b are those of GPT-2 and GPT-3;
# gpt-7.5b and gpt-170b those of the ZeRO paper.
PRESETS: dict[str, GPTConfig] = {
    "gpt-nano": GPTConfig(seq_len=64, dim=48, num_heads=3, num_layers=3),
    "gpt-1m": GPTConfig(seq_len=128, dim=128, num_heads=4, num_layers=5),
    "gpt-10m": GPTConfig(seq_len=128, dim=384, num_heads=6, num_layers=6),
    "gpt-small": GPTConfig(seq_len=256, dim=512, num_heads=8, num_layers=8),
    "gpt-125m": GPTConfig(50257, seq_len=1024, dim=768, num_heads=12, num_layers=12),
    "gpt-350m": GPTConfig(50257, seq_len=1024, dim=1024, num_heads=16, num_layers=24),
    "gpt-1.5b": GPTConfig(50257, seq_len=1024, dim=1600, num_heads=25, num_layers=48),
    "gpt-7.5b": GPTConfig(51200, seq_len=1024, dim=4096, num_heads=32, num_layers=36),
    "gpt-13b": GPTConfig(51200, seq_len=2048, dim=5120, num_heads=40, num_layers=40),
    "gpt-170b": GPTConfig(51200, seq_len=1024, dim=8192, num_heads=64, num_layers=212),
}


def preset(name: str) -> GPTConfig:
    """Look up a shape by name.

    Raises:
        UsageError: there is no such preset; the message suggests the nearest.
    """
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else "choose one."
    raise UsageError(f"model {name!r} is unknown; {hint} Known: {', '.join(PRESETS)}")


def num_params(config: GPTConfig) -> int:
    """Count the parameters of `GPT(config)` without building it; a tied head counts once.

    >>> num_params(PRESETS["gpt-10m"])
    10795008
    """
    block = 12 * config.dim**2 + 13 * config.dim
    embeddings = (config.vocab_size + config.seq_len) * config.dim
    last_norm = 2 * config.dim
    head = 0 if config.tie else config.vocab_size * config.dim
    return config.num_layers * block + embeddings + last_norm + head


class Dropout(nn.Module):
    """Zero a random share of the elements in training and scale up the rest."""

    def __init__(self, share: float) -> None:
        """Drop `share` of the elements, 0 <= share < 1."""
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` itself when nothing is to be dropped."""
        if self.share == 0.0 or not self.training:
            return x
        dropped, _mask = torch.native_dropout(x, self.share, True)  # the mask is bool: 1 byte
        return dropped


class Attention(nn.Module):
    """Every position takes a weighted mean of itself and the positions before it."""

    def __init__(self, config: GPTConfig) -> None:
        """Make the projections in and out of the heads."""
        super().__init__()
        self.num_heads = config.num_heads
        self.fused = config.attention == "fused"
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)
        self.score_dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions: [batch, seq, dim] to [batch, seq, dim]."""
        batch, seq, dim = x.shape
        heads = self.qkv(x).view(batch, seq, 3, self.num_heads, dim // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # [batch, heads, seq, head_dim]
        drops = self.training and self.score_dropout.share > 0.0
        if self.fused and not drops:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = self._manual(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))

    def _manual(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Do the same with the scores written out."""
        seq, head_dim = query.shape[-2:]
        scores = query @ key.transpose(-1, -2) / math.sqrt(head_dim)  # [batch, heads, seq, seq]
        ahead = torch.ones(seq, seq, dtype=torch.bool, device=query.device).triu(1)
        weights = scores.masked_fill(ahead, float("-inf")).softmax(-1)
        return self.score_dropout(weights) @ value


class MLP(nn.Module):
    """Widen four times, bend, narrow again."""

    def __init__(self, config: GPTConfig) -> None:
        """Make the two linear layers."""
        super().__init__()
        self.widen = nn.Linear(config.dim, 4 * config.dim)
        self.narrow = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Work on each position alone: [batch, seq, dim] to [batch, seq, dim]."""
        return self.narrow(F.gelu(self.widen(x)))


class Block(nn.Module):
    """Attention, then an MLP, each added to what came in: stage 3 gathers and frees it whole."""

    def __init__(self, config: GPTConfig) -> None:
        """Make both halves and the norm before each."""
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp = MLP(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Refine the residual stream: [batch, seq, dim] to [batch, seq, dim]."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A language model: tokens in, a guess of each next token out."""

    def __init__(self, config: GPTConfig) -> None:
        """Build the modules and draw their weights from torch's random numbers."""
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.dim)
        self.position_embedding = nn.Embedding(config.seq_len, config.dim)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.last_norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie:
            self.head.weight = self.token_embedding.weight
        init_weights(self)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Score every next token, or say how wrong the scores are.

        Args:
            tokens: int64 [batch, seq], seq at most `config.seq_len`.
            targets: int64 [batch, seq], the token that really follows each; or None.

        Returns:
            The mean cross-entropy in nats, a float32 scalar; without targets the logits
            [batch, seq, vocab_size] in the model's dtype.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        x = self.dropout(x)  # [batch, seq, dim]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.last_norm(x))  # [batch, seq, vocab_size]
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def init_weights(model: GPT) -> None:
    """Draw weights as GPT-2 does: N(0, 0.02), narrower where a block adds to the stream.

    2 * num_layers terms are added to the stream, so each gets 1 / sqrt(2 * num_layers) of the
    width; the sum then starts as wide as one of them.
    """
    added_std = INIT_STD / math.sqrt(2 * model.config.num_layers)
    for name, param in model.named_parameters():
        if name.endswith(".bias"):
            param.zero_()
        elif name.endswith(("attention.out.weight", "mlp.narrow.weight")):
            param.normal_(0.0, added_std)
        elif "norm" not in name:  # norms stay at one
            param.normal_(0.0, INIT_STD)


@torch.no_grad()
def generate(
    model: nn.Module, prompt: Tensor, seq_len: int, generator: torch.Generator
) -> Iterator[int]:
    """Draw token after token, each from the model's guess given all before it, without end.

    Args:
        model: called as `model(tokens)`, returns logits [1, seq, vocab_size].
        prompt: int64 [seq], at least one token.
        seq_len: the longest sequence that the model takes; older tokens are forgotten.
        generator: where the luck comes from.
    """
    tokens = prompt
    while True:
        logits = model(tokens[None, -seq_len:])[0, -1].float()  # [vocab_size]
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator)  # [1]
        tokens = torch.cat([tokens, token])
        yield int(token)
