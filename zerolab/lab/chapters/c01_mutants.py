"""Chapter 1: wrong answers to the exercises of 01_where_memory_goes.

Owns nothing. Each function is what somebody writes who has understood one thing differently; its
docstring names that thing, and is what a learner with the same wrong result reads.
"""


def _each(precision: str, optimizer: str) -> dict[str, int]:
    width = {"bf16": 2, "fp16": 2, "fp32": 4}[precision]
    remembered = {"adamw": 8, "adam": 8, "adagrad": 4, "lion": 4, "momentum": 4, "sgd": 0}
    master = 0 if precision == "fp32" else 4
    return {
        "param": width,
        "grad": width,
        "master": master,
        "optimizer": remembered[optimizer],
    }


def forgets_the_master(precision: str = "bf16", optimizer: str = "adamw") -> dict[str, int]:
    """Sixteen bits halve everything: but the optimizer updates an fp32 copy, and that is kept."""
    return {**_each(precision, optimizer), "master": 0}


def master_in_fp32_too(precision: str = "bf16", optimizer: str = "adamw") -> dict[str, int]:
    """In fp32 the weights are their own master: a second copy would say the same thing twice."""
    return {**_each(precision, optimizer), "master": 4}


def gradients_in_fp32(precision: str = "bf16", optimizer: str = "adamw") -> dict[str, int]:
    """Gradients are as wide as what they belong to: a bf16 parameter has a bf16 gradient."""
    return {**_each(precision, optimizer), "grad": 4}


def averages_in_16_bits(precision: str = "bf16", optimizer: str = "adamw") -> dict[str, int]:
    """Adam's averages belong to the fp32 master, so they are fp32 whatever the weights are."""
    found = _each(precision, optimizer)
    return {**found, "optimizer": found["optimizer"] * found["param"] // 4}


def every_optimizer_is_adam(precision: str = "bf16", optimizer: str = "adamw") -> dict[str, int]:
    """Two averages are Adam's. Plain SGD remembers nothing, momentum and Adagrad one number."""
    return {**_each(precision, optimizer), "optimizer": 8}


def divides_all_sixteen(stage: int) -> tuple[str, ...]:
    """Every stage divides all 16 bytes: but stage 1 leaves parameters and gradients whole."""
    return () if stage == 0 else ("param", "grad", "master", "optimizer")


def gradients_at_stage_1(stage: int) -> tuple[str, ...]:
    """Stage 1 divides gradients: but a rank averages its own slice and still keeps all others."""
    early = ("master", "optimizer", "grad")
    return ((), early, early, (*early, "param"))[stage]


def forgets_to_shard_the_master(stage: int) -> tuple[str, ...]:
    """The master copy stays whole: but only who updates a slice needs the master copy of it."""
    return ((), ("optimizer",), ("optimizer", "grad"), ("optimizer", "grad", "param"))[stage]


def gradients_whole_at_stage_2(stage: int) -> tuple[str, ...]:
    """Stage 2 keeps all gradients: but a rank needs only the slice of their sum it updates."""
    both = ("master", "optimizer")
    return ((), both, both, (*both, "grad", "param"))[stage]


def one_kind_a_stage(stage: int) -> tuple[str, ...]:
    """Each stage divides one kind and no other: but a stage adds to the one before."""
    return ((), ("master", "optimizer"), ("grad",), ("param",))[stage]


def parameters_at_stage_2(stage: int) -> tuple[str, ...]:
    """Stage 2 divides parameters: but forward still finds each of them in its place, whole."""
    everything = ("master", "optimizer", "grad", "param")
    return ((), ("master", "optimizer"), everything, everything)[stage]


def _parts(stage: int, precision: str, optimizer: str) -> tuple[int, int]:
    """Return the bytes of a parameter that stay whole, and those that are divided."""
    each = _each(precision, optimizer)
    divided = ("optimizer", "master", "grad", "param")[: (0, 2, 3, 4)[stage]]
    shared = sum(each[kind] for kind in divided)
    return sum(each.values()) - shared, shared


def quotes_the_limit(
    stage: int, world_size: int, precision: str = "bf16", optimizer: str = "adamw"
) -> float:
    """4 and 8 are what endlessly many ranks would save; every real number of ranks saves less."""
    return (1.0, 4.0, 8.0, float(world_size))[stage]


def saves_as_many_as_ranks(
    stage: int, world_size: int, precision: str = "bf16", optimizer: str = "adamw"
) -> float:
    """Only stage 3 divides everything by the number of ranks; stages 1 and 2 leave a part whole."""
    return float(world_size) if stage else 1.0


def what_is_left(
    stage: int, world_size: int, precision: str = "bf16", optimizer: str = "adamw"
) -> float:
    """This is the share that is left; a factor says how many times smaller that is."""
    whole, shared = _parts(stage, precision, optimizer)
    return (whole + shared / world_size) / (whole + shared)


def divides_twice(
    stage: int, world_size: int, precision: str = "bf16", optimizer: str = "adamw"
) -> float:
    """Each shared byte is divided once by the number of ranks; this divides it a second time."""
    whole, shared = _parts(stage, precision, optimizer)
    return (whole + shared) / (whole + shared / world_size**2)


def always_sixteen(
    stage: int, world_size: int, precision: str = "bf16", optimizer: str = "adamw"
) -> float:
    """Sixteen bytes are AdamW's. With an optimizer that remembers less, less can be divided."""
    whole, shared = _parts(stage, "bf16", "adamw")
    return 16 / (whole + shared / world_size)


def forgets_the_maps(
    seq_len: int, batch: int, dim: int, num_heads: int, *, checkpointed: bool = False
) -> int:
    """Attention keeps a number for every pair of tokens too; that part grows with the square."""
    return (2 if checkpointed else 34) * seq_len * batch * dim


def one_map_for_all_heads(
    seq_len: int, batch: int, dim: int, num_heads: int, *, checkpointed: bool = False
) -> int:
    """Every head has a map of its own: the part with the square counts once for each head."""
    if checkpointed:
        return 2 * seq_len * batch * dim
    return 34 * seq_len * batch * dim + 5 * seq_len**2 * batch


def two_bytes_once_more(
    seq_len: int, batch: int, dim: int, num_heads: int, *, checkpointed: bool = False
) -> int:
    """The table is in bytes already; multiplying by the width of bf16 counts it twice."""
    if checkpointed:
        return 4 * seq_len * batch * dim
    return 68 * seq_len * batch * dim + 10 * num_heads * seq_len**2 * batch


def maps_of_one_sequence(
    seq_len: int, batch: int, dim: int, num_heads: int, *, checkpointed: bool = False
) -> int:
    """Each sequence of the batch has maps of its own, so these grow with the batch as well."""
    if checkpointed:
        return 2 * seq_len * batch * dim
    return 34 * seq_len * batch * dim + 5 * num_heads * seq_len**2


def checkpointing_keeps_nothing(
    seq_len: int, batch: int, dim: int, num_heads: int, *, checkpointed: bool = False
) -> int:
    """To run a layer a second time its input is needed, and so that much is kept."""
    if checkpointed:
        return 0
    return 34 * seq_len * batch * dim + 5 * num_heads * seq_len**2 * batch
