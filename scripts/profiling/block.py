"""This project's block, spelled out as calls that can be timed one by one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from tinyblock import Transformer

from .parts import Call, Part, flat

# FLOPs for each element of the results, of the parts that have no matrix product.
ELEMENTWISE = {
    **dict.fromkeys(["ln1", "ln2", "final norm", "q/k norm"], 4),
    "rope": 3,
    "ffn gate": 5,
    "residual sums": 0.5,  # one of the two results is an input
}


def known_flops(part: Part) -> float | None:
    """Return forward's FLOPs of the parts that FlopCounterMode does not count as needed."""
    if part.name in ELEMENTWISE:
        return ELEMENTWISE[part.name] * sum(out.numel() for out in part.outputs)
    if part.name == "attention":
        # Two products for each score, of which a query needs (seq + 1) / 2 on average.
        queries = part.inputs[0]
        return 2 * queries.numel() * (queries.shape[-2] + 1)
    return None


@dataclass
class Recorder:
    """Makes calls, and keeps each under the name of its part."""

    count: int = 1
    calls: list[tuple[str, Call]] = field(default_factory=list)

    def __call__(
        self,
        part: str,
        run: Callable[..., Any],
        *inputs: Tensor,
        modules: Iterable[Any] = (),
    ) -> Any:
        result = run(*inputs)
        if isinstance(run, nn.Module):
            modules = [run]
        call = Call(run, inputs, flat(result), tuple(modules), self.count)
        self.calls.append((part, call))
        return result


def record_block(model: nn.Module, x: Tensor) -> tuple[list[tuple[str, Call]], Tensor]:
    """Run the first block, and the final norm of a stack; return the calls and the output."""
    blocks: Any = getattr(model, "layers", [model])
    recorder = Recorder(count=len(blocks))
    out = _run_block(recorder, blocks[0], x)
    if isinstance(model, Transformer):
        recorder.count = 1
        out = recorder("final norm", model.ln_final, out)
    return recorder.calls, out


def _run_block(record: Recorder, block: Any, x: Tensor) -> Tensor:
    h = record("ln1", block.ln1, x)
    branch = _run_attention(record, block.attn, h)
    _, y = record("residual sums", _add, x, branch)
    h = record("ln2", block.ln2, y)
    branch = _run_feed_forward(record, block.ffn, h)
    _, out = record("residual sums", _add, y, branch)
    return out


def _run_attention(record: Recorder, attn: Any, h: Tensor) -> Tensor:
    # Each part has functions of its own, which torch.compile compiles for one size.
    def project(h: Tensor) -> tuple[Tensor, ...]:
        split = "... seq (heads d_head) -> ... heads seq d_head"
        projected = attn.q_proj(h), attn.k_proj(h), attn.v_proj(h)
        return tuple(rearrange(each, split, d_head=attn.d_head) for each in projected)

    def normalize(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return attn.q_norm(q), attn.k_norm(k)

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return attn.rope(q, None), attn.rope(k, None)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        merge = "... heads seq d_head -> ... seq (heads d_head)"
        return rearrange(attn.attend(q, k, v, None), merge)

    projections = [attn.q_proj, attn.k_proj, attn.v_proj]
    q, k, v = record("q/k/v projections", project, h, modules=projections)
    if attn.q_norm is not None:
        norms = [attn.q_norm, attn.k_norm]
        q, k = record("q/k norm", normalize, q, k, modules=norms)
    q, k = record("rope", rotate, q, k, modules=[attn.rope])
    merged = record("attention", attend, q, k, v)
    return record("output projection", attn.output_proj, merged)


def _run_feed_forward(record: Recorder, ffn: Any, h: Tensor) -> Tensor:
    def up(h: Tensor) -> tuple[Tensor, Tensor]:
        return ffn.w1(h), ffn.w3(h)

    gate, value = record("ffn up", up, h, modules=[ffn.w1, ffn.w3])
    inner = record("ffn gate", _gate, gate, value)
    return record("ffn down", ffn.w2, inner)


def _gate(gate: Tensor, value: Tensor) -> Tensor:
    return F.silu(gate) * value


def _add(x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
    # x is returned too, because it also goes into a branch: backward adds its gradients.
    return x, x + branch
