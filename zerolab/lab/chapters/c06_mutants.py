"""Chapter 6: wrong answers to the exercises of 06_parameter_all_gather.

Owns nothing. Each is the right answer with one thing changed, and what its author believes.
Several stood in public code: a stage 3 that gathers and never frees (Tiny-DeepSpeed), a slice of
the local gradient in the place of a reduce-scatter, a parameter emptied to size 0 (DeepSpeed).
"""

from .rewriting import rewritten

BLANK = "zerolab.two_layers.parameter_sharding:train_sharded_params"
UNSHARD = "zerolab.turns:unshard_bucket"
RESHARD = "zerolab.turns:reshard_bucket"
ASSIGN = "zerolab.bucket:assign_params"
TURN = "zerolab.turns:Turn"
AHEAD = "zerolab.turns:units_ahead"
ZERO3 = "zerolab.zero3:Zero3"


TRAIN_SHARDED_PARAMS = (
    rewritten(
        BLANK,
        "gathers_everything_first",
        "Forward needs all layers, so all are gathered, then all are freed. But it needs them one "
        "after the other: at its end the whole model lies on every rank, as if nothing were cut.",
        (
            "        for layer in model:\n            gather(layer)\n            with",
            "        for layer in model:\n            gather(layer)\n"
            "        for layer in model:\n            with",
        ),
        (
            "                kept.append(layer(kept[-1]))\n            free(layer)\n",
            "                kept.append(layer(kept[-1]))\n"
            "        for layer in model:\n            free(layer)\n",
        ),
    ),
    rewritten(
        BLANK,
        "never_frees",
        "Keeping a slice is not yet sharding: the whole parameters are still there until "
        "somebody lets go of them.",
        ("param.new_tensor(torch.nan).expand(param.shape), None", "param.data, None"),
    ),
    rewritten(
        BLANK,
        "sums_over_ranks",
        "Every rank's loss is a mean over its own batch. The gradient of all batches together is "
        "the mean over ranks, not the sum: the step is as many times too long as there are ranks.",
        ('grads, "avg"', 'grads, "sum"'),
    ),
    rewritten(
        BLANK,
        "slices_the_local_gradient",
        "Taking the own slice of the own gradient leaves out what the other ranks found out about "
        "that very slice. Reduce-scatter is for that: every slice, over all ranks, to its owner.",
        (
            'comm.reduce_scatter(mean, grads, "avg")',
            "mean.copy_(grads.chunk(world_size)[rank])",
        ),
    ),
    rewritten(
        BLANK,
        "gathers_once",
        "Forward gathered the parameters and freed them. Backward multiplies with the weights as "
        "well, and finds NaN where they were: they have to come a second time.",
        ("            gather(layer)\n            above", "            above"),
    ),
)

UNSHARD_BUCKET = (
    rewritten(
        UNSHARD,
        "waits_at_once",
        "A gather that has ended when the function returns cannot run while something else is "
        "computed: there is nothing left to overlap.",
        ("async_op=True", "async_op=False"),
    ),
    rewritten(
        UNSHARD,
        "makes_a_new_tensor",
        "A new tensor is filled, but the parameters are views of the old one, and so is what "
        "autograd saved in forward: it is the old memory that has to come back.",
        (
            "    bucket.flat_param.untyped_storage().resize_(nbytes)",
            "    bucket.flat_param = bucket.shard.new_empty(bucket.padded_numel)",
        ),
    ),
    rewritten(
        UNSHARD,
        "forgets_the_memory",
        "The tensor is there all the time, its memory is not: a gather needs somewhere to write.",
        ("    bucket.flat_param.untyped_storage().resize_(nbytes)\n", ""),
    ),
    rewritten(
        UNSHARD,
        "sends_the_empty_slice",
        "The buffer has just come back and holds nothing yet. What this rank knows of the "
        "parameters is its shard.",
        (
            "comm.all_gather(bucket.flat_param, bucket.shard,",
            "comm.all_gather(bucket.flat_param, bucket.flat_param[slice(*bucket.bounds)].fill_(0),",
        ),
    ),
    rewritten(
        UNSHARD,
        "calls_it_control",
        "Control traffic is flags and norms. Parameters are what stage 3 pays for: hidden among "
        "the flags, its third Psi is in no count.",
        ("async_op=True,", 'async_op=True, purpose="control",'),
    ),
)

