"""Gathers operators into stages: which element-wise operators a node's prologue and epilogue take.

A stage is a head (region operator, concat or first element-wise operator) with a *prologue* before
it and an *epilogue* after it. Every operator of a stage leads to its one visible value, its *exit*;
all other values are read inside the stage only. Hence stages never depend on each other in a
cycle, and the order of their exits is an order that runs.

Who takes an element-wise operator, in this order:

1. the epilogue of a region operator, the later producer first (of two that meet in a residual add);
2. the prologue of the one region operator that reads the chain (DenseNet's BN-ReLU);
3. the epilogue of a concat;
4. a stage of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from optifx_tvm.extract_ops import Op
from optifx_tvm.graph import REGION_OPS, TensorSpec


@dataclass(frozen=True)
class Stage:
    """Operators of one node, each part in the order of their bindings."""

    prologue: tuple[Op, ...]
    head: Op | None
    """None: the stage is element-wise."""
    epilogue: tuple[Op, ...]

    @property
    def ops(self) -> tuple[Op, ...]:
        """All operators in an order that runs."""
        return (*self.prologue, *((self.head,) if self.head else ()), *self.epilogue)

    @property
    def exit(self) -> Op:
        """The operator whose result is the stage's."""
        return self.ops[-1]


def form_stages(ops: Sequence[Op], specs: Mapping[str, TensorSpec]) -> list[Stage]:
    """Stages of ``ops`` (opaque operators are stages by themselves), in an order that runs.

    Operators whose results nobody reads are left out, unless they are opaque.
    """
    forming = _Forming(_without_dead(_flatten_concats(ops)), specs)
    position = {op.name: i for i, op in enumerate(ops)}
    return sorted(forming.stages(), key=lambda stage: position[stage.exit.name])


def _flatten_concats(ops: Sequence[Op]) -> list[Op]:
    """Concats of concats read the inner one's parts instead, so that in a chain of them
    (DenseNet) each one is read by its own consumer only."""
    parts: dict[str, tuple[str, ...]] = {}
    result = []
    for op in ops:
        if op.kind == "concat":
            flat = tuple(t for part in op.reads for t in parts.get(part, (part,)))
            parts[op.name] = flat
            op = replace(op, reads=flat, args=(flat,))
        result.append(op)
    return result


def _without_dead(ops: Sequence[Op]) -> list[Op]:
    read: set[str] = set()
    alive = []
    for op in reversed(ops):
        if op.kind == "opaque" or op.is_output or op.name in read:
            read.update(op.reads)
            alive.append(op)
    return alive[::-1]


