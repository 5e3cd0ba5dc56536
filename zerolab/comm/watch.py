"""Chapter 2: the watchdog: one thread a process, that can prove when waiting is in vain.

Owns what this rank has told the others about itself. While collectives go through it only looks
at a counter now and then. A rank that has waited for `QUIET_SECONDS` raises the alarm; then all
ranks write their state into the shared store: what they do, and their latest calls. From the
states follows who can still come:

    a rank that computes may still come, and so may one whose call everybody has made, because
    its bytes are on the way; a rank that waits may come when all those it waits for may;
    nobody else ever comes: they returned, raised, died, or wait for each other in a circle

A rank that can never come, in two looks between which every waiting rank has written anew, has
proven a deadlock. Two ranks that made different calls under one number need no second look.
"""

import contextlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import DeadlockError, MismatchError, PeerError, RankError
from ..records import RankRow
from . import deadlock, source
from .group import Call
from .stores import Store, second_connection

if TYPE_CHECKING:
    from .process import ProcessGroup

TICK_SECONDS = 0.2
QUIET_SECONDS = 0.5
FAREWELL_SECONDS = 1.0  # how long a broken connection waits for the peer's own explanation
ENDED = ("returned", "raised", "died")
State = dict[str, Any]  # what one rank says of itself, see `own_state`
States = dict[int, State]


class Watcher:
    """The thread that watches one group."""

    def __init__(self, group: "ProcessGroup", on_proof: Callable[[States], None]) -> None:
        """Watch `group`; call `on_proof` from the thread when its rank can never go on."""
        self.group = group
        self.store = second_connection(group.store)
        self.on_proof = on_proof
        self._beat = 0
        self._alarms = 0  # how many alarms have been answered
        self._ended = False
        self._doubt: States | None = None  # the states when the rank first seemed stuck
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="zerolab-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def farewell(self, state: str, detail: str, where: str = "") -> None:
        """Say how this rank ended; only the first time counts."""
        with self._lock:
            if not self._ended:
                self._ended = True
                mine = own_state(self.group, None)
                self._write({**mine, "state": state, "detail": detail, "where": where})

    # ------------------------------------------------------------ the thread

    def _loop(self) -> None:
        """Look every now and then, until the group ends."""
        while not self._stop.wait(TICK_SECONDS):
            with self._lock:
                if self._ended:
                    return
                try:
                    proof = self._look()
                except RuntimeError:
                    return  # the store is gone: the run is over
            if proof is not None:
                self.on_proof(proof)
                return

    def _look(self) -> States | None:
        """Answer an alarm, or raise one after a long wait; return the proof when there is one."""
        waiting = self.group.blocked()
        if waiting is None or time.perf_counter() - waiting[1] < QUIET_SECONDS:
            self._doubt = None
            alarms = self.store.add("alarms", 0)
            if alarms != self._alarms:
                self._alarms = alarms
                self._tell_now()
            return None
        self._alarms = self.store.add("alarms", 1)
        self._tell_now()
        return self._judge(self.states())

    def _judge(self, states: States) -> States | None:
        """Return the states if they prove that this rank waits in vain."""
        if contradictions(self.group.rank, states):
            return states
        broken = any(state["state"] in ("raised", "died") for state in states.values())
        if broken or not in_vain(self.group.rank, states, self.group.host_waits):
            self._doubt = None  # a broken peer closes its connections: that ends the wait
        elif self._doubt is None:
            self._doubt = states
        elif confirmed(self._doubt, states):
            return states
        return None

    def is_first_to_prove(self) -> bool:
        """Tell whether no other rank has published a proof: one table is enough."""
        return self.store.add("proofs", 1) == 1

    # ------------------------------------------------------------ states

    def _tell_now(self) -> None:
        """Write what this rank is doing at this moment."""
        self._write(snapshot(self.group))

    def _write(self, state: State) -> None:
        """Write this rank's state for the peers."""
        self._beat += 1
        self.store.set(f"state/{self.group.rank}", json.dumps({**state, "beat": self._beat}))

    def states(self) -> States:
        """Return what is known of every rank now."""
        return {rank: read_state(self.store, rank) for rank in range(self.group.world_size)}

    def _states_or_none(self) -> States:
        """Return what is known, nothing when the store is gone with its process."""
        try:
            return self.states()
        except RuntimeError:
            return {}

    def _answers(self) -> States:
        """Raise the alarm and return what everybody answers."""
        with contextlib.suppress(RuntimeError):
            self.store.add("alarms", 1)
            time.sleep(1.5 * TICK_SECONDS)
        return self._states_or_none()

    def explain(self, error: BaseException, call: Call) -> RankError:
        """Turn a broken connection into what really happened, as far as the peers tell it."""
        deadline = time.perf_counter() + FAREWELL_SECONDS
        states, gone = self._states_or_none(), list[int]()
        while not gone and time.perf_counter() < deadline:
            time.sleep(0.02)
            states = self._states_or_none()
            gone = [rank for rank, state in states.items() if state["state"] in ENDED]
        if gone:
            states = self._answers() or states
        states[self.group.rank] = own_state(self.group, call)
        failed = [rank for rank in gone if states[rank]["state"] != "returned"]
        if gone and not failed:
            return error_of(self.group.rank, states)
        reason = f"the connection broke ({str(error).split('. ')[0]})"
        if failed:
            reason = f"rank {failed[0]} {states[failed[0]]['state']}: {states[failed[0]]['detail']}"
        return PeerError(f"{reason}, while rank {self.group.rank} was in {call.describe()}")


