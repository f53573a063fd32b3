"""Single changes of an equation, such as students make: of its text, a line each.

The same change of several lines counts as one: x @ wq.T -> x @ wq, with wk and wv alike.
"""

import ast
import difflib
import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

# One name of a row may stand in place of another.
SIBLINGS = (
    ("mean", "sum", "amax", "std", "var"),
    ("sqrt", "rsqrt", "square", "abs"),
    ("silu", "sigmoid", "relu", "gelu", "tanh", "softplus"),
    ("softmax", "sigmoid", "exp"),
    ("cos", "sin", "tan"),
    ("tril", "triu"),
)
OPERATORS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Pow: "**",
    ast.MatMult: "@",
    ast.BitAnd: "&",
}
OTHER_OPERATORS = {
    "+": ("-", "*"),
    "-": ("+",),
    "*": ("/", "+"),
    "/": ("*",),
    "**": ("*",),
    "&": ("|",),
}
MODULES = ("torch", "F")
# The names of equations.py, by what they stand for. All others are tensors.
KINDS = {
    "number": ("eps", "theta", "d_k", "d_model", "num_heads", "group", "seq"),
    "weight": ("weight", "wq", "wk", "wv", "wo", "w1", "w2", "w3"),
    "function": ("norm1", "norm2", "attention", "ffn", "attention_without_rope"),
    "mask": ("mask", "shown"),
    "positions": ("positions",),
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
# What may stand in place of a number.
NUMBERS = {
    "eps": ("0", "1e-3", "1e-5", "1e-6", "1e-8", "eps**2"),
    "theta": ("1", "10000.0", "None"),
    "d_k": ("1", "d_model", "q.shape[-2]", "k.shape[-2]", "v.shape[-1]"),
    "-1": ("-2", "-3", "0", "1", "(-2, -1)"),  # an axis
    "-torch.inf": ("0", "1", "-1", "1e-9", "-1e-9", "torch.inf"),
}
# What may be done to a value `_` of a kind.
INSERTED = {
    "tensor": (
        "-_",
        "2 * _",
        "_ / 2",
        "_ / d_k**0.5",
        "_ + 1",
        "_ + x",
        "_ - _.mean(-1, keepdim=True)",
        "_.sqrt()",
        "_.mT",
        "_.flip(-1)",
        "F.silu(_)",
        "F.relu(_)",
        "norm1(_)",
        "norm2(_)",
    ),
    "weight": ("1 + _", "_.mT"),
    "mask": ("~_", "_.mT"),
    "positions": (
        "_ + 1",
        "_ - 1",
        "torch.arange(x.shape[-2])",
        "torch.arange(_.shape[-1])",
        "_[..., :1] + torch.arange(_.shape[-1])",
        "_ - _[..., :1]",
        "_[:1]",
        "_.reshape(-1, _.shape[-1])[0]",
        "_[..., None, :]",
        "_.flip(-1)",
    ),
}


@dataclass(frozen=True)
class Change:
    """A function of equations.py, and its lines before and after a change."""

    function: str
    before: tuple[str, ...]
    after: tuple[str, ...]

    def size(self) -> tuple[bool, int, int]:
        """Return whether there are more lines, how many more letters, and how many others."""
        old, new = ("\n".join(lines) for lines in self.lines())
        matcher = difflib.SequenceMatcher(a=old, b=new, autojunk=False)
        same = sum(block.size for block in matcher.get_matching_blocks())
        is_longer = len(self.after) > len(self.before)
        return is_longer, len(new) - len(old), len(old) - same

    def lines(self) -> tuple[list[str], list[str]]:
        """Return the lines that differ, before and after."""
        if sorted(self.before) != sorted(self.after) and len(self.before) == len(
            self.after
        ):
            pairs = zip(self.before, self.after, strict=True)
            different = [(old, new) for old, new in pairs if old != new]
            return [old for old, _ in different], [new for _, new in different]
        start = end = 0
        while self.before[start] == self.after[start]:
            start += 1
        shorter = min(len(self.before), len(self.after)) - start
        while end < shorter and self.before[-1 - end] == self.after[-1 - end]:
            end += 1
        return (
            list(self.before[start : len(self.before) - end]),
            list(self.after[start : len(self.after) - end]),
        )


def changes_of(function: str, text: str, run: set[int]) -> Iterator[Change]:
    """Yield the changes of a function: of one line, of the order, of several lines alike.

    They are of the lines that have run, by their numbers.
    """
    before = tuple(text.splitlines())
    start = next(i for i, line in enumerate(before) if line.endswith(":")) + 1
    names = re.findall(r"\w+", " ".join(before[:start]))[2:]
    arguments = tuple(names)
    alike = defaultdict(list)
    for number in range(start, len(before)):
        if before[number].endswith(":") or number not in run:
            continue
        head, value = parts_of(before[number])
        for key, new in value_changes(head.strip(" ="), value, names):
            if key:
                alike[key].append((number, head + new))
            yield Change(function, before, with_lines(before, {number: head + new}))
        targets = re.findall(r"\w+", head.partition("=")[0])
        names += [name for name in targets if name not in (*names, "return")]
    for after in orders(before, run - {len(before) - 1}, arguments):
        yield Change(function, before, after)
    for same in alike.values():
        for first, last in itertools.combinations(range(len(same) + 1), 2):
            if last - first > 1:
                lines = with_lines(before, dict(same[first:last]))
                yield Change(function, before, lines)


def parts_of(line: str) -> tuple[str, str]:
    """Split "    x = y" or "    return y" before its value."""
    head, mark, value = line.partition(" = ")
    if not mark:
        head, mark, value = line.partition("return ")
    return head + mark, value


def with_lines(lines: tuple[str, ...], new: dict[int, str]) -> tuple[str, ...]:
    return tuple(new.get(number, line) for number, line in enumerate(lines))


def orders(
    before: tuple[str, ...], run: set[int], arguments: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    """Yield the lines with one elsewhere, left out, twice, for another name, or more."""
    if not run:
        return
    start = min(run)
    for number in sorted(run):
        line = before[number]
        if line.endswith(":"):
            continue
        indent = line[: -len(line.lstrip())]
        is_alone = before[number - 1].endswith(":") and not before[
            number + 1
        ].startswith(indent)
        without = before[: number - is_alone] + before[number + 1 :]
        yield without
        yield (*before[:number], line, *before[number:])
        for place in range(max(start, number - 3), min(number + 4, len(without))):
            if re.match(rf"{indent}\S", without[place]) and not is_alone:
                yield (*without[:place], line, *without[place:])
        target = line.split()[0]
        if re.search(rf"= .*\b{target}\b", line) and KIND_OF.get(target) is None:
            for other in "qkv":  # rope(v), as rope(k) before
                new = re.sub(rf"\b{target}\b", other, line)
                yield (*before[: number + 1], new, *before[number + 1 :])
    for line in other_arguments(arguments):
        yield (*before[:start], f"    {line}", *before[start:])


def other_arguments(arguments: tuple[str, ...]) -> Iterator[str]:
    """Yield lines that exchange two arguments, or give one another value."""
    for one, other in itertools.combinations(arguments, 2):
        if KIND_OF.get(one) == KIND_OF.get(other) in ("weight", None):
            yield f"{one}, {other} = {other}, {one}"
    for name in arguments:
        values = other_values(name, KIND_OF.get(name, "tensor"), arguments)
        for new in (*values, *other_numbers(name, arguments)):
            yield f"{name} = {ast.unparse(ast.parse(new))}"


def value_changes(
    target: str, value: str, names: list[str]
) -> Iterator[tuple[str, str]]:
    """Yield each other value once, with a key that is the same for the same change.

    What is inserted has none: it does not come in several lines.
    """
    seen = {value, target}  # y = y: see the lines that are left out
    if target == "return":
        yield from (("", name) for name in names if name not in KIND_OF)
    replaced = itertools.chain(
        replaced_parts(value, names), moved_calls(value), exchanged_names(value, names)
    )
    for news in (replaced, inserted(target, value, names)):
        for new in news:
            tidy = ast.unparse(ast.parse(new))
            if tidy not in seen:
                seen.add(tidy)
                yield key_of(value, tidy) if news is replaced else "", tidy
    yield from without_transposition(value)
    # The two axes that a pattern of einops joins.
    for one, other in set(re.findall(r"\((\w+) (\w+)\)", value)):
        old, new = f"({one} {other})", f"({other} {one})"
        yield f"{old} -> {new}", value.replace(old, new)


def without_transposition(value: str) -> Iterator[tuple[str, str]]:
    """Yield a pattern of einops that splits or merges heads, as a change of shape alone."""
    if found := re.match(r"rearrange\((\w+), .* heads seq d_k\", d_k=d_k\)", value):
        name = found[1]
        yield "split", f"{name}.reshape(*{name}.shape[:-2], -1, seq, d_k)"
    if found := re.match(r"rearrange\((\w+), .* seq \(heads d_k\)\"\)", value):
        yield "merge", f"{found[1]}.reshape(*x.shape[:-1], -1)"


def key_of(value: str, new: str) -> str:
    """Return what a change does, with numbers in place of the names in the value."""
    is_name = r"(?<![.\w])[a-z]\w*"
    in_order = list(dict.fromkeys(re.findall(is_name, value)))
    numbers = {name: f"_{number}" for number, name in enumerate(in_order)}
    return re.sub(
        is_name, lambda found: numbers.get(found[0], found[0]), f"{value} -> {new}"
    )


def values_in(value: str) -> list[ast.expr]:
    """Return the expressions in a value, without the names of functions and modules."""
    tree = ast.parse(value, mode="eval").body
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.expr)]
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    return [
        node
        for node in nodes
        if id(node) not in called
        and not isinstance(node, ast.Slice)
        and getattr(node, "id", "") not in MODULES
    ]