RESHARD_BUCKET = (
    rewritten(
        RESHARD,
        "only_takes_the_memory",
        "resize_(0) frees, but the parameters still claim a shape with no memory behind it. "
        "`param.norm()` or `copy.deepcopy(model)` then reads there, and the process ends.",
        ("        slot.param.data = sharded_param.placeholder(slot.param)", "        slot.param"),
    ),
    rewritten(
        RESHARD,
        "only_swaps_the_parameters",
        "The parameters point elsewhere, but the buffer is still there, and it is the buffer that "
        "takes the memory.",
        ("    bucket.flat_param.untyped_storage().resize_(0)\n", ""),
    ),
    rewritten(
        RESHARD,
        "throws_the_tensor_away",
        "Dropping the buffer frees it only if nobody else has it. Autograd has: what it saved in "
        "forward are views of it, so the memory stays until backward, where it is filled twice.",
        (
            "    bucket.flat_param.untyped_storage().resize_(0)",
            "    bucket.flat_param = bucket.flat_param.new_empty(0)",
        ),
    ),
    rewritten(
        RESHARD,
        "puts_zeros",
        "Zeros look like weights: who reads a sharded parameter by mistake then computes on, and "
        "the loss is only a little wrong. A NaN is seen.",
        ("sharded_param.placeholder(slot.param)", "slot.param.new_zeros(()).expand(slot.shape)"),
    ),
    rewritten(
        RESHARD,
        "empties_the_parameters",
        "A parameter of size 0 has lost its shape: whoever counts parameters, builds an optimizer "
        "or prints the model sees an empty one.",
        ("sharded_param.placeholder(slot.param)", "slot.param.new_empty(0)"),
    ),
    rewritten(
        RESHARD,
        "fills_with_nan",
        "A tensor full of NaN takes as much memory as the parameters did. One NaN, expanded to the "
        "shape, looks the same and takes 4 bytes.",
        (
            "sharded_param.placeholder(slot.param)",
            "slot.param.new_full(tuple(slot.shape), float('nan'))",
        ),
    ),
)

ASSIGN_PARAMS = (
    rewritten(
        ASSIGN,
        "gives_every_block_its_own",
        "A weight that two blocks share is one tensor. In two units it is gathered, averaged and "
        "updated twice.",
        (
            "        named[homes.copy().pop() + 1 if len(homes) == 1 else 0].append((name, param))",
            "        for number in homes or {-1}:\n"
            "            named[number + 1].append((name, param))",
        ),
    ),
    rewritten(
        ASSIGN,
        "first_come_first_served",
        "The first block takes the shared weight, and takes it away again when its turn is over; "
        "the other block then stands there without.",
        (
            "        named[homes.copy().pop() + 1 if len(homes) == 1 else 0].append((name, param))",
            "        named[min(homes) + 1 if homes else 0].append((name, param))",
        ),
    ),
    rewritten(
        ASSIGN,
        "forgets_the_rest",
        "Embeddings, the last norm and the head are in no block. They have to be in some unit all "
        "the same, or nobody trains them.",
        (
            "        named[homes.copy().pop() + 1 if len(homes) == 1 else 0].append((name, param))",
            "        if len(homes) == 1:\n"
            "            named[homes.copy().pop() + 1].append((name, param))",
        ),
    ),
    rewritten(
        ASSIGN,
        "puts_the_root_last",
        "The root's forward begins before that of every block inside it, so its unit comes first; "
        "the order of units is that of forward.",
        ('    modules = [("root", model), *blocks]', '    modules = [*blocks, ("root", model)]'),
        (
            "    return [(name, module, own) for (name, module), own in zip("
            "modules, named, strict=True)]",
            "    named = [*named[1:], named[0]]\n"
            "    return [(name, module, own) for (name, module), own in zip("
            "modules, named, strict=True)]",
        ),
    ),
)

MOMENT_TURN = (
    rewritten(
        TURN,
        "gathers_every_time",
        "A unit that was prefetched is on its way already, and one that is whole needs nothing: "
        "gathering again moves everything once more.",
        ("        if self.state is ShardState.SHARDED:\n", "        if True:\n"),
    ),
    rewritten(
        TURN,
        "never_waits",
        "Starting a gather is not having its result: until `wait()` has returned, the buffer "
        "holds anything.",
        (
            "            for work in self.works:\n                work.wait()\n            ",
            " " * 12,
        ),
    ),
    rewritten(
        TURN,
        "forgets_the_parameters",
        "The buffer is full, but the parameters still point at the NaN that resharding gave them. "
        "They have to be views of the buffer again.",
        ("                    slot.param.data = view\n", "                    pass\n"),
    ),
    rewritten(
        TURN,
        "stays_unsharded",
        "The memory is gone and the state still says that it is there: the next one who needs the "
        "unit does not gather it.",
        (
            "            reshard_bucket(bucket)\n        self.state = ShardState.SHARDED\n",
            "            reshard_bucket(bucket)\n",
        ),
    ),
    rewritten(
        TURN,
        "keeps_what_is_in_flight",
        "A unit that was gathered ahead and then not used takes memory like any other: freeing it "
        "means to wait for its gather first, not to leave it.",
        (
            "        for work in self.works:\n            work.wait()\n        self.works = []\n"
            "        for bucket in self.buckets:\n            reshard",
            "        if self.state is ShardState.IN_FLIGHT:\n            return\n"
            "        for bucket in self.buckets:\n            reshard",
        ),
    ),
    rewritten(
        TURN,
        "keeps_the_last_work_only",
        "A unit may have several buckets, and each of them a gather of its own. Whoever keeps one "
        "work waits for one gather, and the others fill the parameters when they please.",
        (
            "                self.works.append(unshard_bucket(bucket))",
            "                self.works = [unshard_bucket(bucket)]",
        ),
    ),
    rewritten(
        TURN,
        "waits_in_fetch",
        "`fetch` is called a unit ahead so that the gather runs while another one computes. Who "
        "waits in it has fetched, and computed nothing meanwhile.",
        (
            "                self.works.append(unshard_bucket(bucket))",
            "                self.works.append(unshard_bucket(bucket))\n"
            "                self.works[-1].wait()",
        ),
    ),
    rewritten(
        TURN,
        "goes_by_the_works",
        "No works does not mean that nothing is to be done: a unit of persistent buckets alone has "
        "nothing to gather, and is whole all the same.",
        (
            "        if self.state is ShardState.IN_FLIGHT:\n            for work",
            "        if self.works:\n            for work",
        ),
    ),
)

