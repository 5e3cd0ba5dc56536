"""Chapter 4: which optimizers cannot step on shards, and why.

Owns the one list of them, which the engine asks about an object and the configuration about a
name. An optimizer is elementwise when the new value of an element depends on that element alone;
then it does not matter where a tensor was cut. Names are in lower case.
"""

_WIDTH = "its step depends on a parameter's width, and a shard has none"
_BITS = "its compressed all-reduce replaces the one that ZeRO shards; DeepSpeed refuses it too"
_NORM = "its trust ratio needs the norm of a whole parameter, and a shard holds a piece"
LAYOUT_DEPENDENT = {
    "adafactor": "it keeps sums over rows and columns, and a shard cuts through them",
    "muon": "it orthogonalizes whole matrices, and a shard holds a piece",
    "lbfgs": "its line search and history need all parameters at once",
    "sparseadam": "it wants sparse gradients, and gradients in a bucket are dense",
    "lamb": _NORM,
    "onebitadam": _BITS,
    "zerooneadam": _BITS,
    "onebitlamb": _BITS,
    "muadam": _WIDTH,
    "muadamw": _WIDTH,
    "musgd": _WIDTH,
}
