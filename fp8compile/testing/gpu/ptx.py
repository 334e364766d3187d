"""Parser for PTX as Triton prints it: instructions with the registers that they read and write.

PTX is the last form of a kernel in which an instruction shows how it computes: whether a division is exact (`div.rn`)
or approximate (`div.full`), whether subnormals are flushed (`.ftz`), how many bytes a thread stores at once. ptxas
translates PTX to machine code without changing any of these.

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
        line: Number of the line in the PTX, from 1.
        text: The text as printed, without the semicolon.
        opcode: The name with all modifiers, such as "div.full.f32".
        guard: The predicate under which the instruction runs; None if it always runs.
        outputs: The registers that the instruction writes.
        operands: The other operands as printed.
        inputs: The registers among the operands, including those in addresses.
        source: The line of Triton source that it comes from, such as "triton_red__0.py:37:16"; may be empty.
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
        """The addresses among the operands: the texts in brackets, in order."""
        return tuple(found[1] for operand in self.operands if (found := ADDRESS.match(operand)))

    @cached_property
    def bytes(self) -> int:
        """Bytes that one thread loads or stores by the instruction, over all elements of a vector."""
        (elements, bits), *_ = VECTOR.findall(self.opcode)
        return int(elements or 1) * int(bits) // 8


class Ptx:
    """The instructions of one kernel.

    Args:
        text: The text of PTX with one kernel.

    Attributes:
        instructions: The instructions in order.
        parameters: Names of the kernel's parameters in order.
        labels: The line of each label.

    Raises:
        NotImplementedError: An instruction is not supported, such as a call, a bulk copy, a matrix product of warps,
            or an access to a thread's local memory.
    """

    def __init__(self, text: str) -> None:
        self._registers = _declared(text)
        self.parameters: tuple[str, ...] = tuple(dict.fromkeys(PARAMETER.findall(text)))
        self.labels: dict[str, int] = {}
        self.instructions: tuple[Instruction, ...] = tuple(self._read(text))

    @cached_property
    def writers(self) -> dict[str, list[Instruction]]:
        """For each register, the instructions that write it; several if branches write it differently."""
        found: dict[str, list[Instruction]] = {}
        for each in self.instructions:
            for register in each.outputs:
                found.setdefault(register, []).append(each)
        return found

    def registers_in(self, text: str) -> tuple[str, ...]:
        """The names of declared registers that occur in ``text``, a part of an instruction."""
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
            raise NotImplementedError(
                f"PTX line {line}: {text}: the operands of this instruction are unknown, so the kernel can't be "
                "analyzed. Please report it with the PTX, and leave this kernel out."
            )
        writes = operands[:1] if not opcode.startswith(WRITES_NOTHING) else ()
        reads = operands[len(writes) :]
        registers = self.registers_in
        return Instruction(
            line, text, opcode, guard[1] if guard else None, registers(" ".join(writes)), reads,
            registers(" ".join(reads)), source,
        )  # fmt: skip


def _declared(text: str) -> set[str]:
    names: set[str] = set()
    for each in DECLARED.findall(text):
        for name in map(str.strip, each.split(",")):
            stem, _, count = name.partition("<")
            names |= {f"{stem}{number}" for number in range(int(count.rstrip(">")))} if count else {stem}
    return names


def _statements(code: str) -> Iterator[str]:
    for piece in code.replace("\t", " ").split(";"):
        statement = piece.strip()
        if statement.startswith("{"):
            statement = statement[1:].strip()
        if statement and not statement.startswith((".", "}")):
            yield statement


def _operands(text: str) -> tuple[str, ...]:
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return tuple(each.strip() for each in found if each.strip())
