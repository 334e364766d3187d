"""PTX as Triton prints it: its instructions, each with the registers that it reads and writes.

PTX is the last form of a kernel in which an instruction still says how it computes: whether a division is exact
(`div.rn`) or approximate (`div.full`), whether subnormals are flushed (`.ftz`), how many bytes a thread stores at
once. ptxas makes machine code of it, and changes none of that.

Source: NVIDIA, "Parallel Thread Execution ISA", version 8.7.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Instruction", "Ptx"]

DECLARED = re.compile(r"\.reg\s+\.\w+\s+([^;]+);")
PARAMETER = re.compile(r"\.param \.\w+ [^,\n]*?(\w+_param_\d+)")
WORD = re.compile(r"%?\w+")
LOCATION = re.compile(r"\.loc\s+\d+ \d+ \d+\s*(?://\s*(.*))?")
GUARD = re.compile(r"@!?(%?\w+)\s+")
LABEL = re.compile(r"(\$\w+):")
ADDRESS = re.compile(r"\[\s*([^\]]*?)\s*\]")
VECTOR = re.compile(r"(?:\.v(\d))?\.[a-z]+(\d+)$")
# Instructions whose first operand isn't a register that they write.
WRITES_NOTHING = ("st.", "red.", "bra", "bar.", "barrier.", "ret", "exit", "cp.async", "stmatrix", "fence.", "membar.",
                  "prefetch", "discard.", "trap", "griddepcontrol")  # fmt: skip
UNKNOWN = ("call", "ld.local", "st.local", "cp.async.bulk", "wgmma.", "tcgen05.", "mbarrier.", "brx")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        line: Its line in the PTX, from 1.
        text: Text, as it is printed, without its semicolon.
        opcode: Its name with all modifiers, such as "div.full.f32".
        guard: The predicate under which it runs; None if it always does.
        outputs: The registers that it writes.
        operands: The others, as they are printed.
        inputs: The registers among the operands, those of addresses too.
        source: The line of the Triton program that it was made for, such as "triton_red__0.py:37:16"; may be empty.
    """

    line: int
    text: str
    opcode: str
    guard: str | None
    outputs: tuple[str, ...]
    operands: tuple[str, ...]
    inputs: tuple[str, ...]
    source: str

    @cached_property
    def addresses(self) -> tuple[str, ...]:
        """What stands in brackets, in its order."""
        return tuple(found[1] for operand in self.operands if (found := ADDRESS.match(operand)))

    @cached_property
    def bytes(self) -> int:
        """How many bytes a thread loads or stores by it: those of all elements of its vector."""
        elements, bits = VECTOR.search(self.opcode).groups()
        return int(elements or 1) * int(bits) // 8


class Ptx:
    """The instructions of one kernel.

    Args:
        text: Text of PTX with one kernel.

    Attributes:
        instructions: In their order.
        parameters: Names of the kernel's parameters, in their order.
        labels: The line of each label.

    Raises:
        NotImplementedError: An instruction does what can't be followed here: a call, memory of a thread, a bulk
            copy, a product of warps.
    """

    def __init__(self, text: str) -> None:
        self._registers = _declared(text)
        self.parameters = tuple(dict.fromkeys(PARAMETER.findall(text)))
        self.labels: dict[str, int] = {}
        self.instructions = tuple(self._read(text))

    @cached_property
    def writers(self) -> dict[str, list[Instruction]]:
        """The instructions that write each register; more than one where paths of a loop meet."""
        found: dict[str, list[Instruction]] = {}
        for each in self.instructions:
            for register in each.outputs:
                found.setdefault(register, []).append(each)
        return found

    def registers_in(self, text: str) -> tuple[str, ...]:
        """The registers that a piece of an instruction names."""
        return tuple(word for word in WORD.findall(text) if word in self._registers)

    def _read(self, text: str) -> Iterator[Instruction]:
        source, is_body = "", False
        for number, line in enumerate(text.splitlines(), 1):
            if found := LOCATION.search(line):
                source = (found[1] or "").strip()
                continue
            code = line.partition("//")[0].strip()
            if found := LABEL.match(code):
                self.labels[found[1]] = number
                continue
            is_body |= code == "{"
            if is_body:
                yield from (self._instruction(each, number, source) for each in _statements(code))

    def _instruction(self, text: str, line: int, source: str) -> Instruction:
        guard = GUARD.match(text)
        opcode, _, rest = text[guard.end() if guard else 0 :].partition(" ")
        opcode, operands = opcode.strip(), _operands(rest)
        if opcode.startswith(UNKNOWN):
            raise NotImplementedError(f"PTX line {line}: {text}: what this instruction reads and writes isn't known.")
        writes = operands[:1] if not opcode.startswith(WRITES_NOTHING) else ()
        reads = operands[len(writes) :]
        registers = self.registers_in
        return Instruction(
            line, text, opcode, guard[1] if guard else None, registers(" ".join(writes)), reads,
            registers(" ".join(reads)), source,
        )  # fmt: skip


def _declared(text: str) -> set[str]:
    """Names of all registers: `%r<3>` declares %r1 and %r2 (and %r0); inline assembly declares its own."""
    names: set[str] = set()
    for each in DECLARED.findall(text):
        for name in map(str.strip, each.split(",")):
            stem, _, count = name.partition("<")
            names |= {f"{stem}{number}" for number in range(int(count.rstrip(">")))} if count else {stem}
    return names


def _statements(code: str) -> Iterator[str]:
    """The instructions on a line, without directives and the braces of scopes."""
    for piece in code.replace("\t", " ").split(";"):
        statement = piece.strip()
        if statement.startswith("{"):
            statement = statement[1:].strip()
        if statement and not statement.startswith((".", "}")):
            yield statement


def _operands(text: str) -> tuple[str, ...]:
    """What commas separate, outside of braces and brackets."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return tuple(each.strip() for each in found if each.strip())