UNITS_AHEAD = (
    rewritten(
        AHEAD,
        "at_least_one",
        "The limit is there for units that are too large: the first one must not be gathered "
        "ahead either, if it is larger than that.",
        (
            "        if limit is not None and numel > limit:",
            "        if ahead and limit is not None and numel > limit:",
        ),
    ),
    rewritten(
        AHEAD,
        "leaves_out_an_exact_fit",
        "At most this many elements: units that fill the limit exactly are within it.",
        ("numel > limit", "numel >= limit"),
    ),
    rewritten(
        AHEAD,
        "each_for_itself",
        "The limit is for all units that are gathered ahead together, since they lie in memory "
        "together.",
        ("numel += unit_numel(following)", "numel = unit_numel(following)"),
    ),
    rewritten(
        AHEAD,
        "everything_without_a_limit",
        "No limit means one unit, whatever its size. All that follow would be the whole model.",
        ("follower.get(following) if limit is not None else None", "follower.get(following)"),
    ),
    rewritten(
        AHEAD,
        "comes_round_again",
        "In a circle of followers the unit itself turns up at the end, and it is whole already.",
        (" and following is not unit", ""),
    ),
    rewritten(
        AHEAD,
        "counts_what_is_always_there",
        "Persistent buckets are whole all the time: gathering the unit ahead brings no more of "
        "them, and `unit_numel` leaves them out.",
        ("unit_numel(following)", "sum(bucket.padded_numel for bucket in following.buckets)"),
    ),
    rewritten(
        AHEAD,
        "leaves_out_the_padding",
        "What appears in memory is the bucket with its padding, and so is what the limit counts.",
        ("unit_numel(following)", "sum(b.numel for b in following.buckets if not b.persistent)"),
    ),
)