def inserted(target: str, value: str, names: list[str]) -> Iterator[str]:
    """Yield the value with something done to it, or to a name in it."""
    yield from other_values(value, KIND_OF.get(target, "tensor"), names)
    for node in values_in(value):
        if isinstance(node, ast.Name):
            part = node.id
            for new in other_values(part, KIND_OF.get(part, "tensor"), names):
                yield f"{value[: node.col_offset]}({new}){value[node.end_col_offset :]}"


def replaced_parts(value: str, names: list[str]) -> Iterator[str]:
    """Yield the value with another expression in place of a part of it."""
    for node in values_in(value):
        for new in replacements(value, node, names):
            yield f"{value[: node.col_offset]}({new}){value[node.end_col_offset :]}"


def replacements(value: str, node: ast.expr, names: list[str]) -> Iterator[str]:
    def text(part: ast.expr) -> str:
        return f"({value[part.col_offset : part.end_col_offset]})"

    yield from other_numbers(text(node)[1:-1], names)
    match node:
        case ast.BinOp(left, operator, right):
            sign = OPERATORS[type(operator)]
            yield from other_operations(text(left), sign, text(right))
            if isinstance(left, ast.BinOp):  # a / b * c -> a / (b * c)
                a, b, c = text(left.left), text(left.right), text(right)
                yield f"{a} {OPERATORS[type(left.op)]} ({b} {sign} {c})"
        case ast.UnaryOp(_, operand) if text(node) != "(-1)":
            yield text(operand)
        case ast.Call(function, arguments, keywords):
            yield from other_calls(
                value[function.col_offset : function.end_col_offset],
                [text(each)[1:-1] for each in arguments],
                [f"{each.arg}={text(each.value)}" for each in keywords],
                names,
            )
        case ast.Attribute(owner, "T" | "mT") | ast.Subscript(owner):
            yield text(owner)
        case ast.Constant(int() | float() as number):
            yield from map(str, (number + 1, number - 1, 2 * number, -number, 0))
        case ast.Name(name):
            yield from (
                each for each in names if KIND_OF.get(each) == KIND_OF.get(name)
            )


