"""Finds the instructions in a kernel's PTX that compute a stored number, walking back to loads.

    st.global [codes], %r9 --> cvt.e4m3x2 --> min, max --> mul --+--> multiplier: div.rn.f64 --> amax --> load
                                                                 |
                                                                 +--> value --> cvt.rn.bf16.f32 | the model

The walk ends at loads from global memory and at roundings to 16 bits (`cvt.rn.bf16.f32`, an addition in bfloat16).
Code before such a rounding is the model's own function, which may be approximate. Code after it is the arithmetic of
scales and codes, which has to be exact. Casts see rounded values on purpose (`fp8compile.ops.rounding_barrier`), so
each activation has such a rounding or is loaded as 16 bits. In a float32 model the two kinds of code can't be told
apart, and the walk goes through the model's functions too.

The walk may find too much, but never too little: a register counts as having every value that is written to it, and
the conditions of branches are followed too. Triton uses shared memory as scratch: an operator (a reduction, a change
of layout, a prefetch) stores there and loads again, and both instructions are marked with the operator's line in the
Triton source. So a load is assumed to read the stores of its line; if there are none, all shared stores.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from fp8compile.testing.gpu.ptx import Instruction, Ptx

__all__ = ["stored_to", "traced"]

ROUNDED_TO_16_BITS = re.compile(r"(cvt\.r[nzmp]\S*\.b?f16(x2)?\.f32|(add|sub|mul|fma)(\.\w+)*\.b?f16(x2)?)$")
SHARED_LOADS = ("ld.shared", "ldmatrix")
SHARED_STORES = ("st.shared", "stmatrix", "cp.async.cg", "cp.async.ca")
GLOBAL_LOADS = ("ld.global", "atom.global")


class _Walk:
    def __init__(self, ptx: Ptx) -> None:
        self._ptx = ptx
        self._shared = [each for each in ptx.instructions if each.opcode.startswith(SHARED_STORES)]
        self.found: dict[int, Instruction] = {}

    def follow(self, registers: Iterable[str]) -> None:
        todo = list(registers)
        seen: set[str] = set()
        while todo:
            register = todo.pop()
            if register in seen:
                continue
            seen.add(register)
            for writer in self._ptx.writers.get(register, ()):
                todo += self._through(writer)

    def _through(self, instruction: Instruction) -> tuple[str, ...]:
        """Record an instruction, and return the registers to follow from it; () at a load or a 16-bit rounding."""
        if id(instruction) in self.found:
            return ()
        self.found[id(instruction)] = instruction
        if ROUNDED_TO_16_BITS.search(instruction.opcode) or instruction.opcode.startswith(GLOBAL_LOADS):
            return ()
        if instruction.opcode.startswith(SHARED_LOADS):
            same = [store for store in self._shared if store.source and store.source == instruction.source]
            return tuple(register for store in same or self._shared for register in self._stored(store))
        guard = (instruction.guard,) if instruction.guard else ()
        return instruction.inputs + guard

    def _stored(self, store: Instruction) -> tuple[str, ...]:
        self.found[id(store)] = store
        return () if store.opcode.startswith("cp.async") else _values(self._ptx, store)


def _values(ptx: Ptx, store: Instruction) -> tuple[str, ...]:
    return ptx.registers_in(store.operands[1])


def _parameters_in(ptx: Ptx, address: str) -> set[int]:
    found: set[int] = set()
    todo, seen = list(ptx.registers_in(address)), set()
    while todo:
        register = todo.pop()
        for writer in ptx.writers.get(register, ()) if register not in seen else ():
            if writer.opcode.startswith("ld.param"):
                found.add(ptx.parameters.index(writer.addresses[0].partition("+")[0]))
            elif not writer.opcode.startswith("ld."):
                todo += writer.inputs
        seen.add(register)
    return found


def stored_to(ptx: Ptx, parameters: Iterable[int]) -> list[Instruction]:
    """Find the stores and atomic updates of global memory through the given pointers.

    Args:
        ptx: The kernel.
        parameters: Positions of the pointers among the kernel's parameters.
    """
    wanted = set(parameters)
    stores = (each for each in ptx.instructions if each.opcode.startswith(("st.global", "atom.global", "red.global")))
    return [each for each in stores if wanted & _parameters_in(ptx, each.addresses[0])]


def traced(ptx: Ptx, stores: Iterable[Instruction]) -> list[Instruction]:
    """Find the instructions that compute what ``stores`` write.

    Args:
        ptx: The kernel.
        stores: The stores, as `stored_to` returns them.

    Returns:
        The instructions in the order of the PTX.
    """
    walk = _Walk(ptx)
    for store in stores:
        walk.follow(_values(ptx, store))
    for branch in ptx.instructions:
        if branch.opcode.startswith("bra") and branch.guard:
            walk.follow((branch.guard,))
    return sorted(walk.found.values(), key=lambda each: each.line)