MOMENT_ZERO3 = (
    rewritten(
        ZERO3,
        "forgets_to_reshard",
        "Everything is gathered once and stays. The shards are small, the run is right, and at "
        "the end of forward the whole model lies on every rank.",
        (
            "        if not self.needed_again(unit):\n            self.reshard(unit)\n",
            "        self.needed_again(unit)\n",
        ),
    ),
    rewritten(
        ZERO3,
        "forward_only",
        "Backward multiplies with the weights again. What autograd saved are views of a memory "
        "that went at the end of the unit's forward.",
        ("        self.take_turn(unit, in_backward=True)\n", "        self.turns[unit]\n"),
    ),
    rewritten(
        ZERO3,
        "frees_when_all_is_over",
        "Freeing at the end of backward is too late: by then all units have come a second time, "
        "and none has gone.",
        (
            "        if self.done_with(unit):\n            self.reshard(unit)\n",
            "        self.done_with(unit)\n",
        ),
    ),
    rewritten(
        ZERO3,
        "never_ahead",
        "Without prefetch every unit waits for its parameters at the beginning of its turn, with "
        "nothing to compute meanwhile.",
        ("                self.fetch(follower)\n", "                self.turns[follower]\n"),
    ),
    rewritten(
        ZERO3,
        "always_the_way_forward_went",
        "Backward goes the other way: what comes next there is the unit before. The one after has "
        "just been freed, and is gathered for nothing.",
        ("self.followers[in_backward]", "self.followers[False]"),
    ),
    rewritten(
        ZERO3,
        "publishes_like_stage_2",
        "Stage 2 gathers after the step because everybody keeps whole parameters. Here nobody "
        "does: the next forward gathers the new slices anyway.",
        (
            "        if not bucket.persistent and not self.turns[self.unit_of[bucket]].holds:\n"
            "            return None\n",
            "        self.unshard(self.unit_of[bucket])\n",
        ),
    ),
    rewritten(
        ZERO3,
        "waits_for_those_ahead",
        "`unshard` returns when the unit is whole. Who calls it for the units that follow waits "
        "for them now, and the block at hand computes only then: ahead, and yet in nobody's time.",
        ("                self.fetch(follower)\n", "                self.unshard(follower)\n"),
    ),
    rewritten(
        ZERO3,
        "tells_nobody_at_all",
        "Persistent parameters are whole all the time, and no forward gathers them. Without a "
        "gather after the step every rank goes on with the new values of its own slice alone.",
        (
            "        if not bucket.persistent and not self.turns[self.unit_of[bucket]].holds:\n"
            "            return None\n",
            "        if bucket.name:\n            return None\n",
        ),
    ),
    rewritten(
        ZERO3,
        "frees_what_is_kept",
        "`needed_again` is how the user's limits are heard: with a large max_reuse_distance units "
        "stay from forward to backward. Freed all the same, they are gathered a second time.",
        (
            "        if not self.needed_again(unit):\n            self.reshard(unit)\n",
            "        self.needed_again(unit)\n        self.reshard(unit)\n",
        ),
    ),
    rewritten(
        ZERO3,
        "frees_at_the_first_gradient",
        "A unit is done with when the gradients of *all* its parameters and inputs are there. "
        "After the first one, backward still has to go through its other layers.",
        (
            "        if self.done_with(unit):\n            self.reshard(unit)\n",
            "        self.done_with(unit)\n        self.reshard(unit)\n",
        ),
    ),
    rewritten(
        ZERO3,
        "hears_nothing_of_gradients",
        "The gradients of its inputs tell that backward has left a unit. But the first unit's "
        "inputs are data and need none: its parameters' gradients are all that it hears of.",
        ("        self.post_backward_of(unit)\n", ""),
    ),
    rewritten(
        ZERO3,
        "frees_before_it_takes",
        "A unit is done with when its last gradient has been taken, and that is what all other "
        "ranks wait for: take and send it first, tidy up afterwards.",
        ("        super().grad_ready(bucket, position)\n        unit", "        unit"),
        (
            "        self.post_backward_of(unit)\n",
            "        self.post_backward_of(unit)\n        super().grad_ready(bucket, position)\n",
        ),
    ),
    rewritten(
        ZERO3,
        "takes_recomputing_for_forward",
        "With activation checkpointing a unit's forward runs again inside backward. What comes "
        "next is then the unit before it, not the one after.",
        ("self.take_turn(unit, watching.in_backward())", "self.take_turn(unit, False)"),
    ),
    rewritten(
        ZERO3,
        "forgets_who_holds",
        "Inside `GatheredParameters` units are whole between two steps. Nobody gathers them "
        "before they are read again, so the step has to.",
        (
            "        if not bucket.persistent and not self.turns[self.unit_of[bucket]].holds:\n",
            "        if not bucket.persistent:\n",
        ),
    ),
    rewritten(
        ZERO3,
        "hears_no_limit",
        "`options.prefetch_numel` is how the user says how far ahead to gather: on a slow network "
        "one unit is not enough, where memory is short none is allowed.",
        ("followers, limit)", "followers, None and limit)"),
    ),
    rewritten(
        ZERO3,
        "followers_first",
        "Gathers run one after the other. Started before the unit's own, those of its followers "
        "are in its way: what is needed now comes last.",
        (
            "        self.unshard(unit)\n        self.note_turn(unit, in_backward)\n",
            "        self.note_turn(unit, in_backward)\n",
        ),
        (
            "                self.fetch(follower)\n",
            "                self.fetch(follower)\n        self.unshard(unit)\n",
        ),
    ),
    rewritten(
        ZERO3,
        "publishes_one_by_one",
        "What persistent buckets need after the step is gathered while the next bucket is updated. "
        "Waiting for each in `publish` makes a row of them.",
        ("bucket.shard, async_op=True", "bucket.shard"),
    ),
    rewritten(
        ZERO3,
        "waits_ahead_in_backward",
        "Forward and backward are alike: also in backward a follower's gather is started, and its "
        "own turn waits for it.",
        (
            "                self.fetch(follower)\n",
            "                (self.unshard if in_backward else self.fetch)(follower)\n",
        ),
    ),
    rewritten(
        ZERO3,
        "frees_what_is_held",
        "`self.reshard(unit)` leaves alone what somebody holds in `GatheredParameters`; the turn "
        "itself does not know, and frees it under their hands.",
        (
            "            self.reshard(unit)\n\n    def pre_backward",
            "            self.turns[unit].reshard()\n\n    def pre_backward",
        ),
    ),
)