def start(group: "ProcessGroup", on_proof: Callable[[States], None]) -> None:
    """Watch a group of more than one rank."""
    if group.world_size > 1:
        group.watcher = Watcher(group, on_proof)


def snapshot(group: "ProcessGroup") -> State:
    """Return what a rank is doing at this moment: it waits, or computes at some line."""
    waiting = group.blocked()
    if waiting is not None:
        return own_state(group, waiting[0])
    return {**own_state(group, None), "where": _where(group.main_thread)}


def _where(thread: int) -> str:
    """Return the user's line in a thread; its frames are let go at once, for they hold tensors."""
    frame = sys._current_frames().get(thread)
    return source.caller(frame) if frame else ""


def own_state(group: "ProcessGroup", call: Call | None) -> State:
    """Say which calls a rank has made, and in which one it waits (None: it computes)."""
    calls, waiting = list(group.calls), group.blocked()
    latest = call or (calls[-1] if calls else None)
    return {
        "state": "computing" if call is None else "waiting",
        "detail": "" if call is None else call.describe(),
        "where": "" if call is None else call.where,
        "op": "" if latest is None else latest.op,
        "seq": -1 if latest is None else latest.seq,
        "key": "" if call is None else call.key(group.rank),
        "peer": call.peer if call and call.op in ("send", "recv") else -1,
        "seconds": 0.0 if waiting is None else time.perf_counter() - waiting[1],
        "launched": group.launched,
        "messages": group.message_counts(),
        "calls": {past.key(group.rank): _facts(past) for past in calls},
        "beat": 0,
    }


def read_state(store: Store, rank: int) -> State:
    """Return a rank's state; one that never wrote any computes."""
    key = f"state/{rank}"
    if not store.check([key]):
        return silent_state()
    return json.loads(store.get(key))


def tell_for(store: Store, rank: int, state: str, detail: str) -> None:
    """Write the state of a rank that cannot do so any more."""
    last = read_state(store, rank)
    store.set(f"state/{rank}", json.dumps({**last, "state": state, "detail": detail}))


def silent_state() -> State:
    """Return the state of a rank of which nothing is known."""
    texts = {"state": "computing", "detail": "", "where": "", "op": "", "key": ""}
    numbers = {"seq": -1, "peer": -1, "seconds": 0.0, "launched": 0, "beat": 0}
    return {**texts, **numbers, "messages": [], "calls": {}}


# ---------------------------------------------------------------- who waits for whom


