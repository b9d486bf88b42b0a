"""PTX text to instructions: one entry function, its registers, labels and constant data."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

from s3d_fast.kernels.ptx.findings import Fault
from s3d_fast.kernels.ptx.values import width


@dataclass(frozen=True)
class Register:
    """A virtual register; `index` numbers the registers of a program."""

    name: str
    index: int
    bits: int  # 1 for a predicate


@dataclass(frozen=True)
class Immediate:
    """A constant, as it is written."""

    text: str


@dataclass(frozen=True)
class Special:
    """A register that the GPU sets, such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """The name of a parameter, of shared memory, of constant data or of a label."""

    name: str


@dataclass(frozen=True)
class Negated:
    """A predicate, negated."""

    register: Register


@dataclass(frozen=True)
class Address:
    """Memory at a base plus an offset in bytes."""

    base: Register | Symbol
    offset: int


@dataclass(frozen=True)
class Vector:
    """Registers or constants in braces; two predicates written p|q are one as well."""

    items: tuple[Scalar, ...]


Scalar: TypeAlias = Register | Immediate | Special | Symbol | Negated
Operand: TypeAlias = Register | Immediate | Special | Symbol | Negated | Address | Vector


@dataclass(frozen=True)
class Instruction:
    """One instruction: `parts` are the words of its opcode."""

    line: int
    text: str
    guard: Register | None
    is_guard_negated: bool
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]

    @property
    def name(self) -> str:
        """The first word of the opcode."""
        return self.parts[0]

    @property
    def registers(self) -> list[Register]:
        """All registers that the instruction names, the guard included."""
        found = [self.guard] if self.guard is not None else []
        for operand in self.operands:
            for item in operand.items if isinstance(operand, Vector) else (operand,):
                item = item.base if isinstance(item, Address) else item
                item = item.register if isinstance(item, Negated) else item
                if isinstance(item, Register):
                    found.append(item)
        return found


