"""A user's functions, and for each kind of annotation a right and a wrong call.

Without checks, torch takes almost all of the wrong calls.
"""

from typing import Any, NamedTuple, TypeVar, Union

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, Integer, Shaped
from torch import Tensor, nn

from tinyblock.typecheck import typecheck


@typecheck
def dot(
    q: Float[Tensor, "*batch query d_k"], k: Float[Tensor, "*batch key d_k"]
) -> Float[Tensor, "*batch query d_k"]:
    return q * k.sum(-2, keepdim=True)


@typecheck
def to_gray(
    image: Float[Tensor, "color=3 height width"],
) -> Float[Tensor, "height width"]:
    return image.mean(0)


@typecheck
def rotate(
    x: Float[Tensor, "*batch seq d_k"], angles: Float[Tensor, "*#batch seq d_k//2"]
) -> Float[Tensor, "*batch seq d_k"]:
    return x + angles.sum()


@typecheck
def mask_out(
    x: Float[Tensor, "query key"], mask: Bool[Tensor, "#query key"] | None
) -> Float[Tensor, "query key"]:
    return x if mask is None else x * mask.sum()


@typecheck
def both(
    x: Float[Tensor, "*#shape"], y: Float[Tensor, "*#shape"]
) -> Float[Tensor, "*shape"]:
    return torch.stack((x.sum(), y.sum())).sum() + torch.zeros(4, 3)


@typecheck
def three(
    x: Float[Tensor, "*#shape"],
    y: Float[Tensor, "*#shape"],
    z: Float[Tensor, "*#shape"],
) -> Tensor:
    return x.sum() + y.sum() + z.sum()


@typecheck
def settled(
    x: Float[Tensor, "*#shape"], y: Float[Tensor, "*shape"], z: Float[Tensor, "*shape"]
) -> Tensor:
    return x + y + z


@typecheck
def settled_first(
    x: Float[Tensor, "*shape"], y: Float[Tensor, "*#shape"], z: Float[Tensor, "*#shape"]
) -> Tensor:
    return x + y + z


@typecheck
def clashing(
    isinstance: Float[Tensor, " n"], __function: Float[Tensor, " n"], result: int = 2
) -> Float[Tensor, "{result}*n"]:
    return isinstance.repeat(result) + 0 * __function.sum()


@typecheck
def last(x: Shaped[Tensor, "... _ 3"]) -> Shaped[Tensor, "..."]:
    return x[..., 0, 0]


@typecheck
def pick(x: Float[Tensor, "rows d"] | Int[Tensor, " rows"], rows: Int[Tensor, " rows"]):
    return x.sum() + rows.sum()


@typecheck
def scaled(
    x: Float[Tensor, "*shape"],
    *,
    by: Union[Float[Tensor, "*shape"], float] = 2.0,  # noqa: UP007
) -> Float[Tensor, "*shape"]:
    return x * by


@typecheck
def head(x: Float[Tensor, "seq d"], count: int = 2) -> Float[Tensor, "{count} d"]:
    return x[:2]


@typecheck
def split(x: Float[Tensor, "seq d"]) -> tuple[Float[Tensor, " d"], Int[Tensor, " seq"]]:
    return x.sum(0), x[0].int() * 0 + 1


@typecheck
def around(
    x: Float[Tensor, "n *batch d"], y: Float[Tensor, "*batch n d"]
) -> Float[Tensor, "n *batch d"]:
    return x + y.sum()


@typecheck
def six_times(x: Float[Tensor, " n"], a: int, b: int) -> Float[Tensor, "{a}*{b}*n"]:
    return x.repeat(6)


@typecheck
def take(x: Float[Tensor, "seq d"], count: Any) -> Float[Tensor, "{count} d"]:
    return x[:2]


@typecheck
def pair(x: Float[Tensor, " n"], count: int) -> tuple[Tensor, Float[Tensor, " n"]]:
    return (x,) * count  # type: ignore[return-value]


@typecheck
def couple(x: Float[Tensor, " n"], kind: type) -> tuple[Float[Tensor, " n"], Tensor]:
    return kind((x, x))


LABEL = object()


@typecheck
def labeled(x: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], object]:
    return x, LABEL


@typecheck
def some(x: Float[Tensor, " n"], count: int) -> tuple[Float[Tensor, " n"], ...]:
    return (x,) * count


ONE = torch.ones(1)


@typecheck
def with_default_tensor(
    x: Float[Tensor, " n"], scale: Float[Tensor, " n"] = ONE
) -> Tensor:
    return x * scale


@typecheck
def with_more(x: Float[Tensor, " n"], *others: Float[Tensor, " n"]) -> Tensor:
    return x + sum(others)