def in_vain(rank: int, states: States, host_waits: bool) -> bool:
    """Tell whether a rank waits for something that never comes.

    Where only a stream waits, ranks that wait may still call: only one that ended never comes.
    """
    if host_waits:
        return rank in stuck(states)
    return any(states[other]["state"] in ENDED for other in missing(rank, states))


def stuck(states: States) -> set[int]:
    """Return the waiting ranks that nobody will ever free."""
    may_come = {rank for rank, state in states.items() if state["state"] == "computing"}
    waiting = {rank for rank, state in states.items() if state["state"] == "waiting"}
    while True:
        freed = {rank for rank in waiting - may_come if missing(rank, states) <= may_come}
        if not freed:
            return waiting - may_come
        may_come |= freed


def missing(rank: int, states: States) -> set[int]:
    """Return the ranks that have not made the call in which `rank` waits, as far as known."""
    mine = states[rank]
    if mine["peer"] >= 0:
        return set() if _made_message(mine, states[mine["peer"]]) else {mine["peer"]}
    return {
        other
        for other, state in states.items()
        if other != rank and (state["state"] == "computing" or state["launched"] <= mine["seq"])
    }


def _made_message(mine: State, partner: State) -> bool:
    """Tell whether the partner of a message has made its side of it."""
    pair = mine["key"].split(" ")[0]
    made = {f"{src}>{dst}": count for src, dst, count in partner["messages"]}
    return made.get(pair, 0) > mine["seq"]


def contradictions(rank: int, states: States) -> list[int]:
    """Return the ranks that made another call under the number in which `rank` waits."""
    mine = states[rank]
    if not mine["key"]:
        return []
    own = mine["calls"].get(mine["key"])
    others = {peer: state["calls"].get(mine["key"]) for peer, state in states.items()}
    return [peer for peer, call in others.items() if own and call and call[0] != own[0]]


def confirmed(before: States, now: States) -> bool:
    """Tell whether all ranks say the same as before, the waiting ones having written anew."""
    for rank, state in now.items():
        old = before[rank]
        if any(state[fact] != old[fact] for fact in ("state", "launched", "messages", "key")):
            return False
        if state["state"] == "waiting" and state["beat"] == old["beat"]:
            return False
    return True


# ---------------------------------------------------------------- tables and stacks


def error_of(rank: int, states: States) -> DeadlockError:
    """Build the error of a rank that waits in vain, with the table of all ranks."""
    differing = contradictions(rank, states)
    if differing:
        return mismatch(rank, differing, states)
    rows = [row(other, state) for other, state in states.items()]
    text = f"deadlock: {deadlock.explain(rows)}\n{deadlock.render(rows)}"
    return DeadlockError(text, tuple(rows))


def mismatch(rank: int, differing: list[int], states: States) -> MismatchError:
    """Build the error for ranks that made different calls under one number."""
    mine = states[rank]
    rows, calls = [], []
    for other, state in states.items():
        call = state["calls"].get(mine["key"])
        if call is None or (other not in differing and other != rank):
            rows.append(row(other, state))
            continue
        _, words, op, where = call
        facts = (op, mine["seq"], words, state["seconds"], where)
        rows.append(deadlock.row(other, "waiting", *facts))
        calls.append(rows[-1])
    return MismatchError(deadlock.mismatch_text(rows), tuple(rows), tuple(calls))


def _facts(call: Call) -> list[str]:
    """Say of a past call what it must agree in, what it was in words, and where."""
    return [repr(call.signature()), call.describe(), call.op, call.where]


def row(rank: int, state: State) -> RankRow:
    """Turn a state into a row of the table."""
    facts = [state[fact] for fact in ("state", "op", "seq", "detail", "seconds", "where")]
    return deadlock.row(rank, *facts)


def stack_of(thread: int) -> str:
    """Return the Python stack of a thread, without the frames of torch and zerolab."""
    frame = sys._current_frames().get(thread)
    entries = traceback.extract_stack(frame) if frame is not None else []
    kept = [entry for entry in entries if not source.is_hidden(entry.filename)]
    return "".join(traceback.format_list(kept))