def other_numbers(number: str, names: Collection[str]) -> Iterator[str]:
    """Yield what may stand in place of a number."""
    for new in NUMBERS.get(number, ()):
        is_known = all(
            name in names for name in re.findall(r"\b(?:[qkv]|d_\w+)\b", new)
        )
        if is_known:
            yield new


def other_values(whole: str, kind: str, names: Collection[str]) -> Iterator[str]:
    """Yield what may be done to a value."""
    for new in INSERTED.get(kind, ()):
        if all(name in names for name in re.findall(r"\b(?:[qkx]|d_k|norm\d)\b", new)):
            yield re.sub(r"\b_\b", f"({whole})", new)


def other_operations(left: str, sign: str, right: str) -> Iterator[str]:
    """Yield one operand alone, both exchanged, and other operators."""
    yield left
    yield right
    yield f"{right} {sign} {left}"
    for other in OTHER_OPERATORS.get(sign, ()):
        yield f"{left} {other} {right}"


def other_calls(
    function: str, arguments: list[str], keywords: list[str], names: list[str]
) -> Iterator[str]:
    """Yield a call's operand alone, a call twice, and calls of a sibling or otherwise."""
    owner, dot, name = function.rpartition(".")
    is_method = owner not in ("", *MODULES)
    given = [*arguments, *keywords]
    yield owner if is_method else arguments[0]
    others = [each for each in names if KIND_OF.get(each) == "function"]
    for row in (*SIBLINGS, others):
        for other in row if name in row else ():
            yield f"{owner}{dot}{other}({', '.join(given)})"
    if name == "masked_fill":
        yield f"{owner} + mask"
        yield f"{owner} * mask"
    if name == "silu":
        yield f"F.gelu({', '.join(given)}, approximate='tanh')"
    for index in range(len(given)):
        yield f"{function}({', '.join(given[:index] + given[index + 1 :])})"
    for first, second in itertools.combinations(range(len(arguments)), 2):
        order = list(arguments)
        order[first], order[second] = order[second], order[first]
        yield f"{function}({', '.join(order + keywords)})"
    if is_method:
        yield f"{owner}.{name}()"
        yield f"{owner}.{name}({', '.join(given)}).{name}({', '.join(given)})"
    else:
        again = [f"{function}({', '.join(given)})", *given[1:]]
        yield f"{function}({', '.join(again)})"