@typecheck
def either(
    x: Float[Tensor, "n 3"] | Float[Tensor, "3 n"], y: Float[Tensor, " 2*n"]
) -> Float[Tensor, "2 2"] | Tensor:
    return x.sum() + y


class Masked(Tensor):
    """A subclass, as DTensor is one."""


Kind = TypeVar("Kind", bound=Tensor)


@typecheck
def with_class(x: Float[Tensor, "n 3"] | object) -> Tensor:
    return torch.as_tensor(x)


@typecheck
def with_subclass(x: Float[Tensor, "n 3"] | Masked) -> Tensor:
    return x + 0


@typecheck
def with_variable(x: Float[Tensor, "n 3"] | Kind) -> Tensor:
    return x + 0


@typecheck
def with_list(
    x: Float[Tensor, "n 3"] | Float[np.ndarray, "n 3"] | list[Tensor],
) -> Tensor:
    return torch.as_tensor(x)


@typecheck
def from_numpy(x: Float[np.ndarray, " n"]) -> Float[Tensor, " n"]:
    return torch.as_tensor(x)


@typecheck
def with_wrong_default(
    x: Float[Tensor, " n"],
    bias: Float[Tensor, " n"] = None,  # type: ignore[assignment]
) -> Tensor:
    return x


@typecheck
def by_text(
    x: Float[Tensor, " n"], y: Float[Tensor, " {size}"], size: str = "2*n"
) -> Tensor:
    return x.sum() + y


@typecheck
def maybe(x: Float[Tensor, " n"], there: bool) -> Float[Tensor, " n"]:
    return x if there else None  # type: ignore[return-value]