class _Forming:
    def __init__(self, ops: Sequence[Op], specs: Mapping[str, TensorSpec]) -> None:
        self._specs = specs
        self._ops = {op.name: op for op in ops}
        self._position = {op.name: i for i, op in enumerate(ops)}
        self._readers: dict[str, list[str]] = {op.name: [] for op in ops}
        for op in ops:
            for tensor in dict.fromkeys(op.reads):
                if tensor in self._ops:
                    self._readers[tensor].append(op.name)
        self._free = {op.name for op in ops if op.kind == "elementwise"}

    def stages(self) -> list[Stage]:
        """Every operator in its stage (casts possibly in several)."""
        prologues: dict[str, tuple[Op, ...]] = {}
        epilogues: dict[str, tuple[Op, ...]] = {}
        ops = list(self._ops.values())
        for op in reversed(ops):
            if op.kind in REGION_OPS:
                epilogues[op.name] = self._claim(self._epilogue(op), op.name)
        for op in ops:
            if op.kind in REGION_OPS:
                prologues[op.name] = self._claim(self._prologue(op), op.name)
        for op in reversed(ops):
            if op.kind == "concat":
                epilogues[op.name] = self._claim(self._epilogue(op), op.name)
        result = [
            Stage(prologues.get(op.name, ()), op, epilogues.get(op.name, ()))
            for op in ops
            if op.kind != "elementwise"
        ]
        for op in ops:
            if op.name in self._free:
                chain = self._claim([op.name, *self._epilogue(op)], op.name)
                result.append(Stage((), None, chain))
        return result

    def _claim(self, names: Sequence[str], stage: str) -> tuple[Op, ...]:
        """Takes the operators for one stage, with copies of the casts that feed only it."""
        members = set(names)
        self._free -= members
        casts = [
            tensor
            for name in names
            for tensor in self._ops[name].reads
            if tensor not in members and tensor != stage and self._is_free_cast(tensor)
        ]
        for cast in dict.fromkeys(casts):
            copies_for = [r for r in self._readers[cast] if r in members]
            self._readers[cast] = [r for r in self._readers[cast] if r not in members]
            sources = [t for t in self._ops[cast].reads if t in self._readers]
            for source in sources:
                self._readers[source].extend(copies_for)
            if not self._readers[cast]:
                self._free.remove(cast)
                for source in sources:
                    self._readers[source].remove(cast)
        found = sorted({*names, *casts}, key=lambda name: self._position[name])
        return tuple(self._ops[name] for name in found)

    def _is_free_cast(self, tensor: str) -> bool:
        """Is it float16 widened to float32, not yet in a stage? Copying it costs nothing and
        changes no number."""
        op = self._ops.get(tensor)
        if op is None or tensor not in self._free or op.is_output:
            return False
        return [step.op for step in op.steps] == ["cast:float32"]

    def _epilogue(self, head: Op) -> list[str]:
        """The largest single-exit set of free element-wise operators after ``head``."""
        members = {head.name}
        pending = [head.name]
        while pending:
            for reader in self._readers[pending.pop()]:
                same_shape = self._ops[reader].spec.shape == head.spec.shape
                if reader in self._free and reader not in members and same_shape:
                    members.add(reader)
                    pending.append(reader)
        # Exits that work follow each other, and each one's set contains the one before it.
        for name in sorted(members, key=lambda n: -self._position[n]):
            inside = self._between(name, members)
            if head.name in inside and self._single_exit(inside, name):
                return sorted(inside - {head.name}, key=lambda n: self._position[n])
        return []

    def _between(self, last: str, members: set[str]) -> set[str]:
        """``last`` and those of ``members`` that it depends on through members."""
        found = {last}
        pending = [last]
        while pending:
            for tensor in self._ops[pending.pop()].reads:
                if tensor in members and tensor not in found:
                    found.add(tensor)
                    pending.append(tensor)
        return found

    def _single_exit(self, inside: set[str], last: str) -> bool:
        return all(
            name == last
            or (
                not self._ops[name].is_output
                and all(reader in inside for reader in self._readers[name])
            )
            for name in inside
        )

    def _prologue(self, head: Op) -> list[str]:
        """The largest set of free element-wise operators before ``head`` that computes its input
        from one tensor, constants and (N, 1, 1, C) factors, and is read by ``head`` alone."""
        source = head.reads[0]
        if source not in self._free:
            return []
        shape = self._ops[source].spec.shape
        members: set[str] = set()
        pending = {source}
        while pending:
            name = max(pending, key=lambda n: self._position[n])
            pending.remove(name)
            readers = self._readers[name]
            only_here = all(r in members or r == head.name for r in readers)
            if only_here and not self._ops[name].is_output:
                members.add(name)
                pending.update(t for t in self._full_reads(name, shape) if t in self._free)
        entries = dict.fromkeys(t for n in members for t in self._full_reads(n, shape))
        chains = [self._chain(entry, source, members, shape) for entry in entries]
        return max(chains, key=len, default=[])

    def _full_reads(self, name: str, shape: tuple[int, ...]) -> list[str]:
        return [t for t in self._ops[name].reads if self._specs[t].shape == shape]

    def _chain(self, entry: str, last: str, members: set[str], shape: tuple[int, ...]) -> list[str]:
        """Those of ``members`` that depend on ``entry``, if they need no other full tensor."""
        chain: list[str] = []
        for name in sorted(members, key=lambda n: self._position[n]):
            inside = [t == entry or t in chain for t in self._full_reads(name, shape)]
            if all(inside):
                chain.append(name)
            elif any(inside):
                return []
        return chain if last in chain else []