def operand_of(call: ast.Call) -> ast.expr:
    """Return a of f(a, b), torch.f(a, b), and a.f(b)."""
    match call.func:
        case ast.Attribute(ast.Name(module)) if module in MODULES:
            return call.args[0]
        case ast.Attribute(owner):
            return owner
    return call.args[0]


def span_of(node: ast.expr) -> tuple[int, int]:
    return node.col_offset, node.end_col_offset or 0


def moved_calls(value: str) -> Iterator[str]:
    """Yield the value with a call around another part: f(a) + b -> f(a + b)."""
    nodes = values_in(value)
    for call in nodes:
        if not isinstance(call, ast.Call):
            continue
        operand = operand_of(call)
        begin, end = span_of(call)
        inner, after = span_of(operand)
        for node in nodes:
            at, to = span_of(node)
            is_argument = begin <= at and to <= end and not inner <= at < to <= after
            if node in (call, operand) or is_argument:
                continue
            edits = [
                (begin, inner, "("),
                (after, end, ")"),
                (at, at, f"{value[begin:inner]}("),
                (to, to, f"){value[after:end]}"),
            ]
            new = value
            for first, last, text in sorted(edits, reverse=True):
                new = new[:first] + text + new[last:]
            yield new


def exchanged_names(value: str, names: list[str]) -> Iterator[str]:
    """Yield the value with two names of one kind exchanged."""
    there = [name for name in names if re.search(rf"(?<![.\w]){name}\b", value)]
    for one, other in itertools.combinations(there, 2):
        if KIND_OF.get(one) == KIND_OF.get(other):
            yield "".join(
                {one: other, other: one}.get(word, word)
                for word in re.split(r"(?<![.\w])(\w+)\b", value)
            )