@typecheck
class Gain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.gain = nn.Parameter(torch.ones(1))

    def forward(
        self, x: Float32[Tensor, "*batch {self.width}"]
    ) -> Float32[Tensor, "*batch {self.width}"]:
        return x * self.gain

    def widened(
        self, x: Float[Tensor, "{self.width}"], times: Integer[Tensor, "2*{self.width}"]
    ) -> Float[Tensor, "2*{self.width}"]:
        return x.sum() * times


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = Gain(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain(x) + 1


class Case(NamedTuple):
    call: object
    right: tuple[object, ...]
    wrong: tuple[object, ...]
    where: str  # what the error names


ones = torch.ones
int_ones = torch.ones(2).int()
CALLS = {
    "named axis": Case(dot, (ones(2, 5), ones(4, 5)), (ones(2, 5), ones(4, 1)), "'k'"),
    "fixed axis": Case(to_gray, (ones(3, 2, 2),), (ones(1, 2, 2),), "'image'"),
    "number of axes": Case(to_gray, (ones(3, 2, 2),), (ones(3, 2),), "'image'"),
    "*batch": Case(
        dot, (ones(2, 4, 5), ones(2, 4, 5)), (ones(2, 4, 5), ones(1, 4, 5)), "'k'"
    ),
    "number of axes of *batch": Case(
        dot, (ones(2, 4, 5), ones(2, 4, 5)), (ones(2, 4, 5), ones(4, 5)), "'k'"
    ),
    "one axis more of *batch": Case(
        dot, (ones(4, 5), ones(4, 5)), (ones(4, 5), ones(1, 4, 5)), "'k'"
    ),
    "one axis less of *batch": Case(
        dot, (ones(4, 5), ones(4, 5)), (ones(1, 4, 5), ones(4, 5)), "'k'"
    ),
    "axes before and after *batch": Case(
        around,
        (ones(2, 4, 5, 3), ones(4, 5, 2, 3)),
        (ones(1, 3, 3), ones(2, 1, 3)),
        "'y'",
    ),
    "*#batch": Case(
        rotate,
        (ones(2, 4, 6), ones(1, 4, 3)),
        (ones(2, 4, 6), ones(3, 4, 3)),
        "'angles'",
    ),
    "*#batch with more axes": Case(
        rotate, (ones(2, 4, 6), ones(4, 3)), (ones(4, 6), ones(2, 4, 3)), "'angles'"
    ),
    "expression": Case(
        rotate, (ones(4, 6), ones(4, 3)), (ones(4, 6), ones(4, 6)), "'angles'"
    ),
    "#axis": Case(
        mask_out,
        (ones(4, 3), ones(1, 3).bool()),
        (ones(4, 3), ones(2, 3).bool()),
        "'mask'",
    ),
    "None": Case(mask_out, (ones(4, 3), None), (ones(4, 3), ones(4, 3)), "'mask'"),
    "neither tensor nor None": Case(
        mask_out, (ones(4, 3), None), (ones(4, 3), 3), "'mask'"
    ),
    "*# twice": Case(both, (ones(4, 1), ones(3)), (ones(4, 1), ones(2, 3)), "'y'"),
    "*# three times": Case(
        three, (ones(1), ones(3), ones(3)), (ones(1), ones(3), ones(2)), "'z'"
    ),
    "*# before * twice": Case(
        settled, (ones(1), ones(3), ones(3)), (ones(1), ones(1), ones(3)), "'z'"
    ),
    "* before *# twice": Case(
        settled_first, (ones(3), ones(1), ones(3)), (ones(1), ones(1), ones(3)), "'z'"
    ),
    "*# with more axes later": Case(
        both, (ones(3), ones(4, 1)), (ones(3), ones(4, 2)), "'y'"
    ),
    "*#batch that exceeds *batch": Case(
        rotate,
        (ones(2, 4, 6), ones(1, 4, 3)),
        (ones(1, 4, 6), ones(2, 4, 3)),
        "'angles'",
    ),
    "result of *#": Case(both, (ones(4, 1), ones(3)), (ones(5, 1), ones(3)), "result"),
    "axes without names": Case(last, (ones(2, 2, 3),), (ones(2, 2, 4),), "'x'"),
    "union of arrays": Case(
        pick, (ones(2, 3), int_ones), (ones(3).int(), int_ones), "'rows'"
    ),
    "union with a list and another array": Case(
        with_list, (ones(2, 3),), (ones(2, 4),), "'x'"
    ),
    "union with a number": Case(
        scaled, (ones(2), {"by": 3.0}), (ones(2), {"by": ones(1)}), "'by'"
    ),
    "braces": Case(Gain(3), (ones(2, 3),), (ones(2, 1),), "'x'"),
    "method": Case(
        Gain(3).widened, (ones(3), ones(6).int()), (ones(3), ones(3).int()), "'times'"
    ),
    "dtype": Case(Gain(3), (ones(2, 3),), (ones(2, 3).double(),), "'x'"),
    "nested layer": Case(Model(), (ones(2, 3),), (ones(2, 1),), "'x'"),
    "result": Case(head, (ones(4, 3),), (ones(1, 3),), "result"),
    "parameter in braces": Case(head, (ones(4, 3), 2), (ones(4, 3), 3), "result"),
    "parameters in braces": Case(six_times, (ones(3), 2, 3), (ones(3), 2, 2), "result"),
    "tuple of results": Case(split, (ones(3, 3),), (ones(4, 3),), "result"),
    "number of results": Case(pair, (ones(3), 2), (ones(3), 3), "result"),
    "result that is no tuple": Case(
        couple, (ones(3), tuple), (ones(3), list), "result"
    ),
    "result that is no tensor": Case(
        maybe, (ones(3), True), (ones(3), False), "result"
    ),
    "names of the wrapper": Case(
        clashing, (ones(3), ones(3)), (ones(3), ones(2)), "'__function'"
    ),
    "text in braces": Case(
        by_text, (ones(2), ones(4)), (ones(2), ones(4), "3*n"), "'y'"
    ),
    "argument that is no tensor": Case(dot, (ones(2, 5),) * 2, (ones(2, 5), 3), "'k'"),
}

# Cases that differ in what the compiler traces before it finds the wrong value.
KINDS = [
    "named axis",
    "fixed axis",
    "*batch",
    "*#batch",
    "expression",
    "#axis",
    "None",
    "union of arrays",
    "union with a number",
    "braces",
    "method",
    "dtype",
    "nested layer",
    "result",
    "tuple of results",
    "names of the wrapper",
]

# Right calls whose annotations the comparisons of compiled code leave to eager mode.
LEFT_OUT = {
    "tuple with any object": (lambda x: labeled(x)[0], ones(3)),
    "tuple of any length": (some, ones(3), 3),
    "union whose first member fits": (either, ones(2, 3), ones(4)),
    "union whose second member fits": (either, ones(3, 2), ones(4)),
    "union with any object": (with_class, ones(3)),
    "union with a subclass": (with_subclass, ones(3).as_subclass(Masked)),
    "union with a TypeVar": (with_variable, ones(3)),
    "size that is no integer of Python": (take, ones(3, 3), np.int64(2)),
    "array of numpy": (from_numpy, np.ones(3, dtype=np.float32)),
    "default that does not fit": (with_wrong_default, ones(3)),
    "default tensor that does not fit": (with_default_tensor, ones(3)),
    "any number of arguments": (with_more, ones(3), ones(3), ones(3)),
}