@dataclass
class Program:
    """A kernel: what it is made of, before anything is executed."""

    name: str
    threads: int
    parameters: list[tuple[str, str]]  # types and names
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)  # the labels that an indexed branch chooses from
    constants: dict[str, bytes] = field(default_factory=dict)
    registers: list[Register] = field(default_factory=list)
    floats: frozenset[int] = frozenset()  # the registers that hold float32 or float64 numbers, see `provenance`


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)\s*((?:\.\w+[ \t]+[\d, ]+\s*)*)\{", re.S)
_CONSTANT = re.compile(r"^\.(?:global|const)\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[\d+\]\s*=\s*\{([^}]*)\}", re.M)
_DIRECTIVES = re.compile(r"^[ \t]*\.(?:loc|file|pragma)\b[^\n]*$", re.M)
_LABEL = re.compile(r"\s*(\$[\w$]+):")
_STATEMENT = re.compile(r"(?:@(!?)(%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
SHARED = "global_smem"


def parse(ptx: str) -> Program:
    """Return the kernel of a PTX file with one entry.

    Raises:
        Fault: the text has no entry, or a statement that is not understood.
    """
    # Lines keep their numbers: whatever is removed leaves its line breaks.
    text = _DIRECTIVES.sub("", re.sub(r"//[^\n]*", "", ptx))
    entry = _ENTRY.search(text)
    if entry is None:
        raise Fault("the PTX has no entry")
    threads = re.search(r"\.(?:req|max)ntid\s+(\d+)((?:\s*,\s*\d+)*)", entry[3])
    if threads is None:
        raise Fault(f"{entry[1]}: the PTX does not say how many threads a program has")
    if any(int(size) != 1 for size in threads[2].replace(",", " ").split()):
        raise Fault(f"{entry[1]}: the threads of a program have more than one axis, {threads[0]}")
    program = Program(entry[1], int(threads[1]), _parameters(entry[2]))
    for found in _CONSTANT.finditer(text):
        program.constants[found[1]] = bytes(int(number, 0) & 255 for number in found[2].split(","))
    _Body(program, text, entry.end()).parse()
    return program


def _parameters(text: str) -> list[tuple[str, str]]:
    found = []
    for parameter in filter(None, map(str.strip, text.split(","))):
        kind = re.search(r"\.([usbf]\d+)", parameter)
        if kind is None:
            raise Fault(f"parameter {parameter}")
        found.append((kind[1], parameter.split()[-1]))
    return found


class _Body:
    """Reads the statements between the braces of an entry. Inner braces open a scope with registers of its own."""

    def __init__(self, program: Program, text: str, start: int) -> None:
        self.program, self.text, self.place = program, text, start
        self.line = text.count("\n", 0, start) + 1
        self.scopes: list[dict[str, Register]] = [{}]
        # Families such as %r<100>: the bits of each, by prefix.
        self.families: dict[str, int] = {}

    def parse(self) -> None:
        while self.scopes:
            self.skip(re.compile(r"\s*"))
            rest = self.text[self.place : self.place + 1]
            if not rest:
                raise Fault(f"{self.program.name}: the PTX ends inside the entry")
            if rest == "{":
                self.scopes.append({})
                self.skip(re.compile(r"\{"))
            elif rest == "}":
                self.scopes.pop()
                self.skip(re.compile(r"\}"))
            elif (label := _LABEL.match(self.text, self.place)) is not None:
                self.skip(_LABEL)
                self.label(label[1])
            else:
                self.statement()

    def skip(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.place)
        assert found is not None
        self.line += found[0].count("\n")
        self.place = found.end()
        return found[0]

    def label(self, name: str) -> None:
        table = re.compile(r"\s*\.branchtargets([^;]*);")
        if table.match(self.text, self.place):
            targets = self.skip(table).strip().removeprefix(".branchtargets").rstrip(";")
            self.program.tables[name] = [target.strip() for target in targets.split(",")]
        else:
            self.program.labels[name] = len(self.program.code)

    def statement(self) -> None:
        line = self.line
        text = self.skip(re.compile(r"[^;]*;"))[:-1].strip()
        if text.startswith(".reg"):
            self.declare(text)
            return
        found = _STATEMENT.fullmatch(text)
        if found is None:
            raise Fault(f"{self.program.name}, PTX line {line}: cannot read {text!r}")
        guard = self.register(found[2]) if found[2] else None
        operands = tuple(self.operand(part) for part in _split(found[4]))
        # Modifiers may follow a colon, as in shared::cta.
        parts = tuple(found[3].replace("::", ":").split("."))
        text = " ".join(text.split())
        self.program.code.append(Instruction(line, text, guard, found[1] == "!", parts, operands))

    def declare(self, text: str) -> None:
        _, kind, names = text.split(None, 2)
        bits = width(kind[1:])
        for name in map(str.strip, names.split(",")):
            family = re.fullmatch(r"(.*)<\d+>", name)
            if family:
                self.families[family[1]] = bits
            else:
                self.scopes[-1][name] = self.add(name, bits)

    def add(self, name: str, bits: int) -> Register:
        register = Register(name, len(self.program.registers), bits)
        self.program.registers.append(register)
        return register

    def register(self, name: str) -> Register:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        prefix = name.rstrip("0123456789")
        if prefix not in self.families:
            raise Fault(f"{self.program.name}, PTX line {self.line}: unknown register {name}")
        return self.scopes[0].setdefault(name, self.add(name, self.families[prefix]))

    def is_register(self, name: str) -> bool:
        prefix = name.rstrip("0123456789")
        return any(name in scope for scope in self.scopes) or (name != prefix and prefix in self.families)

    def operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return Vector(tuple(self.scalar(part) for part in _split(text.strip("{} \n\t"))))
        if text.startswith("["):
            found = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
            if found is None:
                raise Fault(f"{self.program.name}, PTX line {self.line}: cannot read the address {text}")
            base = self.register(found[1]) if self.is_register(found[1]) else Symbol(found[1])
            return Address(base, int(found[2] or "0", 0))
        if "|" in text:
            return Vector(tuple(self.scalar(part.strip()) for part in text.split("|")))
        return self.scalar(text)

    def scalar(self, text: str) -> Scalar:
        if text.startswith("!"):
            return Negated(self.register(text[1:]))
        if self.is_register(text):
            return self.register(text)
        if text.startswith("%"):
            return Special(text)
        return Immediate(text) if re.match(r"-?\d", text) else Symbol(text)


def _split(text: str) -> list[str]:
    """Return the operands of a statement: commas inside of brackets do not separate."""
    if "{" not in text:
        return [part.strip() for part in text.split(",") if part.strip()]
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]
