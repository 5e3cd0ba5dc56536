"""Chapter 3: wrong answers to 3.3, `collect`.

Owns nothing. Each is the right answer with one thing changed. A part of the buffer that such an
answer leaves unwritten would hold whatever lay there, so most make it with zeros: what they leave
behind is the same in every run.
"""

from .rewriting import rewritten

TARGET = "zerolab.bucket:collect"
ZEROS = ("torch.empty(", "torch.zeros(")
STATE = (
    "    if bucket.state is not GradState.IN_FLIGHT:\n        bucket.state = GradState.FILLING\n"
)
ADD_OR_COPY = "target.add_(dense) if position in bucket.filled else target.copy_(dense)"

COLLECT = (
    rewritten(
        TARGET,
        "leaves_the_gradient",
        "Backward adds to a `.grad` that is still there: the next step would send this one again.",
        ("    slot.param.grad = None\n", ""),
        ZEROS,
    ),
    rewritten(
        TARGET,
        "forgets_the_first",
        "With accumulation a second gradient comes before the first was sent: it is added, not "
        "put.",
        (ADD_OR_COPY, "target.copy_(dense)"),
        ZEROS,
    ),
    rewritten(
        TARGET,
        "forgets_the_place",
        "A slot begins at its offset: at 0 every gradient of the bucket covers the one before.",
        ("bucket.fresh, slot.offset, slot.shape", "bucket.fresh, 0, slot.shape"),
        ZEROS,
    ),
    rewritten(
        TARGET,
        "a_buffer_for_each",
        "One buffer holds all gradients of a bucket: a new one for each forgets the others.",
        (
            "    if bucket.fresh is None:\n        with device.tag(kind):\n            bucket",
            "    with device.tag(kind):\n        bucket",
        ),
        ZEROS,
    ),
    rewritten(
        TARGET,
        "forgets_who_has_come",
        "A bucket of which nobody notes what has arrived is never complete: it leaves at the end.",
        ("    bucket.arrived.add(position)\n", ""),
        ZEROS,
    ),
    rewritten(
        TARGET,
        "forgets_that_it_was_used",
        "The optimizer leaves alone what no rank used: an unmarked parameter is never trained.",
        ("    bucket.used.add(position)\n", ""),
        ZEROS,
    ),
    rewritten(
        TARGET,
        "keeps_16_bits",
        "The buffer has the dtype that was asked for, which may be wider than the gradient's.",
        ("dtype=dtype", "dtype=grad.dtype"),
        ZEROS,
    ),
    rewritten(
        TARGET,
        "calls_it_filling",
        "A late gradient stops no collective: until its mean is there the bucket is on its way.",
        (STATE, "    bucket.state = GradState.FILLING\n"),
        ZEROS,
    ),
    rewritten(
        TARGET,
        "forgets_the_state",
        "A bucket that has gradients and is EMPTY all the same tells whoever asks that it has "
        "none.",
        (STATE, ""),
        ZEROS,
    ),
    rewritten(
        TARGET,
        "only_from_empty",
        "A bucket fills again after each micro-step that reduces: then it was REDUCED, not EMPTY.",
        ("bucket.state is not GradState.IN_FLIGHT", "bucket.state is GradState.EMPTY"),
        ZEROS,
    ),
    rewritten(
        TARGET,
        "always_counts_as_grad",
        "At stage 0 the buffer stays and is the gradient; from stage 2 on it is a bucket that "
        "goes.",
        ("device.tag(kind)", 'device.tag("grad")'),
        ZEROS,
    ),
    rewritten(
        TARGET,
        "adds_to_nothing",
        "`torch.empty` holds whatever lay there. Often that is zeros, and one day it is not.",
        (ADD_OR_COPY, "target.add_(dense)"),
    ),
    rewritten(
        TARGET,
        "forgets_the_padding",
        "A bucket that got nothing is sent as zeros, with padding: both must be of one length.",
        ("torch.empty(bucket.padded_numel", "torch.zeros(bucket.numel"),
    ),
)
