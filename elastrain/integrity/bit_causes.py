"""Causes of differing bits, told by what distinguishes two processes and by the first differing operator. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastrain.integrity.bit_traces import ANYWHERE, DATA, FirstDifference, Trace, difference_by_place, first_difference

FACTORS = ("nothing", "order", "member", "hash", "memory")
"""Distinctions of a control run from the first run: nothing, the order of the micro-batches, the rank and the
member's id, PYTHONHASHSEED, or the content of memory that was not written to. Tried in this order."""

ADVICE = {
    "generator": "it draws from a torch.Generator of its own; draw from the default one, which is seeded per "
    "micro-batch",
    "python random": "it draws from a random.Random of its own; use the functions of the module random, which are "
    "seeded per micro-batch",
    "numpy generator": "it draws from a NumPy generator of its own; use the functions of numpy.random, which are "
    "seeded per micro-batch",
    "entropy": "it reads random numbers of the operating system (os.urandom, secrets, uuid4); draw from torch, random "
    "or numpy.random, which are seeded per micro-batch",
    "reseeded": "it seeds or restores torch's default generator itself; leave out manual_seed, set_rng_state and "
    "streams of one's own, because the generator is seeded per micro-batch",
    "clock": "it reads a clock; use the number of the step or a constant",
    "rank": "it reads the rank or the member's id; use the number of the step, because any member may compute it",
    "environment": "it reads an environment variable, the host name or the process id; pass the value as an argument, "
    "alike on all members",
    "member": "a value depends on the member, such as its rank, an environment variable or the host name; use values "
    "that all members have",
    "threads": "members compute with different numbers of threads; call torch.set_num_threads with one number, or "
    "leave it to OMP_NUM_THREADS, which elastrain run sets to 1",
    "hash order": "it depends on the order of a set (PYTHONHASHSEED); sort what you iterate over, or use a dict",
    "counter": "the forward counts its calls; take the number of the step, or count behind `for batch in step`",
    "buffer": "the forward carries a tensor from one micro-batch to the next; change it behind `for batch in step`, "
    "from values that all members have, or use a normalisation layer, whose statistics are shared",
    "memo": "a value of an earlier micro-batch is kept and used again; compute it anew, or fill the cache before the "
    "loop, from data that all members have",
    "uninitialised": "it reads memory that nothing was written to (torch.empty); use torch.zeros, or write all of it",
    "kernel": "the operator gives other bits for the same inputs, as sums without a fixed order do; call "
    "torch.use_deterministic_algorithms(True), replace the operator, or use elastrain.init(deterministic=False)",
    "outside": "a value from outside of torch differs each time, such as a time, unseeded random numbers, or the "
    "order of a set of objects; make it a function of parameters, data and step",
    "several": "several things together make the difference; leave out random generators of one's own, state that is "
    "carried between micro-batches, clocks and ranks, and ask again",
}
"""Cause -> what it is, and what usually helps."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The first difference that was found, its likely cause, and what usually helps."""

    module: str
    operator: str
    way: str
    micro_batch: int
    cause: str
    factor: str
    """The change between two runs that shows the difference; see FACTORS. "several": it takes more than one of them."""
    advice: str
    changed: tuple[str, ...] = ()
    """Attributes and buffers that the forward changes, if they are the cause."""


def finding(one: Trace, other: Trace, control: Callable[[str], Trace]) -> Finding | None:
    """Return what makes two members differ, or None if nothing does.

    Args:
        one: The trace of the first member.
        other: That of the second one, which differs from the first in all of FACTORS.
        control: Runs the script as the first member once more, with only this factor changed. It is called after a
            difference was found, and until a factor shows it.
    """
    found = first_difference(one, other)
    if found is None:
        return None
    # "nothing" first: what differs by itself would differ in every other control run, too.
    # The memory's content is last, because few scripts read memory that nothing was written to.
    for factor in FACTORS:
        again = control(factor)
        shown = first_difference(one, again) if factor == "order" else difference_by_place(one, again)
        if shown is not None:
            return _found(shown, factor, threads_differ=one.threads != again.threads)
    return _found(found, "several", threads_differ=one.threads != other.threads)


def _found(shown: FirstDifference, factor: str, *, threads_differ: bool) -> Finding:
    cause, at = _cause(shown, factor, threads_differ=threads_differ), shown.at
    return Finding(
        module=at.module,
        operator=at.what,
        way=at.way,
        micro_batch=shown.one.number,
        cause=cause,
        factor=factor,
        advice=ADVICE[cause],
        changed=tuple(_carried(shown)) if cause in ("counter", "buffer") else (),
    )


def _cause(shown: FirstDifference, factor: str, *, threads_differ: bool) -> str:
    """Return the likely cause, a key of ADVICE."""
    at = shown.at
    # What the operator itself shows comes first, because it needs no guess: its generator, its inputs, the threads.
    if at.draws == "own":
        return "generator"
    if at.draws and shown.same_inputs:
        return "reseeded"
    if threads_differ and shown.same_inputs:
        return "threads"
    # The control run has changed these two things alone, so they are the cause.
    if factor in ("memory", "hash"):
        return {"memory": "uninitialised", "hash": "hash order"}[factor]
    # The batch has no inputs: what differs in it was read or drawn.
    if factor == "nothing" and shown.same_inputs and at.module != DATA:
        return "kernel"
    read = {
        name for each in (shown.one, shown.other) for of in (at.module, ANYWHERE) for name in each.sources.get(of, ())
    }
    if named := next((name for name in _READ[factor] if name in read), None):
        return named
    if factor == "order":
        kind = next(iter(_carried(shown).values()), "thing")
        return {"number": "counter", "tensor": "buffer", "thing": "memo"}[kind]
    return {"nothing": "outside"}.get(factor, factor)


_DRAWN = ("python random", "numpy generator")
_READ = {
    "nothing": ("clock", "entropy", *_DRAWN),
    "order": (*_DRAWN, "clock"),
    "member": ("rank", "environment"),
    "several": (*_DRAWN, "clock", "rank", "environment"),
}
"""Factor -> sources that can make this difference."""


def _carried(shown: FirstDifference) -> dict[str, str]:
    """Return the changed attributes of the differing module or, if it has none, of all modules, and their kinds."""
    every = {**shown.other.changed, **shown.one.changed}
    # A value that the differing module carries is a likelier cause than one of another module.
    own = {name: kind for name, kind in every.items() if name.rpartition(".")[0] == shown.at.module}
    return own or every
